from __future__ import annotations

import pytest
import torch

from autopar.cost.activations import Activations, activations, outputs_saved
from autopar.cost.memory import LayerMemory, layer_memory
from autopar.cost.states import Uses, held_parameters, state_bytes
from autopar.emit.peak import live_tensor_bytes, measured_peak_tensor_bytes
from autopar.graph import BROADCAST, REPLICATE
from autopar.plan import POLICIES, DtypePolicy, LayerStrategy
from autopar.shard.lower import lower
from autopar.shard.program import Program
from autopar.shard.rules import rule_for
from autopar.shard.storage import BUCKET_BYTES, ParameterStorage
from tests.cost.small import HIDDEN, ROWS, WIDTH, FeedForward, feed_forward

BATCH = 6
X = BATCH * ROWS * WIDTH * 4  # bytes of the layer's input; the hidden values are four times as large
WEIGHTS = 2 * HIDDEN * WIDTH
ALL = Uses()


def lowered(strategy: LayerStrategy, sizes: tuple[int, ...]) -> Program:
    layer = feed_forward()
    return lower(layer, strategy, sizes, layer.values["x"], layer.values["out"])


def whole(recompute: str = "none") -> Program:
    return lowered(LayerStrategy((REPLICATE,), (REPLICATE,), {}, {}, 0, recompute), (1,))


def test_hand_computed_layer() -> None:
    """Saved x, h, a (1+4+4); the most at once beyond that is 5: in the gradient of `down`'s product and of gelu."""
    # product: saved 9 + gradient of out 1 + of a 4 = 14; gelu: x and h 5 + of a 4 + of h 4 + of x 1 = 14; 14 - 9 = 5
    found = activations(whole(), BATCH)
    assert (found.saved, max(found.forward, found.backward)) == (9 * X, 5 * X)


def test_saved_equals_what_torch_saves() -> None:
    """The bytes autograd really keeps for the layer, parameters apart, are the predicted ones."""
    module = FeedForward()
    storages: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = torch.randn(BATCH, ROWS, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = module(x)
    for parameter in module.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    assert sum(storages.values()) == activations(whole(), BATCH).saved


def measured_peak_bytes(module: FeedForward, x: torch.Tensor) -> int:
    """Most bytes allocated at once in forward and backward beyond what was there before, by the profiler's events."""
    gradient = torch.ones_like(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        module(x).backward(gradient)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_peak_equals_what_torch_allocates() -> None:
    """Saved and transient bytes add up to the allocator's real peak of one forward and backward pass.

    So they do where gradients of parameters are made anew in that pass.
    """
    module, x = FeedForward(), torch.randn(BATCH, ROWS, WIDTH, requires_grad=True)
    found = activations(whole(), BATCH, accumulates=True)
    # x and the gradient of out were there before the measurement; the caller holds out until the backward has returned
    assert found.saved + found.growing - 2 * X + X == measured_peak_bytes(module, x)
    x.grad = None
    assert found.saved + found.backward - 2 * X + X == measured_peak_bytes(module, x)


def split(dims: dict[str, int], entry: int, stored: dict[str, int]) -> LayerStrategy:
    """On the one axis each op splits dim `dims[op]` of its first operand."""
    layer = feed_forward()
    ops: dict[str, tuple[str, ...]] = {}
    for op in layer.ops:
        rule = rule_for(op, layer)
        assert rule is not None
        ops[op.name] = (rule.operands[0][dims[op.name]] if op.name in dims else "",)
    ops["first"] = ops["first"] if "first" in dims else (rule_for(layer.ops[0], layer).operands[1][0],)  # type: ignore[union-attr]
    return LayerStrategy((entry,), (entry,), ops, {name: (dim,) for name, dim in stored.items()})


def memory(
    program: Program, policy: DtypePolicy, optimizer: str = "adamw", zero: int = 0, data_axes: tuple[int, ...] = (),
    uses: Uses = ALL, staged: bool = False,
) -> LayerMemory:  # fmt: skip
    parameters = held_parameters(program, data_axes, zero, uses)
    return layer_memory(program, BATCH, policy, optimizer, parameters, activations(program, BATCH), staged=staged)


def test_tensor_parallel_layer_keeps_its_share() -> None:
    """Split two ways on the hidden dim, h and a are halved, x is whole, and each parameter is halved."""
    program = lowered(split({"act": 2, "second": 2}, REPLICATE, {"up": 0, "down": 1}), (2,))
    assert activations(program, BATCH).saved == X + 2 * 2 * X
    found = memory(program, POLICIES["fp32"])
    assert (found.parameters, found.optimizer) == (4 * WEIGHTS // 2, 8 * WEIGHTS // 2)


def test_recomputation_keeps_inputs_only() -> None:
    """With full recomputation the input stays, and everything else is needed at once in the backward."""
    found = memory(whole("full"), POLICIES["fp32"])
    assert (found.saved, found.transient) == (X, 8 * X + 5 * X)


def data_parallel(sizes: tuple[int, ...]) -> Program:
    """The batch split on the first axis, nothing on others."""
    rest = (REPLICATE,) * (len(sizes) - 1)
    layer, stored = feed_forward(), (BROADCAST, *rest)
    ops = {}
    for op in layer.ops:
        rule = rule_for(op, layer)
        assert rule is not None
        ops[op.name] = (rule.operands[0][0], *("" for _ in rest))
    strategy = LayerStrategy((0, *rest), (0, *rest), ops, {"up": stored, "down": stored})
    return lowered(strategy, sizes)


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    # fp32 compute would need no copy; with bf16 stored as fp32: 4 master, 4 gradient, 8 states; copies are as wide as
    # the values of the layer (4)
    [(0, 4.0, 4.0, 8.0), (1, 4 / 4 + 4, 4.0, 2.0), (2, 4 / 4, 1.0, 2.0), (3, 4 / 4, 1.0, 2.0)],
)
def test_zero_shards_states(zero: int, parameters: float, gradients: float, optimizer: float) -> None:
    """Over four ranks ZeRO 1 shards states and stored values, 2 gradients, too, 3 the copies, which 2 saves."""
    found = memory(data_parallel((4,)), POLICIES["fp32"], zero=zero, data_axes=(0,))
    assert (found.parameters, found.gradients, found.optimizer) == (
        parameters * WEIGHTS, gradients * WEIGHTS, optimizer * WEIGHTS
    )  # fmt: skip
    shard = 1 / 4 if zero else 1.0
    assert found.saved == memory(data_parallel((4,)), POLICIES["fp32"]).saved + (4 * WEIGHTS if zero == 2 else 0)
    storage = ParameterStorage((0,) if zero else (), (0,), zero)
    held = state_bytes(1.0, shard, storage, True, "float32", POLICIES["fp32"], "adamw")
    assert held.reduced == 4 * shard
    assert held.parameters * WEIGHTS == found.parameters
    assert (held.gradients + held.optimizer) * WEIGHTS == found.gradients + found.optimizer


def test_zero_deals_out_what_is_whole_on_the_data_axis_only() -> None:
    """Weights split on the data axis are not dealt out again; replicated on it they are, gradients stay whole."""
    split_there = lowered(split({"act": 2, "second": 2}, REPLICATE, {"up": 0, "down": 1}), (2,))
    found = memory(split_there, POLICIES["fp32"], zero=1, data_axes=(0,))
    assert (found.parameters, found.gradients, found.optimizer) == (2 * WEIGHTS, 2 * WEIGHTS, 4 * WEIGHTS)
    whole_there = lowered(LayerStrategy((REPLICATE,), (REPLICATE,), {}, {}), (2,))
    for zero in (1, 2, 3):
        found = memory(whole_there, POLICIES["fp32"], zero=zero, data_axes=(0,))
        assert (found.parameters, found.gradients, found.optimizer) == (6 * WEIGHTS, 4 * WEIGHTS, 4 * WEIGHTS)


def test_tied_parameters_are_owned_once() -> None:
    """A parameter that an earlier layer owns costs its gradient here, one that a later layer reads all but that."""
    found = memory(whole(), POLICIES["fp32"], "sgd", uses=Uses(frozenset({"up", "down"})))
    assert (found.parameters, found.gradients, found.optimizer) == (0, 4 * WEIGHTS, 0)
    found = memory(whole(), POLICIES["fp32"], uses=Uses(pending=frozenset({"up", "down"})))
    assert (found.parameters, found.gradients, found.reduced) == (4 * WEIGHTS, 0, 0)


def test_inputs_saved_by_an_earlier_layer_are_held() -> None:
    """The layer saves its input, so whoever reads that next keeps it for free."""
    assert outputs_saved(feed_forward()) == {"x"}
    assert activations(whole(), BATCH, held=frozenset({"x"})).saved == 8 * X
    assert activations(whole("full"), BATCH, held=frozenset({"x"})).saved == 0


def test_what_later_layers_count_on_is_kept_here() -> None:
    """An output that a later layer takes to be kept counts here, whether an op of the layer saves it or not."""
    # in the backward pass that output is gone: the most at once is as it was, less here as more is called saved
    for recompute, saved, backward in (("none", 10, 4), ("full", 2, 12)):
        found = activations(whole(recompute), BATCH, promised=frozenset({1}))
        assert (found.saved, found.backward) == (saved * X, backward * X)
    assert activations(whole(), BATCH, promised=frozenset({0})).saved == 9 * X
    assert activations(whole("full"), BATCH, promised=frozenset({0})).saved == X


def test_no_gradient_comes_back_for_what_nobody_reads() -> None:
    """Without a gradient of its output the layer has no backward: beyond 9 only y and out exist, at the sum."""
    assert activations(whole(), BATCH, unread=frozenset({0})) == Activations(9 * X, 2 * X, 0, 0)


def test_what_waits_for_gradients_of_weights_counts_once() -> None:
    """Put off: x, act (4) and gradients of up (4) and down. Most waits at act: x, up, act, the gradients of these two
    and of the output, of which 9 were saved."""
    found = activations(whole(), BATCH)
    assert (found.put_off, found.parting) == (10 * X, 9 * X)
    again = activations(whole("full"), BATCH)
    assert (again.saved, again.put_off, again.saved + again.parting) == (X, 10 * X, 18 * X)


def test_gradients_of_weights_are_late_where_products_alone_read_them() -> None:
    """Both weights belong to products, so all gradients are late; what another layer reads, too, isn't."""
    assert memory(whole(), POLICIES["fp32"]).late == 4 * WEIGHTS
    assert memory(whole(), POLICIES["fp32"], uses=Uses(frozenset({"up"}))).late == 2 * WEIGHTS


def test_policy_with_equal_dtypes_needs_no_copies() -> None:
    """ZeRO 0 with parameters in the compute dtype keeps each once."""
    policy = DtypePolicy("float32", "float32", "float32", "float32")
    found = state_bytes(1.0, 1.0, ParameterStorage((), (), 0), False, "float32", policy, "sgd")
    assert (found.parameters, found.gradients, found.optimizer) == (4, 0, 0)


def test_broadcast_parameters_are_whole() -> None:
    """A data-parallel layer holds whole parameters and its share of the activations."""
    everywhere = {"first": 0, "act": 0, "second": 0, "sum": 0}
    program = lowered(split(everywhere, 0, {"up": BROADCAST, "down": BROADCAST}), (2,))
    assert activations(program, BATCH).saved == 9 * X // 2
    assert memory(program, POLICIES["fp32"]).parameters == 4 * WEIGHTS


@pytest.mark.parametrize(("optimizer", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_update_bytes_are_those_of_a_real_optimizer_step(optimizer: str, kind: type[torch.optim.Optimizer]) -> None:
    """What torch's foreach implementation allocates in a step, over all parameters at once."""
    module = FeedForward()
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    stepper = kind(module.parameters(), lr=1e-3, foreach=True)  # type: ignore[call-arg]
    stepper.step()
    held = live_tensor_bytes("cpu")
    measured = measured_peak_tensor_bytes(stepper.step, "cpu") - held
    assert measured == pytest.approx(memory(whole(), POLICIES["fp32"], optimizer).update, abs=64)


def test_reduced_gradients_go_through_a_bucket() -> None:
    """Whole gradients are flattened, of as many layers as fill a bucket, then updated where they are dealt."""
    program = data_parallel((4,))
    parameters = held_parameters(program, (0,), 1)
    for share, wanted in ((1.0, 4 * WEIGHTS), (3.0, 12 * WEIGHTS), (1e9, BUCKET_BYTES)):
        walked = activations(program, BATCH)
        found = layer_memory(program, BATCH, POLICIES["fp32"], "adamw", parameters, walked, model_share=share)
        assert (found.step, found.update) == (wanted, WEIGHTS)
    assert memory(program, POLICIES["fp32"]).step == 4 * WEIGHTS
    assert memory(program, POLICIES["fp32"]).reduced == 4 * WEIGHTS


def test_a_stage_keeps_gradients_whole() -> None:
    """In a pipeline FSDP's gradients are whole until they are scattered once a step, from a buffer of their size."""
    for zero in (2, 3):
        found = memory(data_parallel((4,)), POLICIES["fp32"], zero=zero, data_axes=(0,), staged=True)
        assert (found.gradients, found.reduced, found.step) == (4 * WEIGHTS, WEIGHTS, 4 * WEIGHTS)
