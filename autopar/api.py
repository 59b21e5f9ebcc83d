"""What a script calls: plan, estimate, optimize, verify, and the Plan that goes between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cluster import Cluster
from autopar.errors import ConfigError
from autopar.formulate.config import ManualConfig, parse_constraints
from autopar.plan import POLICIES, DtypePolicy, PlanRecord, Request

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autopar.cost.pricer import Pricer
    from autopar.emit.module import ParallelModule
    from autopar.formulate.planner import Planner
    from autopar.graph import OpGraph
    from autopar.measure.profile import Profile
    from autopar.verify import VerifyReport

OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor", "adamw8bit")
OBJECTIVES = ("step_time", "tokens_per_s_per_device", "cost_per_token", "energy_per_token", "memory")
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
        """Not in this version: raises ConfigError."""
        raise ConfigError(f"timeline={path}: timelines are not in this version; use explain()")

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
    allow_inexact: bool = False,
    seed: int = 0,
    time_limit_s: float | None = None,
    name: str | None = None,
) -> Plan:
    """Find the fastest way to train `model` (which may be on the meta device) on `cluster`.

    With `config` the plan is that hand-written one. With `cluster="local"` under torchrun the call is collective: rank
    0 plans, every rank gets the same plan. Every exact plan is found without `allow_inexact`, and no inexact ones are
    known yet. Raises ConfigError on bad arguments, TraceError, and InfeasibleError where nothing fits the memory.
    """
    request, where = _request(locals())
    return _priced(model, example_inputs, loss_fn, request, where, profile, lambda p: p.plan(config, top, time_limit_s))


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
    request, where = _request(locals())
    return _priced(model, example_inputs, loss_fn, request, where, profile, lambda p: p.estimate(config))


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
        plan = _plan(model, example_inputs, loss_fn=loss_fn, **({"cluster": "local"} | arguments))
    elif arguments:
        raise ConfigError(f"a plan is given, so {sorted(arguments)} can't be; give either a plan or what to plan for")
    record = plan.record if isinstance(plan, Plan) else plan
    graph = _trace(model, example_inputs, record.request.policy, loss_fn)
    return emit(record, graph, model, device=local_device(), loss=loss)


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
) -> Profile:
    """Time, on a device of this machine, the operators that planning `model` for `cluster` asks for.

    `device` is cuda where there is one, else cpu. What this machine has timed before is not timed again. The result is
    what `plan(profile=...)` takes once it is saved. Raises as `plan` does.
    """
    from autopar.cost.measured import MeasuredPricer
    from autopar.cost.roofline import RooflinePricer
    from autopar.formulate.planner import Planner
    from autopar.measure.session import measuring
    from autopar.ranks import device_named

    request, where = _request({**locals(), "optimizer": "adamw", "dtype_policy": None, "memory_limit": None})
    graph = _trace(model, example_inputs, request.policy, loss_fn)
    with measuring(device_named(device)) as session:
        pricer = MeasuredPricer.on_this_machine(RooflinePricer(where), session)
        Planner(graph, where, pricer, request).plan()
        return pricer.profile


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
    model: nn.Module,
    example_inputs: Inputs,
    loss_fn: Callable[..., Any] | None,
    request: Request,
    cluster: Cluster,
    profile: str | Path | None,
    answer: Callable[[Planner], PlanRecord],
) -> Plan:
    """Trace, price and answer; on rank 0 for all ranks where this machine is planned for."""
    from autopar.formulate.planner import Planner
    from autopar.ranks import on_rank_0, pricing

    def work() -> PlanRecord:
        began = time.process_time()
        graph = _trace(model, example_inputs, request.policy, loss_fn)
        trace_s = time.process_time() - began
        with pricing(cluster, profile) as pricer:
            return answer(Planner(graph, cluster, pricer, request, trace_s, _profile_name(pricer, profile)))

    return Plan(on_rank_0(work, cluster))


def _profile_name(pricer: Pricer, profile: str | Path | None) -> str:
    if profile is not None:
        return str(profile)
    return "measured" if hasattr(pricer, "profile") else "roofline"


def _trace(
    model: nn.Module, example_inputs: Inputs, policy: DtypePolicy, loss_fn: Callable[..., Any] | None
) -> OpGraph:
    from autopar.trace import trace

    given = dict(example_inputs) if isinstance(example_inputs, Mapping) else tuple(example_inputs)
    return trace(model, given, compute_dtype=policy.compute, loss_fn=loss_fn)


def _request(given: Mapping[str, Any]) -> tuple[Request, Cluster]:
    """Check the arguments of `plan` or `estimate`; raises ConfigError with every mistake."""
    from autopar.ranks import find_cluster

    mistakes: list[str] = []
    batch, dtype, objective = given["global_batch"], given["dtype"], given.get("objective", "step_time")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        mistakes.append(f"global_batch={batch!r}: give a whole number of at least 1")
    if given["dtype_policy"] is None and dtype not in POLICIES:
        mistakes.append(f"dtype={dtype!r}: give one of {', '.join(POLICIES)}, or a dtype_policy")
    if objective not in OBJECTIVES:
        mistakes.append(f"objective={objective!r}: give one of {', '.join(OBJECTIVES)}")
    elif objective not in ("step_time", "tokens_per_s_per_device"):
        mistakes.append(f"objective={objective!r}: not supported in this version; give step_time")
    optimizer = _collected(mistakes, lambda: _optimizer_name(given["optimizer"]))
    limit = _collected(mistakes, lambda: parse_bytes(given["memory_limit"]))
    constraints = tuple(given.get("constraints", ()))
    _collected(mistakes, lambda: parse_constraints(constraints))
    cluster = _collected(mistakes, lambda: find_cluster(given["cluster"]))
    if mistakes or cluster is None:
        raise ConfigError(*mistakes)
    config: ManualConfig | None = given.get("config")
    devices = (config.devices if config else 0) or cluster.devices
    model = given["model"]
    request = Request(
        model=given["name"] or type(model).__name__,
        cluster=cluster.name,
        device=cluster.device.name,
        devices=devices,
        global_batch=batch,
        dtype=dtype,
        policy=given["dtype_policy"] or POLICIES[dtype],
        optimizer=optimizer or "adamw",
        objective=objective,
        memory_limit_bytes=limit,
        constraints=constraints,
        config=str(config) if config else None,
        seed=given.get("seed", 0),
    )
    return request, cluster


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
