"""What a script calls: plan, estimate, optimize, verify, and the Plan that goes between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cluster import Cluster, same_device
from autopar.errors import ConfigError, PlanError
from autopar.formulate.config import ManualConfig, parse_constraints
from autopar.plan import POLICIES, DtypePolicy, PlanRecord, Request

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autopar.emit.module import ParallelModule
    from autopar.formulate.planner import Planner
    from autopar.graph import OpGraph
    from autopar.measure.profile import Profile
    from autopar.measure.session import Session
    from autopar.verify import VerifyReport

OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor", "adamw8bit")
OBJECTIVES = ("step_time", "tokens_per_s_per_device", "cost_per_token", "energy_per_token", "memory")
SUPPORTED_OBJECTIVES = ("step_time", "tokens_per_s_per_device")
BYTE_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
Inputs = Mapping[str, Any] | tuple[Any, ...] | list[Any]


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
        """Not in this version: raises ConfigError."""
        raise ConfigError(f"report={path}: HTML reports are not in this version; use explain()")

    def timeline(self, path: str | Path) -> None:
        """Write the predicted step as a trace that Perfetto (ui.perfetto.dev) shows."""
        from autopar.report.timeline import write_timeline

        write_timeline(self.record, Path(path))

    def check(self, cluster: Cluster | str | Path, profile: str | Path | None = None) -> Plan:
        """The same plan with the figures it has on `cluster`, from the plan alone; `lower_bound_s` is then None.

        Raises InfeasibleError where it doesn't fit the memory there, PlanError where there are too few devices.
        """
        from autopar.formulate.recost import recost, require_fit
        from autopar.ranks import LOCAL, find_cluster, on_rank_0, pricing

        where = find_cluster(cluster)

        def work() -> PlanRecord:
            with pricing(where, profile) as pricer:
                return recost(self.record, pricer)

        found = on_rank_0(work) if where.name == LOCAL else work()
        require_fit(found, where)
        return Plan(found)

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
        model, cluster, global_batch, dtype, dtype_policy, optimizer, memory_limit, objective, tuple(constraints),
        config, seed, name,
    )  # fmt: skip
    return _priced(asked, example_inputs, loss_fn, profile, lambda p: p.plan(config, top, time_limit_s))


def estimate(
    model: nn.Module,
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
) -> Plan:
    """Predict a hand-written plan. What does not fit the memory comes back with `feasible` False and all figures.

    Raises ConfigError on bad arguments and on what can't be run, TraceError.
    """
    asked = Asked(
        model, cluster, global_batch, dtype, dtype_policy, optimizer, memory_limit, config=config, name=name
    )  # fmt: skip
    return _priced(asked, example_inputs, loss_fn, profile, lambda p: p.estimate(config))


def optimize(
    model: nn.Module,
    example_inputs: Inputs,
    plan: Plan | PlanRecord | None = None,
    *,
    loss: str = "global",
    loss_fn: Callable[..., Any] | None = None,
    **arguments: Any,
) -> ParallelModule:
    """The module that trains `model` as `plan` says, on this rank: collective over the torchrun job.

    Without a plan the remaining arguments are those of `plan()`; `cluster` is then this job's own machine by default.
    Outside torchrun it plans for, and runs on, the one device there is. Raises PlanError where plan, model and job
    don't belong together.
    """
    from autopar.emit.build import emit
    from autopar.ranks import join_job, local_device

    join_job()
    if plan is None:
        plan = _plan_together(model, example_inputs, loss_fn=loss_fn, **({"cluster": "local"} | arguments))
    elif arguments:
        raise ConfigError(f"a plan is given, so {sorted(arguments)} can't be; give either a plan or what to plan for")
    record = plan.record if isinstance(plan, Plan) else plan
    _require_device(record)
    graph = _trace(model, example_inputs, record.request.policy, loss_fn)
    return emit(record, graph, model, device=local_device(), loss=loss)


def _plan_together(model: nn.Module, example_inputs: Inputs, *, cluster: Cluster | str | Path, **asked: Any) -> Plan:
    """One plan for all ranks of the job, whatever cluster it is made for."""
    from autopar.ranks import LOCAL, find_cluster, on_rank_0

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
    record = plan.record if isinstance(plan, Plan) else plan
    _require_device(record)
    return compare(record, model, example_inputs, steps=steps, device=local_device(), loss_fn=loss_fn)


def profile(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    cluster: Cluster | str | Path,
    global_batch: int,
    dtype: str = "bf16",
    device: str | torch.device | None = None,
    loss_fn: Callable[..., Any] | None = None,
    name: str | None = None,
    add_to: str | Path | None = None,
    say: Callable[[str], object] = str,
) -> Profile:
    """Time, on a device of this machine, the operators that planning `model` for `cluster` asks for.

    `device` is cuda where there is one, else cpu. What this machine has timed before is not timed again, and what was
    timed when a run is interrupted is kept. The result is what `plan(profile=...)` takes once it is saved, with the
    timings of the profile file `add_to` where given. `say` is told how much there is to time before that begins. Under
    torchrun the call is collective and all ranks time at once. Raises as `plan` does, and ProfileError where the device
    is of another backend than the cluster's, or `add_to` of another environment.
    """
    from autopar.formulate.profiling import profile_model
    from autopar.measure.store import Store

    request, where = Asked(model, cluster, global_batch, dtype, name=name).checked()

    def take(session: Session) -> Profile:
        graph = _trace(model, example_inputs, request.policy, loss_fn)
        return profile_model(graph, where, request, session, Store(), say)

    return _measured(take, device, add_to)


def profile_collectives(
    *,
    device: str | torch.device | None = None,
    add_to: str | Path | None = None,
    say: Callable[[str], object] = str,
) -> Profile:
    """Time collectives of 4 KiB to 64 MiB over every group that the ranks of this torchrun job can be dealt into.

    Collective over the job. Resumes, adds to a file and says what there is to do as `profile` does. One process has no
    groups: the result is then empty.
    """
    from autopar.formulate.profiling import profile_job
    from autopar.measure.local import local_cluster
    from autopar.measure.store import Store
    from autopar.ranks import device_named, join_job

    here = local_cluster(device_named(device), join_job())
    return _measured(lambda session: profile_job(session, Store(), say, here), device, add_to)


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
    from autopar.ranks import LOCAL, on_rank_0, pricing

    request, cluster = asked.checked()

    def work() -> PlanRecord:
        began = time.process_time()
        graph = _trace(asked.model, example_inputs, request.policy, loss_fn)
        trace_s = time.process_time() - began
        with pricing(cluster, profile) as pricer:
            return answer(Planner(graph, cluster, pricer, request, trace_s))

    return Plan(on_rank_0(work) if cluster.name == LOCAL else work())


def _measured(
    take: Callable[[Session], Profile], device: str | torch.device | None, add_to: str | Path | None
) -> Profile:
    """What `take` times on this rank's device, with all ranks of the job; added to the profile in a file, if any."""
    from autopar.measure.profile import Profile
    from autopar.measure.session import measuring
    from autopar.ranks import device_named, on_rank_0

    def work() -> Profile:
        with measuring(device_named(device)) as session:
            if add_to is None:
                return take(session)
            before = Profile.load(add_to)
            session.environment.require_same(before.environment, str(add_to))
            return before.merged(take(session), str(add_to))

    return on_rank_0(work)


def _require_device(record: PlanRecord) -> None:
    """Raise PlanError unless the plan was made for the kind of device this rank has."""
    from autopar.measure.local import local_cluster
    from autopar.ranks import local_device

    here = local_cluster(local_device()).device.name
    if not same_device(here, record.fingerprint.device):
        raise PlanError(
            f"the plan was made for devices of kind {record.fingerprint.device!r}, this rank has {here!r}: its "
            "times and limits don't hold here. Plan with cluster='local', or for a cluster of this device."
        )


def _trace(
    model: nn.Module, example_inputs: Inputs, policy: DtypePolicy, loss_fn: Callable[..., Any] | None
) -> OpGraph:
    from autopar.trace import trace

    given = dict(example_inputs) if isinstance(example_inputs, Mapping) else tuple(example_inputs)
    return trace(model, given, compute_dtype=policy.compute, loss_fn=loss_fn)


@dataclass(frozen=True)
class Asked:
    """The arguments of `plan`, `estimate` or `profile`, as given."""

    model: nn.Module
    cluster: Cluster | str | Path
    global_batch: int
    dtype: str
    dtype_policy: DtypePolicy | None = None
    optimizer: str | type = "adamw"
    memory_limit: str | int | None = None
    objective: str = "step_time"
    constraints: tuple[str, ...] = ()
    config: ManualConfig | None = None
    seed: int = 0
    name: str | None = None

    def checked(self) -> tuple[Request, Cluster]:
        """The request and its cluster; raises ConfigError with every mistake."""
        from autopar.ranks import find_cluster

        mistakes = self._mistakes()
        optimizer = _collected(mistakes, lambda: _optimizer_name(self.optimizer))
        limit = _collected(mistakes, lambda: parse_bytes(self.memory_limit))
        _collected(mistakes, lambda: parse_constraints(self.constraints))
        cluster = _collected(mistakes, lambda: find_cluster(self.cluster))
        if mistakes or cluster is None:
            raise ConfigError(*mistakes)
        request = Request(
            model=self.name or type(self.model).__name__,
            cluster=cluster.name,
            device=cluster.device.name,
            devices=cluster.devices,  # of the job: config or constraint may leave some idle
            global_batch=self.global_batch,
            dtype=self.dtype,
            policy=self.dtype_policy or POLICIES[self.dtype],
            optimizer=optimizer or "adamw",
            objective=self.objective,
            memory_limit_bytes=limit,
            constraints=self.constraints,
            config=str(self.config) if self.config else None,
            seed=self.seed,
        )
        return request, cluster

    def _mistakes(self) -> list[str]:
        mistakes: list[str] = []
        batch = self.global_batch
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            mistakes.append(f"global_batch={batch!r}: give a whole number of at least 1")
        if self.dtype_policy is None and self.dtype not in POLICIES:
            mistakes.append(f"dtype={self.dtype!r}: give one of {', '.join(POLICIES)}, or a dtype_policy")
        if self.objective not in OBJECTIVES:
            mistakes.append(f"objective={self.objective!r}: give one of {', '.join(OBJECTIVES)}")
        elif self.objective not in SUPPORTED_OBJECTIVES:
            mistakes.append(f"objective={self.objective!r}: not supported in this version; give step_time")
        return mistakes


def _collected(mistakes: list[str], read: Callable[[], Any]) -> Any:
    """What `read` returns; its ConfigError joins the mistakes."""
    try:
        return read()
    except ConfigError as error:
        mistakes.extend(error.mistakes)
        return None


def _optimizer_name(optimizer: str | type) -> str:
    name = optimizer.lower() if isinstance(optimizer, str) else optimizer.__name__.lower()
    if isinstance(optimizer, str) and name not in OPTIMIZERS:
        raise ConfigError(f"optimizer={optimizer!r}: give one of {', '.join(OPTIMIZERS)}, or a torch.optim class")
    return name


def parse_bytes(text: str | int | None) -> int | None:
    """Bytes from `70GiB`, `80 GB` or a number; None stays None. Raises ConfigError on anything else."""
    if text is None or (isinstance(text, int) and text > 0):
        return text
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", str(text))
    unit = BYTE_UNITS.get((match.group(2) or "B").upper()) if match else None
    if match is None or unit is None or match.group(1).count(".") > 1 or float(match.group(1)) <= 0:
        raise ConfigError(f"memory_limit={text!r}: give bytes, or a size such as 70GiB, 512MiB or 80GB")
    return int(float(match.group(1)) * unit)
