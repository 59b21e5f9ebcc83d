"""What a script calls: plan, estimate, optimize, verify, and the Plan that goes between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.asked import KINDS, Asked, Inputs, trace_model, traced
from autopar.cluster import Cluster, same_device
from autopar.errors import ConfigError, PlanError
from autopar.formulate.config import ManualConfig
from autopar.plan import DtypePolicy, PlanRecord

if TYPE_CHECKING:
    from torch import nn

    from autopar.dims import Dims
    from autopar.emit.module import ParallelModule
    from autopar.formulate.planner import Planner
    from autopar.verify import VerifyReport


class Plan:
    """A plan or an estimate: the record's fields are attributes; the methods say what can be done with it."""

    def __init__(self, record: PlanRecord) -> None:
        self.record = record

    def __getattr__(self, name: str) -> Any:
        if name == "record":  # absent only while unpickling
            raise AttributeError(name)
        return getattr(self.record, name)

    def __repr__(self) -> str:
        r = self.record
        return f"Plan({r.request.model!r} on {r.request.cluster}: {r.step_time_s:.4g} s a step)"

    @property
    def alternatives(self) -> tuple[Plan, ...]:
        """The other plans that were asked for with `top`."""
        return tuple(Plan(r) for r in self.record.alternatives)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data with the keys of the public contract."""
        return self.record.to_json()

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, whole or not at all."""
        self.record.save(path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; raises PlanError where it is not one."""
        return cls(PlanRecord.load(path))

    def report(self, path: str | Path) -> None:
        """Write one HTML page to look at, which needs nothing beside itself (extra `report`)."""
        from autopar.report.html import write_report

        write_report(self.record, Path(path))

    def timeline(self, path: str | Path) -> None:
        """Write the predicted step as a trace that Perfetto (ui.perfetto.dev) shows."""
        from autopar.report.timeline import write_timeline

        write_timeline(self.record, Path(path))

    def emit_source(
        self,
        folder: str | Path,
        model: nn.Module,
        example_inputs: Inputs,
        *,
        loss_fn: Callable[..., Any] | None = None,
    ) -> tuple[Path, ...]:
        """Write each stage as a Python file to read and to change; `optimize(..., source=folder)` runs them.

        Needs no processes. Raises PlanError where the plan is of another model, EmitError on what has no source.
        """
        from autopar.emit.build import check_graph
        from autopar.emit.source.write import write_source

        graph = trace_model(model, example_inputs, self.record.request.policy, loss_fn)
        check_graph(self.record, graph)
        return write_source(self.record, graph, Path(folder))

    def check(self, cluster: Cluster | str | Path, profile: str | Path | None = None) -> Plan:
        """The same plan with the figures it has on `cluster`, from the plan alone; `lower_bound_s` is then None.

        Raises InfeasibleError where it doesn't fit the memory there, PlanError where there are too few devices.
        """
        from autopar.formulate.record.recost import recost, require_fit
        from autopar.pricing import LOCAL, find_cluster, pricing
        from autopar.ranks import on_rank_0

        where = find_cluster(cluster)

        def work() -> PlanRecord:
            with pricing(where, profile) as pricer:
                return recost(self.record, pricer)

        found = on_rank_0(work) if where.name == LOCAL else work()
        require_fit(found, where)
        return Plan(found)

    def changed_from(self, cluster: str, changes: str, profile: str | Path | None = None) -> Plan:
        """This plan, made for a changed `cluster`, with what it takes there as it is among what is assumed."""
        from autopar.formulate.record.recost import recost
        from autopar.pricing import find_cluster, pricing

        with pricing(find_cluster(cluster), profile) as pricer:
            usual_s = recost(self.record, pricer).step_time_s
        share = self.record.step_time_s / usual_s - 1
        said = (
            f"{cluster} with {changes}: as it is, this plan would take {usual_s:.4g} s a step there ({share:+.1%} here)"
        )
        return Plan(replace(self.record, assumptions=(*self.record.assumptions, said)))

    def explain(self) -> str:
        """What was asked, chosen and predicted, and why, in text."""
        from autopar.report.explain import explain

        return explain(self.record)


def plan(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    cluster: Cluster | str | Path,
    global_batch: int,
    optimizer: str | type = "adamw",
    dtype: str = "bf16",
    dtype_policy: DtypePolicy | None = None,
    memory_limit: str | int | None = None,
    objective: str = "step_time",
    constraints: Sequence[str] = (),
    config: ManualConfig | None = None,
    profile: str | Path | None = None,
    loss_fn: Callable[..., Any] | None = None,
    top: int = 1,
    allow_inexact: bool = False,  # noqa: ARG001 - every plan there is so far is exact
    seed: int = 0,
    time_limit_s: float | None = None,
    name: str | None = None,
) -> Plan:
    """Find the fastest way to train `model` (which may be on the meta device) on `cluster`.

    With `config` the plan is that hand-written one. With `cluster="local"` under torchrun the call is collective: rank
    0 plans, every rank gets the same plan. Every exact plan is found without `allow_inexact`, and no inexact ones are
    known yet. Raises ConfigError on bad arguments, TraceError, and InfeasibleError where nothing fits the memory.
    """
    asked = Asked(
        model, cluster, global_batch, dtype, dtype_policy, optimizer, memory_limit, objective, constraints, config,
        seed, name, top, time_limit_s, profile,
    )  # fmt: skip
    return _priced(asked, example_inputs, loss_fn, profile, lambda p: p.plan(config, top, time_limit_s))


def estimate(
    model: nn.Module | Dims,
    example_inputs: Inputs,
    *,
    cluster: Cluster | str | Path,
    global_batch: int,
    config: ManualConfig,
    optimizer: str | type = "adamw",
    dtype: str = "bf16",
    dtype_policy: DtypePolicy | None = None,
    memory_limit: str | int | None = None,
    profile: str | Path | None = None,
    loss_fn: Callable[..., Any] | None = None,
    name: str | None = None,
    straggler: float = 1.0,
) -> Plan:
    """Predict a hand-written plan. What does not fit the memory comes back with `feasible` False and all figures.

    One device takes `straggler` times as long as the others, which wait for it. Under another framework than autopar's
    (`config.framework`) a transformer may also be given by its dimensions.
    Raises ConfigError on bad arguments and on what can't be run, TraceError.
    """
    asked = Asked(
        model, cluster, global_batch, dtype, dtype_policy, optimizer, memory_limit, config=config, name=name,
        profile=profile,
    )  # fmt: skip
    if not isinstance(config, ManualConfig):
        raise ConfigError(f"config={config!r}: give {KINDS['config'][1]}")
    if config.framework != "autopar":
        return _under_framework(asked, config, example_inputs, loss_fn, profile, straggler)
    return _priced(asked, example_inputs, loss_fn, profile, lambda p: p.estimate(config, straggler))


def optimize(
    model: nn.Module,
    example_inputs: Inputs,
    plan: Plan | PlanRecord | None = None,
    *,
    loss: str = "global",
    loss_fn: Callable[..., Any] | None = None,
    source: str | Path | None = None,
    compile: bool | Mapping[str, Any] = False,
    **arguments: Any,
) -> ParallelModule:
    """The module that trains `model` as `plan` says, on this rank: collective over the torchrun job.

    Without a plan the remaining arguments are those of `plan()`; `cluster` is then this job's own machine by default.
    Outside torchrun it plans for, and runs on, the one device there is. With `source` the files in that folder are run
    (`Plan.emit_source`). With `compile` its layers run by `torch.compile`, with these options of it if there are any.
    Raises PlanError where plan, model and job don't belong together.
    """
    from autopar.emit.alarm import Alarm
    from autopar.emit.build import emit
    from autopar.ranks import join_job, local_device

    if not isinstance(compile, (bool, Mapping)):
        raise ConfigError(f"compile={compile!r}: give True, or options of torch.compile such as {{'mode': 'default'}}")
    join_job()
    if plan is None:
        plan = _plan_together(model, example_inputs, loss_fn=loss_fn, **({"cluster": "local"} | arguments))
    elif arguments:
        raise ConfigError(f"a plan is given, so {sorted(arguments)} can't be; give either a plan or what to plan for")
    record = _record_of(plan)
    folder, alarm = None if source is None else Path(source), Alarm.of_job()
    with alarm.call("optimize"):
        _require_device(record)
        graph = trace_model(model, example_inputs, record.request.policy, loss_fn)
        pm = emit(record, graph, model, device=local_device(), loss=loss, source=folder, alarm=alarm)
    if compile is not False:
        pm.compile(**({} if compile is True else compile))
    return pm


def _plan_together(model: nn.Module, example_inputs: Inputs, *, cluster: Cluster | str | Path, **asked: Any) -> Plan:
    """One plan for all ranks of the job, whatever cluster it is made for."""
    from autopar.pricing import LOCAL, find_cluster
    from autopar.ranks import on_rank_0

    where = find_cluster(cluster)
    if where.name == LOCAL:
        return _plan(model, example_inputs, cluster=where, **asked)
    return Plan(on_rank_0(lambda: _plan(model, example_inputs, cluster=where, **asked).record))


def verify(
    plan: Plan | PlanRecord,
    model: nn.Module,
    example_inputs: Inputs,
    *,
    steps: int = 3,
    loss_fn: Callable[..., Any] | None = None,
) -> VerifyReport:
    """Compare the parallel module with the single-device model: loss, gradients, parameters after `steps` steps.

    Collective over the torchrun job.
    """
    from autopar.ranks import join_job, local_device
    from autopar.verify import verify as compare

    join_job()
    record = _record_of(plan)
    _require_device(record)
    return compare(record, model, example_inputs, steps=steps, device=local_device(), loss_fn=loss_fn)


def register_rule(target: str, line: str, example: Sequence[Any] | None = None) -> None:
    """Say how an operator may be split: `register_rule("mylib::op", "b s k, n k -> b s n")`.

    The rule is tried first: the operator is run sharded in every way the rule allows and compared with itself
    unsharded, on random operands or on the arguments in `example`. Raises ConfigError where the line can't be read or
    is wrong.
    """
    from autopar.shard.check import check_rule
    from autopar.shard.rules import register

    check_rule(target, line, example)
    register(target, line)


_plan = plan


# --- how ------------------------------------------------------------------------------------------------------------


def _priced(
    asked: Asked,
    example_inputs: Inputs,
    loss_fn: Callable[..., Any] | None,
    profile: str | Path | None,
    answer: Callable[[Planner], PlanRecord],
) -> Plan:
    """Trace, price and answer; on rank 0 for all ranks where this machine is planned for."""
    from autopar.formulate.planner import Planner
    from autopar.pricing import LOCAL, pricing
    from autopar.ranks import on_rank_0

    request, cluster = asked.checked()

    def work() -> PlanRecord:
        graph, trace_s = traced(asked, example_inputs, loss_fn)
        with pricing(cluster, profile) as pricer:
            return answer(Planner(graph, cluster, pricer, request, trace_s))

    return Plan(on_rank_0(work) if cluster.name == LOCAL else work())


def _under_framework(
    asked: Asked,
    config: ManualConfig,
    example_inputs: Inputs,
    loss_fn: Callable[..., Any] | None,
    profile: str | Path | None,
    straggler: float,
) -> Plan:
    """Predict a plan that another framework runs."""
    from autopar.dims import Dims
    from autopar.frameworks import predict, shape_of
    from autopar.transformer.layout import NARROW

    if any(x is not None for x in (loss_fn, profile, asked.dtype_policy)):
        raise ConfigError(
            f"framework={config.framework}: predicted without loss_fn, profile and dtype_policy; leave them out"
        )
    request, cluster = replace(asked, dtype="bf16" if asked.dtype in NARROW else asked.dtype).checked()
    shape = asked.model if isinstance(asked.model, Dims) else shape_of(asked.model, example_inputs)
    return Plan(predict(shape, config, request, cluster, asked.dtype, straggler))


def _record_of(plan: Plan | PlanRecord) -> PlanRecord:
    """The record of a plan; raises ConfigError where it is none."""
    record = plan.record if isinstance(plan, Plan) else plan
    if not isinstance(record, PlanRecord):
        raise ConfigError(f"plan={plan!r}: give an autopar.Plan; Plan.load reads one from a file")
    return record


def _require_device(record: PlanRecord) -> None:
    """Raise PlanError unless the plan was made for the kind of device this rank has."""
    from autopar.measure.local import local_cluster
    from autopar.ranks import local_device

    here = local_cluster(local_device()).device.name
    if not any(same_device(here, name) for name in record.fingerprint.device.split(" + ")):
        raise PlanError(
            f"the plan was made for devices of kind {record.fingerprint.device!r}, this rank has {here!r}: its "
            "times and limits don't hold here. Plan with cluster='local', or for a cluster of this device."
        )
