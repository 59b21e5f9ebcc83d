from __future__ import annotations

import pytest
import torch

from autopar.emit.peak import live_tensor_bytes
from autopar.graph import DeviceArg, Dtype, Operand, OpKey
from autopar.measure.local import local_cluster
from autopar.measure.ops import OpTrial, release_buffers, time_op
from autopar.measure.profile import Sample, Timing
from autopar.measure.session import measuring

CPU = torch.device("cpu")
F = "float32"


def floats(*shape: int, grad: bool = True, dtype: str = F) -> Operand:
    return Operand(shape, dtype, grad)


def ints(*shape: int) -> Operand:
    return Operand(shape, "int64", False)


RUNNABLE = [
    OpKey("aten.linear.default", (floats(2, 8, 16), floats(32, 16), floats(32))),
    OpKey("aten.embedding.default", (floats(10, 16), ints(2, 8))),
    OpKey("aten.cross_entropy_loss.default", (floats(16, 50), ints(16))),
    OpKey("aten.scaled_dot_product_attention.default", (floats(2, 4, 8, 16),) * 3 + (None, 0.0, True)),
    OpKey("aten.to.dtype", (floats(8), Dtype("bfloat16"))),
    OpKey("aten.split.Tensor", (floats(8, 6), 2, 1)),
    OpKey("aten.cat.default", ((floats(8, 6), floats(8, 2)), 1)),
    OpKey("aten.gather.default", (floats(8, 6), 1, ints(8, 2))),
    OpKey("aten.layer_norm.default", (floats(4, 16), (16,), floats(16), floats(16))),
    OpKey("aten.mul.Tensor", (floats(4, 16, dtype="bfloat16"), 2.0)),
]


@pytest.mark.parametrize("key", RUNNABLE, ids=lambda k: k.target)
def test_ops_are_timed_both_ways(key: OpKey) -> None:
    """Built from its key alone, each op runs forward and backward, several times."""
    timing = time_op(key, CPU, budget_s=0.002)
    assert timing.failed == ""
    assert len(timing.forward.raw_s) == len(timing.backward.raw_s) >= 3
    assert timing.forward_s > 0


def test_without_gradient_there_is_no_backward() -> None:
    """Creation and integer ops are timed forward only."""
    for key in (
        OpKey("aten.arange.default", (16,), (("device", DeviceArg()),)),
        OpKey("aten.eq.Scalar", (ints(8), 3)),
        OpKey("aten.relu.default", (floats(8, grad=False),)),
    ):
        timing = time_op(key, CPU, budget_s=0.001)
        assert (timing.failed, timing.backward.raw_s, timing.backward_s) == ("", (), 0.0)


def test_what_cannot_run_is_recorded_as_failed() -> None:
    """Shapes that don't fit, and ops that don't exist, say why and have no seconds."""
    for key in (
        OpKey("aten.mm.default", (floats(2, 3), floats(4, 5))),
        OpKey("aten.no_such_op.default", (floats(2),)),
    ):
        timing = time_op(key, CPU)
        assert timing.failed
        assert timing.forward.raw_s == ()


def test_larger_products_take_longer() -> None:
    """A product of 64 times the work takes at least four times as long, even on a busy machine."""
    small, large = (time_op(OpKey("aten.mm.default", (floats(n, n), floats(n, n))), CPU) for n in (128, 512))
    assert min(large.forward.raw_s) > 4 * min(small.forward.raw_s)
    assert min(large.backward.raw_s) > 4 * min(small.backward.raw_s)


def test_an_optimizer_step_is_timed_as_a_share_of_one_over_many() -> None:
    """A parameter of 64 times the elements takes at least eight times as long; nothing is differentiated."""
    small, large = (
        time_op(OpKey("optimizer.adamw.foreach", (floats(n, grad=False),)), CPU) for n in (1 << 14, 1 << 20)
    )
    assert (small.failed, large.failed, large.backward_s) == ("", "", 0.0)
    assert min(large.forward.raw_s) > 8 * min(small.forward.raw_s)


def test_operands_are_other_memory_each_time() -> None:
    """Two forward runs of one trial read different places of the pool, so that none is found in a cache."""
    trial = OpTrial(OpKey("aten.linear.default", (floats(4, 64), floats(32, 64))), CPU)
    (_, first), (_, second) = trial.forward(CPU), trial.forward(CPU)
    places = [t.data_ptr() for run in (first, second) for t in run.wanted]
    assert len(set(places)) == len(places) == 4


def test_timing_leaves_no_memory_behind() -> None:
    """After a session no more bytes are held than before it."""
    release_buffers()
    before = live_tensor_bytes(CPU)
    with measuring(CPU) as session:
        session.ops(RUNNABLE[:1])
        assert live_tensor_bytes(CPU) > before
    assert live_tensor_bytes(CPU) <= before


def test_seconds_are_means() -> None:
    """Of three runs, one of them slow, each costs the third part of what all take: that is what many add up to."""
    timing = Timing(Sample((1.0, 1.0, 4.0)), Sample((2.0, 4.0)))
    assert (timing.forward_s, timing.backward_s) == (2.0, 3.0)


def test_alone_there_are_no_collectives() -> None:
    """A session without a job times ops and says that one rank is busy."""
    with measuring(CPU) as session:
        assert session.environment.busy_ranks == 1
        assert set(session.ops(RUNNABLE[:2])) == set(RUNNABLE[:2])
        assert session.collectives([]) == {}


def test_this_machine_is_a_cluster() -> None:
    """Two processes share the memory there is; every figure is positive."""
    one, two = local_cluster(CPU, 1), local_cluster(CPU, 2)
    assert (one.devices, two.devices) == (1, 2)
    assert two.device.memory_bytes == one.device.memory_bytes // 2 > 0
    assert one.device.backend == "cpu"
    assert one.device.name
