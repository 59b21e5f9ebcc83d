"""A plan priced anew for another cluster, from nothing but the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cluster import Cluster, Device, device_of
from autopar.cost.layer import figures_of
from autopar.cost.mixed import MixedPricer
from autopar.cost.orders import Shape
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.formulate.pipelines.ground import EvenGround, Ground, ground_on
from autopar.formulate.pipelines.piped import Passes, add_up, run
from autopar.formulate.record.carried import carried_work, layer_costs
from autopar.formulate.record.predict import Layers, Prediction, predict, shares
from autopar.plan import CarriedCosts, PlanRecord
from autopar.schedules import group_of

GIB = 1 << 30


def recost(record: PlanRecord, pricer: Pricer) -> PlanRecord:
    """The plan with the figures it has on the pricer's cluster; what was chosen stays.

    Raises PlanError where the cluster has too few devices or the plan is of a version that carries no costs.
    """
    cluster = pricer.cluster
    used = len({device for stage in record.stages for device in stage.devices})
    if used > cluster.devices:
        raise PlanError(f"the plan runs on {used} devices, {cluster.name} has {cluster.devices}: name a larger one.")
    ground = _ground(record, pricer)
    stages = _priced(record, ground)
    found, costs = _together(record, stages, ground) if record.pp_degree > 1 else _alone(record, stages[0])
    sites, device = [pricer.cluster.device for pricer in ground.pricers], device_of(cluster, record.placement)
    memory = {**record.memory_by_category, "reserve": max(site.reserve_bytes for site in sites)}
    step_s, peak_bytes = found.step_time_s, sum(memory.values())
    faster = record.step_time_s / step_s
    rate = record.tflops_per_device * faster
    best = device.peak_flops_per_s.get(record.request.policy.compute)
    return replace(
        record,
        request=replace(record.request, cluster=cluster.name, device=cluster.device.name, devices=cluster.devices),
        fingerprint=replace(record.fingerprint, profile=pricer.identity(), device=cluster.device.name),
        step_time_s=step_s,
        tokens_per_s=_times(record.tokens_per_s, faster),
        tokens_per_s_per_device=_times(record.tokens_per_s_per_device, faster),
        tflops_per_device=rate,
        mfu=rate * 1e12 / best if best else None,
        peak_memory_bytes=peak_bytes,
        peak_tensor_bytes=peak_bytes - memory["reserve"],
        memory_by_category=memory,
        feasible=not tight_groups(record, sites),
        exposed_comm_s=found.by_kind_s.get("communication", 0.0),
        bubble_s=found.by_kind_s.get("bubble", 0.0),
        lower_bound_s=None,
        gap=None,
        cost_sources=shares(found.by_source_s),
        assumptions=(
            *record.assumptions,
            f"chosen for {record.request.cluster}, priced anew for {cluster.name}",
            *pricer.assumptions,
        ),
        placement=tuple(d for group in ground.devices for d in group),
        energy_j=_times(device.power_w, used * step_s),
        step_price=_times(device.price_per_hour, used * step_s / 3600),
        time_by_kind_s=found.by_kind_s,
        costs=costs,
        alternatives=(),
    )


def _ground(record: PlanRecord, pricer: Pricer) -> Ground:
    """Where the plan's groups stand: on a mixed cluster where it was placed, else one after the other."""
    groups, size = record.pp_degree, len(record.stages[0].devices)
    if not isinstance(pricer, MixedPricer):
        return EvenGround(pricer, groups, size)
    if max(record.placement) >= pricer.cluster.devices:
        raise PlanError(f"the plan is placed on device {max(record.placement)}, {pricer.cluster.name} has "
                        f"{pricer.cluster.devices}: plan anew for it.")  # fmt: skip
    return ground_on(pricer, tuple(record.placement[g * size : (g + 1) * size] for g in range(groups)))


def tight_groups(record: PlanRecord, devices: Sequence[Device]) -> list[int]:
    """The groups whose tensors their devices can't hold, under the limit that the plan was made for."""
    asked = record.request.memory_limit_bytes
    pairs = zip(held_bytes(record), devices, strict=True)
    return [g for g, (held, device) in enumerate(pairs) if held > device.limit_bytes(asked)]


def held_bytes(record: PlanRecord) -> list[int]:
    """Bytes of tensors on the fullest device of each group."""
    known = [sum(m.values()) - m.get("reserve", 0) for m in record.costs.group_memory]
    return known or [record.peak_tensor_bytes] * record.pp_degree


def _priced(record: PlanRecord, ground: Ground) -> list[list[Layers]]:
    """The layers of each stage with their figures on the devices where it stands."""
    stages: list[list[Layers]] = [[] for _ in record.stages]
    for cost, work in zip(record.costs.layers, carried_work(record.costs), strict=True):
        pricer = ground.pricers[group_of(record.schedule, cost.stage, record.pp_degree)]
        stages[cost.stage].append(Layers(cost.run, figures_of(work, pricer), cost.count))
    return stages


def _alone(record: PlanRecord, layers: Sequence[Layers]) -> tuple[Prediction, CarriedCosts]:
    found = predict(layers, record.num_microbatches, 0)
    return found, layer_costs([layers], memory=record.costs.group_memory)


def _together(
    record: PlanRecord, stages: Sequence[Sequence[Layers]], ground: Ground
) -> tuple[Prediction, CarriedCosts]:
    groups, carried = record.pp_degree, record.costs
    shape = Shape(record.schedule, groups, len(stages) // groups, record.num_microbatches)
    time = run(shape, [_passes(s) for s in stages], carried.between, ground)
    alone = [
        predict([x for s in shape.stages_of(g) for x in stages[s]], record.num_microbatches, 0) for g in range(groups)
    ]
    costs = layer_costs(stages, carried.between, time.cut_s, time.shared_s, carried.group_memory)
    return add_up(alone, time), costs


def _passes(layers: Sequence[Layers]) -> Passes:
    """Seconds of a stage."""
    names = ("forward_s", "backward_s", "step_s", "weight_s")
    return Passes(*(sum(getattr(x.figures, name) * x.count for x in layers) for name in names))


def require_fit(record: PlanRecord, cluster: Cluster) -> None:
    """Raise InfeasibleError, naming the limit and what would do, unless the plan fits the cluster's memory."""
    asked, groups = record.request.memory_limit_bytes, record.pp_degree
    size = len(record.placement) // groups
    devices = [device_of(cluster, record.placement[g * size : (g + 1) * size]) for g in range(groups)]
    held = held_bytes(record)
    for g in tight_groups(record, devices):
        device, limit = devices[g], devices[g].limit_bytes(asked)
        has = f"{device.name} has {_gib(device.usable_bytes)} usable, {_gib(device.reserve_bytes)} of it reserve"
        why = has if asked is None or asked > limit else f"the limit that the plan was made for is {_gib(limit)}"
        raise InfeasibleError(
            f"memory is the binding limit: the plan needs {_gib(held[g])} of tensors on the fullest device"
            f"{f' of group {g}' if groups > 1 else ''}, {why}. Plan anew for this cluster with `autopar plan`, or "
            "check on devices with that much memory."
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
