"""Lowered layers: run for real on rank processes, and what becomes of strategies that don't fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.errors import PlanError
from autopar.graph import BROADCAST, REPLICATE, LayerClass, TensorSpec
from autopar.plan import LayerStrategy
from autopar.shard.localize import groups_of
from autopar.shard.lower import lower
from autopar.shard.program import Program, Relayout
from autopar.shard.relayout import gradient_layout
from tests.pool import Pool
from tests.shard.interpreter import Mesh, make_op, run, run_whole
from tests.shard.transformer import EVEN, UNEVEN, B, Dims, random_strategy, spec, transformer, whole_values


def largest_differences(sizes: tuple[int, ...], batch: int, dims: Dims, seeds: range) -> list[tuple[float, int]]:
    """Of a layer under random strategies: the largest relative difference of loss, outputs and gradients, by seed."""
    torch.set_default_dtype(torch.float64)
    layer, mesh = transformer(dims), Mesh(sizes)
    whole = whole_values(layer, batch, seed=0)
    leaves = {n: whole[n].clone().requires_grad_() for n in layer.params}
    truth = run_whole(layer, batch, whole | leaves)
    weight = torch.randn_like(truth["out"].detach(), generator=None)
    torch.autograd.backward(truth["loss"] + (truth["out"] * weight).sum())
    return [(_difference(layer, mesh, batch, seed, whole, truth, leaves, weight), seed) for seed in seeds]


def _difference(layer, mesh, batch, seed, whole, truth, leaves, weight) -> float:  # type: ignore[no-untyped-def]
    strategy = random_strategy(layer, mesh.sizes, batch, seed)
    program = lower(layer, strategy, mesh.sizes, layer.values["ids"], layer.values["out"])
    local = {n: mesh.shard(t, program.layouts[n], program.values[n]) for n, t in whole.items()}
    for name in layer.params:
        local[name].requires_grad_()
    values = run(program, mesh, batch, local)
    loss, out = (values[n] for n in program.outputs)
    gradients = [torch.ones_like(loss), mesh.shard(weight, program.layouts[program.outputs[1]])]
    torch.autograd.backward([loss, out], gradients)
    worst = relative(mesh.whole(loss, program.layouts[program.outputs[0]]), truth["loss"])
    worst = max(worst, relative(mesh.whole(out, program.layouts[program.outputs[1]]), truth["out"]))
    for name in layer.params:
        found = local[name].grad
        held = torch.zeros_like(local[name]) if found is None else found
        gradient = mesh.whole(held, gradient_layout(program.layouts[name]))
        worst = max(worst, relative(gradient, leaves[name].grad))
    return worst


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the largest true element; infinite where the shapes differ."""
    if found.shape != truth.shape:
        return float("inf")
    return float((found - truth).detach().abs().max() / truth.detach().abs().max())


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
@pytest.mark.parametrize(("dims", "batch"), [(EVEN, 8), (UNEVEN, 9)])
def test_random_strategies_equal_one_device(pool: Pool, sizes: tuple[int, ...], dims: Dims, batch: int) -> None:
    """A transformer layer with loss under 20 random strategies on 4 ranks, fp64: loss, output, gradients.

    Where no dim divides, shards are unequal, some empty, and heads are recut in front of attention.
    """
    for results in pool.run(4, largest_differences, sizes, batch, dims, range(20)):
        wrong = [(d, seed) for d, seed in results if not d < 1e-9]
        assert not wrong


X = spec(B, 4, 8)
SPLIT = (0,)


def chain(**changes: TensorSpec) -> LayerClass:
    """x -> relu -> a -> a * a -> y, with a flag beside x that nobody reads but the next layer."""
    values = {"x": X, "flag": spec(B, dtype="int64", grad=False), "a": X, "y": X} | changes
    ops = (make_op("a", "aten.relu.default", "x"), make_op("y", "aten.mul.Tensor", "a", "a"))
    return LayerClass(("flag", "x"), (), (), ops, ("y", "flag"), values)


def lowered(layer: LayerClass, strategy: LayerStrategy, **names: str) -> Program:
    return lower(layer, strategy, (2,), X, X, **names)


def relayouts(program: Program) -> list[tuple[str, str]]:
    return [(s.source, s.result) for s in program.steps if isinstance(s, Relayout)]


def test_inputs_and_outputs_follow_the_main_values() -> None:
    """The main value lies as the strategy says; what crosses beside it is split only where main's batch is."""
    program = lowered(chain(), LayerStrategy((1,), SPLIT, {"a": ("d1",), "y": ("d1",)}, {}))
    assert (program.layouts["x"], program.layouts["flag"]) == ((1,), (REPLICATE,))
    assert program.outputs == ("y__s0", "flag__s0")
    assert relayouts(program) == [("y", "y__s0"), ("flag", "flag__s0")]


def test_main_values_can_be_named() -> None:
    """Where several values look like the main one, names tell which it is; '' says that none is."""
    strategy = LayerStrategy((1,), (1,), {"a": ("d1",), "y": ("d1",)}, {})
    assert lowered(chain(), strategy, main_input="x", main_output="y").layouts["x"] == (1,)
    other = lowered(chain(), strategy, main_input="", main_output="")
    assert other.layouts["x"] == (REPLICATE,)
    assert other.outputs == ("y__r", "flag")


def test_a_relayout_is_made_once() -> None:
    """Two reads in one layout share one relayout, and a relay comes before every reader."""
    program = lowered(chain(), LayerStrategy(SPLIT, SPLIT, {"a": ("d0",), "y": ("d1",)}, {}))
    assert relayouts(program) == [("a", "a__s1"), ("y", "y__s0")]
    relayed = lowered(chain(), LayerStrategy(SPLIT, SPLIT, {"a": ("d0",), "y": ("d1",)}, {"a": (REPLICATE,)}))
    assert relayouts(relayed) == [("a", "a__r"), ("a__r", "a__s1"), ("y", "y__s0")]


def test_unnamed_ops_are_replicated() -> None:
    """An op the strategy does not name is run whole by every rank."""
    program = lowered(chain(), LayerStrategy(SPLIT, (REPLICATE,), {}, {}))
    assert relayouts(program) == [("x", "x__r"), ("flag", "flag__r")]
    assert program.layouts["y"] == (REPLICATE,)


def test_broadcast_is_replicated_where_no_gradient_flows() -> None:
    """A relay to broadcast costs nothing for a value without gradient, and an all-reduce of its gradient for others."""
    strategy = LayerStrategy((REPLICATE,), (REPLICATE,), {}, {"a": (BROADCAST,)})
    assert [s.backward[0].kind for s in lowered(chain(), strategy).steps if isinstance(s, Relayout)] == [
        "all_reduce",
        "divide",
    ]
    plain = replace(X, requires_grad=False)
    assert not relayouts(lowered(chain(x=plain, a=plain, y=plain), strategy))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (LayerStrategy(SPLIT, SPLIT, {"b": ("d0",)}, {}), "strategy.ops names b"),
        (LayerStrategy(SPLIT, SPLIT, {}, {"b": SPLIT}), "strategy.relays names b"),
        (LayerStrategy(SPLIT, SPLIT, {"a": ("k",)}, {}), r"op a \(aten.relu.default\).*'d0'"),
        (LayerStrategy(SPLIT, SPLIT, {"a": ("d0", "")}, {}), "mesh of 1 axes"),
        (LayerStrategy((5,), SPLIT, {}, {}), "S5"),
        (LayerStrategy(SPLIT, (0, 0), {}, {}), "S0 S0"),
    ],
)
def test_what_does_not_fit_is_refused(strategy: LayerStrategy, message: str) -> None:
    """A strategy that names what the layer has not, or splits what can't be split, is a PlanError that says so."""
    with pytest.raises(PlanError, match=message):
        lowered(chain(), strategy)


def test_whole_numbers_never_become_partial() -> None:
    """A relay that would deal out integers as summands is refused, naming the value."""
    number = replace(X, dtype="int64", requires_grad=False)
    with pytest.raises(PlanError, match="int64"):
        lowered(chain(x=number, a=number, y=number), LayerStrategy(SPLIT, SPLIT, {}, {"a": (-2,)}))


def test_groups_are_those_that_moves_and_kernels_use() -> None:
    """Every set of axes over which a program communicates is named, in axis order."""
    layer = transformer()
    strategy = LayerStrategy((REPLICATE,) * 2, (REPLICATE,) * 2, {"embedded": ("v", "v")}, {})
    program = lower(layer, strategy, (2, 2), layer.values["ids"], layer.values["out"])
    assert groups_of(program) == ((0, 1),)
