from __future__ import annotations

import pytest

from autopar.cost.demand import Demand, price_demands
from autopar.cost.moves import relayout_demand
from autopar.cost.program import call_demand, price
from autopar.cost.roofline import RooflinePricer
from autopar.cost.sync import exposed_s, optimizer_demand, sync_demand
from autopar.graph import BROADCAST, PARTIAL, REPLICATE, CollectiveKey
from autopar.plan import POLICIES, LayerStrategy, MeshAxis
from autopar.shard.lower import lower
from autopar.shard.program import Call, Program
from autopar.shard.storage import ParameterStorage
from tests.cost.small import ROWS, WIDTH, cluster, feed_forward

MESH = (MeshAxis("d0", 2, 4), MeshAxis("d1", 4, 1))
X = feed_forward().values["x"]
PRICER = RooflinePricer(cluster())


def program(sizes: tuple[int, ...]) -> Program:
    same = (REPLICATE,) * len(sizes)
    return lower(feed_forward(), LayerStrategy(same, same, {}, {}), sizes, X, X)


def test_price_is_the_sum_of_its_calls() -> None:
    """A layer without layout changes costs what its calls cost one by one, all of it from the roofline."""
    found = program((2, 4))
    calls = [call_demand(s, found, feed_forward(), 8, MESH) for s in found.steps if isinstance(s, Call)]
    alone = price_demands(calls, PRICER)
    cost = price(found, feed_forward(), 8, MESH, PRICER)
    assert cost.forward_s == pytest.approx(alone.forward_s.sum())
    assert cost.backward_s == pytest.approx(alone.backward_s.sum())
    assert cost.communication_s == 0
    assert cost.by_source == pytest.approx({"roofline": cost.forward_s + cost.backward_s})


def test_change_from_partial_to_split() -> None:
    """Reduce-scatter forward, all-gather backward, both of the whole tensor over the inner axis."""
    demand = relayout_demand(X, (REPLICATE, PARTIAL), (REPLICATE, 1), MESH, 8)
    size = 8 * ROWS * WIDTH * 4
    assert demand.forward_collectives == (CollectiveKey("reduce_scatter", size, 4, 1),)
    assert demand.backward_collectives == (CollectiveKey("all_gather", size, 4, 1),)


def test_gradient_of_a_broadcast_is_summed() -> None:
    """R to B costs nothing forward and an all-reduce backward, over the outer axis with stride 4."""
    demand = relayout_demand(X, (REPLICATE, REPLICATE), (BROADCAST, REPLICATE), MESH, 8)
    assert demand.forward_collectives == ()
    assert demand.backward_collectives == (CollectiveKey("all_reduce", 8 * ROWS * WIDTH * 4, 2, 4),)


def kinds(demand: Demand) -> list[tuple[str, int, int]]:
    return [(k.kind, k.bytes, k.ranks) for k in (*demand.forward_collectives, *demand.backward_collectives)]


@pytest.mark.parametrize(
    ("zero", "micro", "step"),
    [
        (0, [], [("all_reduce", 4000, 2)]),
        (1, [], [("reduce_scatter", 4000, 2), ("all_gather", 2000, 2)]),
        (2, [("all_gather", 2000, 2), ("reduce_scatter", 4000, 2)], []),
        (3, [("all_gather", 2000, 2), ("all_gather", 2000, 2), ("reduce_scatter", 4000, 2)], []),
    ],
)
def test_synchronisation_of_each_zero_level(
    zero: int, micro: list[tuple[str, int, int]], step: list[tuple[str, int, int]]
) -> None:
    """1000 parameters in bf16 with fp32 gradients over two data ranks: which collectives, how often, how large."""
    found = sync_demand(1000, ParameterStorage((0,) if zero else (), (0,), zero), True, MESH, POLICIES["bf16"])
    assert (kinds(found.micro), kinds(found.step)) == (micro, step)


def test_further_axes_are_summed_once_a_step() -> None:
    """B on an axis that is no data axis: one all-reduce more; with ZeRO 0 both axes in one."""
    whole, sharded = ParameterStorage((), (0, 1), 0), ParameterStorage((0,), (0, 1), 3)
    assert kinds(sync_demand(1000, whole, True, MESH, POLICIES["fp32"]).step) == [("all_reduce", 4000, 8)]
    assert kinds(sync_demand(1000, sharded, True, MESH, POLICIES["fp32"]).step) == [("all_reduce", 2000, 4)]


def test_what_is_no_share_is_summed_whole_before_it_is_dealt_out() -> None:
    """R on the data axis, B on another: the whole gradient is all-reduced there, the shards are gathered."""
    found = sync_demand(1000, ParameterStorage((0,), (1,), 1), True, MESH, POLICIES["fp32"])
    assert kinds(found.step) == [("all_reduce", 4000, 4), ("all_gather", 4000, 2)]


def test_parameters_without_gradient_are_only_gathered() -> None:
    """A frozen parameter kept in shards is gathered once a step, a whole one costs nothing."""
    for storage, wanted in (
        (ParameterStorage((0,), (), 1), [("all_gather", 4000, 2)]),
        (ParameterStorage((), (), 0), []),
    ):
        found = sync_demand(1000, storage, False, MESH, POLICIES["fp32"], 4)
        assert (kinds(found.micro), kinds(found.step)) == ([], wanted)


def test_one_rank_needs_no_synchronisation() -> None:
    """Nothing to sum over: no collective at any level."""
    found = sync_demand(1000, ParameterStorage((), (), 0), True, MESH, POLICIES["fp32"])
    assert kinds(found.micro) + kinds(found.step) == []


def test_overlap_hides_at_most_its_share() -> None:
    """Of 3 s beside 2 s of compute at overlap 0.5, one is hidden; beside 10 s half of it."""
    assert exposed_s(3.0, 2.0, 0.5) == 2.0
    assert exposed_s(3.0, 10.0, 0.5) == 1.5


def test_adamw_step_passes_over_its_tensors() -> None:
    """A foreach step of AdamW moves 2+3+2+4+2+2+2+4 tensors, at half of 100 GB/s, with few launches."""
    times = price_demands([optimizer_demand([10**9], POLICIES["fp32"], "adamw")], PRICER)
    assert float(times.forward_s[0]) == pytest.approx(21 * 4e9 / 5e10 + 1e-6)


def test_gradients_of_a_value_read_twice_are_added() -> None:
    """x goes into the first product and the sum: in the backward pass the product's gradient is added to the sum's."""
    found = program((1,))
    calls = {s.op.name: call_demand(s, found, feed_forward(), 8, MESH[:1]) for s in found.steps if isinstance(s, Call)}
    assert [key.target for key in calls["first"].backward_ops] == ["aten.add_.Tensor"]
    assert calls["first"].backward_ops[0].args[0].shape == (8, ROWS, WIDTH)  # type: ignore[attr-defined]
    assert calls["second"].backward_ops == calls["sum"].backward_ops == ()
