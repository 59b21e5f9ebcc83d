"""Random views and changes of layout of dims of any length: real processes make what one rank makes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from autopar.graph import BROADCAST, PARTIAL, REPLICATE, Extent, LayerClass, Layout
from autopar.plan import LayerStrategy
from autopar.shard.lower import lower
from autopar.shard.relayout import gradient_layout
from autopar.shard.rules import assignments, rule_for
from tests.examples import examples
from tests.pool import Pool
from tests.shard.interpreter import Mesh, make_op, run, run_whole
from tests.shard.transformer import spec

DEVICES = {(4,): 4, (2, 2): 4, (3,): 3}
PLACEMENTS = [0, 1, 2, REPLICATE, PARTIAL, BROADCAST]


class Case(NamedTuple):
    """A tensor of some samples, viewed as another shape (a dim of `-1`: so many of every sample) and changed in layout.

    `pick` chooses among the legal splits of the view, `source` and `target` are layouts in front of and behind it.
    """

    shape: tuple[Extent, ...]
    view: tuple[Extent, ...]
    batch: int
    pick: int
    source: Layout
    target: Layout


@st.composite
def cases(draw: st.DrawFn, axes: int) -> Case:
    """Dims cut into factors, which are merged anew with their neighbours; the first may grow with the batch."""
    factors = draw(st.lists(st.integers(1, 7), min_size=2, max_size=4))
    grows = draw(st.booleans())

    def merged() -> tuple[Extent, ...]:
        cuts = sorted(draw(st.sets(st.integers(1, len(factors) - 1), max_size=2)))
        groups = [factors[a:b] for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True)]
        lengths = [int(torch.tensor(group).prod()) for group in groups]
        first = Extent(lengths[0]) if grows else Extent(0, lengths[0])
        return (first, *(Extent(0, n) for n in lengths[1:]))

    shape, view = merged(), merged()
    layouts = [tuple(draw(st.sampled_from(PLACEMENTS)) for _ in range(axes)) for _ in range(2)]
    source, target = (
        tuple(p if p < len(dims) else REPLICATE for p in layout)
        for layout, dims in zip(layouts, (shape, view), strict=True)
    )
    return Case(shape, view, draw(st.integers(4, 9)), draw(st.integers(0, 99)), source, target)


def wrong(sizes: tuple[int, ...], given: list[Case]) -> list[Case]:
    """Cases whose result or gradient differs from that of one rank."""
    mesh = Mesh(sizes)
    return [case for case in given if not _is_right(mesh, case)]


def _is_right(mesh: Mesh, case: Case) -> bool:
    x, y = spec(*case.shape), spec(*case.view)
    op = make_op("y", "aten.view.default", "x", case.view)
    layer = LayerClass(("x",), (), (), (op,), ("y",), {"x": x, "y": y})
    rule = rule_for(op, layer)
    assert rule is not None
    choices = assignments(rule, op, layer, mesh.sizes, case.batch)
    factors = choices[case.pick % len(choices)]
    relays = {"x": case.source, "y": case.target}
    strategy = LayerStrategy((REPLICATE,) * len(mesh.sizes), (REPLICATE,) * len(mesh.sizes), {"y": factors}, relays)
    program = lower(layer, strategy, mesh.sizes, x, y, main_input="x", main_output="y")
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-9, 9, x.shape_at(case.batch), generator=generator).double()
    weight = torch.randint(-9, 9, y.shape_at(case.batch), generator=generator).double()
    leaf = mesh.shard(whole, program.layouts["x"], x).requires_grad_()
    made = run(program, mesh, case.batch, {"x": leaf})[program.outputs[0]]
    torch.autograd.backward(made, mesh.shard(weight, gradient_layout(program.layouts[program.outputs[0]]), y))
    assert leaf.grad is not None
    gradient = mesh.whole(leaf.grad, gradient_layout(program.layouts["x"]))
    truth: Tensor = run_whole(layer, case.batch, {"x": whole})["y"]
    return made.allclose(truth) and gradient.allclose(weight.reshape(whole.shape))


@examples(6, suppress=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), sizes=st.sampled_from(sorted(DEVICES)))
def test_views_of_any_length_in_any_layout(pool: Pool, data: st.DataObject, sizes: tuple[int, ...]) -> None:
    """Six times twenty random views, splits and changes of layout in front and behind: value and gradient, exactly."""
    given_cases = data.draw(st.lists(cases(len(sizes)), min_size=20, max_size=20))
    assert pool.run(DEVICES[sizes], wrong, sizes, given_cases) == [[]] * DEVICES[sizes]
