"""Plans for clusters of nodes that differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cluster import Cluster, Link, MixedCluster, Wires, load_cluster, mixed_cluster
from autopar.cost.mixed import MixedPricer, SlowestPricer
from autopar.cost.roofline import RooflinePricer
from autopar.engine.partition import partitions
from autopar.errors import ConfigError, InfeasibleError
from autopar.formulate.config import ManualConfig
from autopar.formulate.pipelines.ground import ground_on, placed_devices
from autopar.formulate.pipelines.scenario import PipelineScenario
from autopar.formulate.planner import Planner
from autopar.formulate.record.recost import recost, require_fit
from autopar.graph import CollectiveKey, Operand, OpKey
from autopar.plan import POLICIES, Request
from autopar.trace import trace
from autopar.trace.models.spec import load_model
from tests.formulate.cases import planner, traced

ETHERNET = Link("Ethernet", 1e9, 5e-5)


def _part(devices: str, speed: float = 1.0, network: str = "one") -> Cluster:
    found = load_cluster(devices)
    return replace(found, network=network, device=replace(found.device, speed=speed))


def _mixed(*parts: Cluster, wires: Wires | None = None) -> MixedCluster:
    return mixed_cluster("ours", parts, ETHERNET, wires)


def _planner(model: str, cluster: MixedCluster, constraints: tuple[str, ...] = (), limit: int | None = None) -> Planner:
    request = Request(
        model, cluster.name, cluster.device.name, cluster.devices, 8, "bf16", POLICIES["bf16"], "adamw",
        memory_limit_bytes=limit, constraints=constraints,
    )  # fmt: skip
    return Planner(traced(model), cluster, MixedPricer(cluster, RooflinePricer), request)


@pytest.mark.parametrize("text", ["pp=2,dp=2,zero=1", "pp=4", "dp=4", "pp=2,tp=2,virtual_stages=1"])
def test_equal_parts_cost_what_one_cluster_does(text: str) -> None:
    """A plan on two parts that don't differ after all takes what it takes on an ordinary cluster of their nodes."""
    parts = _part("2xa100-80gb"), _part("2xa100-80gb")
    config = ManualConfig.parse(text)
    mixed = _planner("gpt", _mixed(*parts)).estimate(config)
    usual = planner("gpt", "2x2xa100-80gb", 8).estimate(config)
    assert mixed.placement == usual.placement
    assert mixed.step_time_s == pytest.approx(usual.step_time_s, rel=1e-9)
    assert mixed.memory_by_category == usual.memory_by_category


def test_a_slow_stage_is_slow_in_proportion() -> None:
    """At half speed a stage's kernels take twice as long; what a device doesn't compute takes as long as before."""
    record = _planner("gpt", _mixed(_part("1xa100-80gb"), _part("1xa100-80gb", 0.5))).estimate(ManualConfig(pp=2))
    usual = planner("gpt", "2x1xa100-80gb", 8).estimate(ManualConfig(pp=2))
    fast, slow = (sum(c.pass_s["forward"] for c in record.costs.layers if c.stage == s) for s in range(2))
    equal = [sum(c.pass_s["forward"] for c in usual.costs.layers if c.stage == s) for s in range(2)]
    assert fast == pytest.approx(equal[0])
    assert 1.5 < slow / equal[1] <= 2.0


def test_both_laps_of_a_v_are_on_their_group() -> None:
    """Priced anew from the plan alone, stages there and back have the pace of the group that runs them."""
    cluster = _mixed(_part("1xa100-80gb"), _part("1xa100-80gb", 0.5))
    record = _planner("tied-20", cluster).estimate(ManualConfig(pp=2, schedule="zbv"))
    again = recost(record, MixedPricer(cluster, RooflinePricer))
    assert again.step_time_s == pytest.approx(record.step_time_s, rel=1e-9)
    paces = [
        [sum(c.pass_s["forward"] for c in r.costs.layers if c.stage == s) for s in range(4)] for r in (record, again)
    ]
    assert paces[1] == pytest.approx(paces[0])
    assert paces[0][1] > 1.4 * paces[0][0]


def test_the_other_way_round_is_not_alike() -> None:
    """What a pipeline from the fast part to the slow one takes says nothing of one the other way round."""
    maker = _planner("gpt", _mixed(_part("2xa100-80gb"), _part("2xa100-80gb", 0.5)))
    found = [s for s in maker.space.searched(4, None) if isinstance(s, PipelineScenario) and s.shape.schedule == "1f1b"]
    one, other = (s for s in found if s.shape.groups == 2 and s.shape.num_microbatches == 4)
    assert one.shape == other.shape
    assert one.alike != other.alike


def test_a_group_that_is_too_small_is_named() -> None:
    """A plan that fits the roomy group alone is refused on the cluster, with the device that can't hold it."""
    roomy, small = load_cluster("2x1xa100-80gb"), _mixed(_part("1xa100-80gb"), _part("1xa100-40gb"))
    record = planner("gpt", roomy.name, 8).estimate(ManualConfig(pp=2))
    held = record.costs.group_memory
    large = tuple({**of, "parameters": 60 << 30} for of in held)
    record = replace(record, costs=replace(record.costs, group_memory=large))
    found = recost(record, MixedPricer(small, RooflinePricer))
    assert not found.feasible
    with pytest.raises(InfeasibleError, match=r"group 1, a100-40gb"):
        require_fit(found, small)


def test_stage_lengths_follow_speed() -> None:
    """No neighbouring way to cut 40 blocks over a fast and a slow device is predicted faster than the plan found."""
    maker = _planner("gpt-40", _mixed(_part("1xa100-80gb"), _part("1xa100-80gb", 0.6)), ("pp=2",))
    plan = maker.plan()
    pieces = [len(stage.assignment) for stage in plan.stages]
    slow = plan.placement.index(1)
    assert pieces[slow] < pieces[1 - slow]
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= plan.step_time_s
    for first in (20, 22, 24, 26, 28):
        config = ManualConfig(pp=2, stage_layers=f"{first}/{40 - first}", microbatch_size=plan.microbatch_size, zero=0)
        assert plan.step_time_s <= maker.estimate(config).step_time_s * (1 + 1e-6)


def test_published_example_of_two_networks() -> None:
    """48 equal layers at 197 and at 160 TFLOP/s a device are cut 26/22 or 27/21, the best of all cuts."""
    layers = np.arange(49)[None, :] - np.arange(49)[:, None]
    spans = np.array([np.where(layers > 0, layers / rate, np.inf) for rate in (197, 160)])
    bound, cuts = next(partitions(48 * spans[None], spans[None]))
    assert cuts[1] in (26, 27)
    assert bound == min(max(48 * k / 197, k / 197 + 48 * (48 - k) / 160) for k in range(1, 48))


@pytest.mark.slow
def test_published_example_as_a_plan() -> None:
    """The shipped cluster of that example gets two stages, one on each network, of 26 and 22 layers (or 27 and 21)."""
    loaded = load_model("gpt:layers=48,hidden=4096,heads=32,vocab=50304", seq_len=2048)
    cluster = load_cluster("infiniband-roce")
    assert isinstance(cluster, MixedCluster)
    maker = _planner("gpt", cluster, ("pp=2",))
    graph = trace(loaded.model, loaded.inputs, compute_dtype="bfloat16")
    plan = replace(maker, graph=graph, request=replace(maker.request, global_batch=384)).plan()
    blocks = [sum(name.startswith("blocks") for name in stage["layers"]) for stage in plan.to_json()["stages"]]
    first = plan.placement[0] < 16
    assert (blocks if first else blocks[::-1]) in ([26, 22], [27, 21])
    assert sorted([*{d // 16 for d in plan.placement[s * 16 : (s + 1) * 16]}] for s in range(2)) == [[0], [1]]


def test_groups_keep_to_one_network_unless_forced() -> None:
    """Of devices on two networks no stage has both, but where one stage is asked for."""
    cluster = _mixed(_part("2xa100-80gb", network="infiniband"), _part("2xa100-80gb", 0.9, network="roce"))
    free = _planner("gpt", cluster).plan()
    networks = [{cluster.part_of_node(cluster.node_of_device(free.placement[r])).network for r in stage.devices}
                for stage in free.stages]  # fmt: skip
    assert all(len(found) == 1 for found in networks)
    forced = _planner("gpt", cluster, ("pp=1", "devices=4")).plan()
    assert (forced.pp_degree, sorted(forced.placement)) == (1, [0, 1, 2, 3])


def test_a_part_alone_where_the_rest_slows_it_down() -> None:
    """Beside two fast devices, two that are twenty times slower stay idle, and the plan says on which it runs."""
    cluster = _mixed(_part("2xa100-80gb", 0.05, "slow"), _part("2xa100-80gb", 1.0, "fast"))
    plan = _planner("gpt", cluster).plan()
    assert sorted(plan.placement) == [2, 3]
    assert any("2 of 4 devices are used" in said for said in plan.assumptions)


def test_each_group_obeys_its_own_memory() -> None:
    """On a device with little memory a stage holds less, and a plan that would need more there isn't feasible."""
    roomy, tight = _part("1xa100-80gb"), _part("1xa100-80gb", network="two")
    free = _planner("gpt", _mixed(roomy, tight), ("pp=2",)).plan()
    held = [sum(m.values()) - m["reserve"] for m in free.costs.group_memory]
    limit = int(0.8 * held[free.placement.index(1)])
    small = replace(tight.device, name="small", usable_bytes=limit, reserve_bytes=0)
    maker = _planner("gpt", _mixed(roomy, replace(tight, device=small)), ("pp=2",))
    plan = maker.plan()
    held = [sum(m.values()) - m["reserve"] for m in plan.costs.group_memory]
    assert plan.feasible
    assert held[plan.placement.index(1)] <= limit < max(held)
    same = ManualConfig(pp=2, microbatch_size=free.microbatch_size, schedule="gpipe")
    assert not maker.estimate(same).feasible


def test_devices_in_step_wait_for_the_slowest() -> None:
    """Each operator takes what it takes on the slower device, each collective what it takes on the slowest link."""
    slow, fast = RooflinePricer(_part("2xa100-40gb")), RooflinePricer(_part("2xh100-80gb"))
    pricer = MixedPricer(_mixed(slow.cluster, fast.cluster), RooflinePricer).in_step
    assert isinstance(pricer, SlowestPricer)
    operand = Operand((4096, 4096), "bfloat16", True)
    keys = [OpKey("aten.linear.default", (operand, operand)), OpKey("aten.gelu.default", (operand,))]
    found, each = pricer.ops(keys), [p.ops(keys) for p in (slow, fast)]
    assert found.forward_s.tolist() == np.maximum(each[0].forward_s, each[1].forward_s).tolist()
    assert found.backward_s.tolist() == np.maximum(each[0].backward_s, each[1].backward_s).tolist()
    moved = pricer.collectives([CollectiveKey("all_gather", 1 << 24, 2, 2)]).seconds[0]
    assert moved >= (1 << 23) / ETHERNET.bytes_per_s


def test_a_plan_costs_the_same_when_checked() -> None:
    """Priced anew from the plan alone, on the cluster it is for, it takes and holds what it was said to."""
    cluster = _mixed(_part("2xa100-80gb", 0.7, "one"), _part("2xh100-80gb", 1.0, "two"))
    maker = _planner("gpt", cluster, ("pp=2", "devices=4"))
    plan = maker.plan()
    again = recost(plan, MixedPricer(cluster, RooflinePricer))
    assert again.step_time_s == pytest.approx(plan.step_time_s, rel=1e-9)
    assert (again.feasible, again.placement) == (True, plan.placement)
    assert again.mfu == pytest.approx(plan.mfu)
    elsewhere = recost(plan, RooflinePricer(load_cluster("4xa100-80gb")))
    assert elsewhere.placement == (0, 1, 2, 3)


def test_wires_decide_who_works_together() -> None:
    """Of four nodes, joined fast in pairs (0, 2) and (1, 3), each pair is a group where gradients weigh most."""
    fast, slow = 1e10, 1e8
    rates = tuple(tuple(fast if (a - b) % 2 == 0 else slow for b in range(4)) for a in range(4))
    delays = tuple((1e-5,) * 4 for _ in range(4))
    cluster = _mixed(_part("4x1xa100-80gb"), wires=Wires(delays, rates))
    groups = placed_devices(cluster, 2, sum_bytes=1e9, hop_bytes=1e3)
    assert sorted(map(sorted, groups)) == [[0, 2], [1, 3]]
    ground = ground_on(MixedPricer(cluster, RooflinePricer), groups)
    assert all(pricer.cluster.inter.bytes_per_s == pytest.approx(fast) for pricer in ground.pricers)
    assert ground.seconds("broadcast", 1 << 20, (0, 1)) == pytest.approx(1e-5 + (1 << 20) / slow)
    across = placed_devices(cluster, 2, sum_bytes=1e3, hop_bytes=1e9)
    assert sorted(map(sorted, across)) in ([[0, 1], [2, 3]], [[0, 3], [1, 2]])


def test_sizes_that_no_groups_have_are_refused() -> None:
    """A hand-written plan for more devices than there are is an error that says how many there are."""
    with pytest.raises(ConfigError, match="the cluster has 4"):
        _planner("gpt", _mixed(_part("2xa100-80gb"), _part("2xh100-80gb"))).estimate(ManualConfig(dp=8, devices=8))
