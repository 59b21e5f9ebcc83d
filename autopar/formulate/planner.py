"""From a traced model and a cluster to a plan: what was found on which devices, and the record of it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from autopar.cluster import Cluster
from autopar.cost.pricer import Pricer
from autopar.cost.sync import optimizer_assumptions
from autopar.cost.work import unknown_targets
from autopar.engine.search import Outcome
from autopar.engine.stack_problem import Status
from autopar.errors import ConfigError, InfeasibleError
from autopar.formulate.config import ManualConfig
from autopar.formulate.hosting import hosted
from autopar.formulate.kinds import kind_of
from autopar.formulate.layers.tables import Setting
from autopar.formulate.leanest import leanest, size_text, tightest_stage
from autopar.formulate.record.assemble import Solved, assemble
from autopar.formulate.record.recost import require_fit
from autopar.formulate.record.rewritten import with_offload
from autopar.formulate.record.straggler import with_straggler
from autopar.formulate.record.whole import whole_ops
from autopar.formulate.scenario import SolvedScenario
from autopar.formulate.searched import Searched, searched
from autopar.formulate.sizes import NO_SLOWER, PER_DEVICE, Sizes
from autopar.formulate.space import AnyScenario, Space
from autopar.graph import OpGraph
from autopar.plan import Fingerprint, PlanRecord, Request, installed_torch


@dataclass(frozen=True)
class Planner:
    """Plans one model for one cluster. `request` says what for, `pricer` what things cost."""

    graph: OpGraph
    cluster: Cluster
    pricer: Pricer
    request: Request
    trace_s: float = 0.0

    @property
    def limit_bytes(self) -> int:
        """Bytes of tensors a device may hold."""
        return self.cluster.device.limit_bytes(self.request.memory_limit_bytes)

    @cached_property
    def space(self) -> Space:
        """The plans there are."""
        return Space(self.graph, self.cluster, self.pricer, self.request)

    def plan(self, config: ManualConfig | None = None, top: int = 1, time_limit_s: float | None = None) -> PlanRecord:
        """The best plan under the limit, with at most `top - 1` alternatives of other kinds, the best of each.

        It may leave nodes idle where that is better by the objective. Raises InfeasibleError, naming the limit and the
        smallest change that would do, where there is none; ConfigError where the time limit came before any plan, or
        the objective needs a figure that the device lacks.
        """
        began = _cpu_s()
        self._require_batch()
        _require_figures(self.request.objective, self.cluster)
        end_s = inf if time_limit_s is None else time.monotonic() + time_limit_s
        with _collecting_new_objects_only():
            if config is None:
                tried = Sizes(self.space, self.limit_bytes, top, end_s).searched()
            else:
                config = config.grouped(self.cluster.devices_per_node)
                # what goes to the host is no longer here
                limit = self.limit_bytes if config.offload == "none" else None
                scenarios = (self.space.configured(config, limit),)
                tried = [Searched(self.request.devices, scenarios, searched(scenarios, top, end_s))]
        best = self._best(tried, top)
        if config is not None:
            best = [(self._completed(found, scenarios[0], config), bound_s) for found, bound_s in best]
        records = [self._record(found, bound_s, began) for found, bound_s in best]
        if config is None and not records and _proven(tried):
            records = self._on_host(top, end_s, began)
        if not records:
            raise self._nothing(_largest(tried), time_limit_s)
        if not records[0].feasible:
            require_fit(records[0], self.cluster)
        first = replace(
            records[0], assumptions=(*records[0].assumptions, *self._said_of(tried, records[0], time_limit_s))
        )
        return replace(first, alternatives=tuple(records[1:]))

    def estimate(self, config: ManualConfig, straggler: float = 1.0) -> PlanRecord:
        """What a hand-written plan costs, feasible or not, if one device takes `straggler` times as long as others."""
        began = _cpu_s()
        self._require_batch()
        config = config.grouped(self.cluster.devices_per_node)
        scenario = self.space.configured(config, None)
        solved = scenario.solve()
        if solved is None or (isinstance(solved, SolvedScenario) and solved.solution.status is not Status.OPTIMAL):
            raise ConfigError(f"config can't be laid out on this model: {scenario.name}. Change a degree.")
        solved = self._completed(solved, scenario, config)
        if straggler == 1.0:
            return self._record(solved, None, began)
        record = self._record(with_straggler(solved, straggler), None, began)
        said = f"one device of those that work longest takes {straggler:g} times as long; the others wait for it"
        return replace(record, assumptions=(*record.assumptions, said))

    def _require_batch(self) -> None:
        """Raise ConfigError where the graph holds for another batch than the one asked for alone."""
        only, asked = self.graph.only_batch, self.request.global_batch
        if only not in (None, asked):
            raise ConfigError(
                f"global_batch={asked}: the model could be traced at the batch of its example inputs alone, which has "
                f"{only} samples. Give example_inputs of {asked} samples, or global_batch={only}."
            )

    def _best(self, tried: Sequence[Searched], top: int) -> list[tuple[Solved, float]]:
        """The best answers of all sizes by the objective, one of each kind, with the bounds on their seconds."""
        bound = min(one.answer.lower_bound * self._weight(one.devices) for one in tried)
        found = [
            (answer.objective * self._weight(one.devices), one.devices, answer.payload)
            for one in tried
            for answer in ([one.answer.best] if one.answer.best else []) + list(one.answer.alternatives)
        ]
        kinds: dict[object, tuple[Solved, float]] = {}
        for number, (_, devices, solved) in enumerate(sorted(found, key=_less_with_fewer)):
            kind = (devices, kind_of(solved)) if top > 1 else number
            kinds.setdefault(kind, (solved, bound / self._weight(devices)))
        return list(kinds.values())[:top]

    def _completed(self, solved: Solved, scenario: AnyScenario, config: ManualConfig) -> Solved:
        """The solution of a configuration with what this sets once all else is chosen."""
        if config.offload == "none":
            return solved
        return with_offload(solved, scenario, config.offload, self.request.policy, self.request.optimizer)

    def _on_host(self, top: int, end_s: float, began: float) -> list[PlanRecord]:
        """The best plans that fit with something in the host's memory."""
        found = [self._record(one.solved, one.bound_s, began) for one in hosted(self.space, self.limit_bytes, end_s)]
        fitting = sorted((record for record in found if record.feasible), key=lambda record: record.step_time_s)
        said = "nothing fits without keeping something in the host's memory"
        return [replace(record, assumptions=(*record.assumptions, said)) for record in fitting[:top]]

    def _weight(self, devices: int) -> float:
        """By what a plan's seconds count in the objective."""
        return devices if self.request.objective in PER_DEVICE else 1.0

    # --- answers --------------------------------------------------------------------------------------------------

    def _record(self, solved: Solved, bound_s: float | None, began: float) -> PlanRecord:
        record = self._assembled(solved, bound_s, began)
        if record.lower_bound_s is None or record.lower_bound_s <= record.step_time_s:
            return record
        above = record.lower_bound_s / record.step_time_s - 1
        why = "timings that don't grow evenly with size"
        doubt = f"the lower bound is not proven: {why} put it {above:.1%} above the plan"
        return replace(record, lower_bound_s=record.step_time_s, gap=0.0, assumptions=(*record.assumptions, doubt))

    def _assembled(self, solved: Solved, bound_s: float | None, began: float) -> PlanRecord:
        return assemble(
            solved, self.graph, self.cluster, self.request,
            Fingerprint(self.graph.digest, self.pricer.identity(), self.cluster.device.name, installed_torch()),
            assumptions=self._assumptions(solved.setting), lower_bound_s=bound_s,
            trace_s=self.trace_s, search_s=_cpu_s() - began,
        )  # fmt: skip

    def _assumptions(self, setting: Setting) -> tuple[str, ...]:
        found = list(self.graph.assumptions)
        if not self.graph.separable:
            found.append(f"one microbatch: {self.graph.why_not_separable}")
        found += [f"{target} is priced by the bytes of its operands alone" for target in unknown_targets(self.graph)]
        found += whole_ops(self.graph, setting, self.pricer)
        found += [*optimizer_assumptions(self.request.optimizer), *self.pricer.assumptions]
        return tuple(found)

    def _said_of(self, tried: Sequence[Searched], chosen: PlanRecord, time_limit_s: float | None) -> list[str]:
        """What is to be known of the search itself."""
        found = []
        if any(one.answer.outcome is Outcome.FEASIBLE for one in tried):
            found.append(f"the search was cut short after {time_limit_s:g} s: more time may find a faster plan")
        used, whole = len(chosen.placement), _largest(tried)
        if used < self.request.devices == whole.devices:
            other = f"takes {whole.best_s:.4g} s a step" if whole.answer.best else "does not fit or is not legal"
            found.append(f"{used} of {self.request.devices} devices are used: the best plan on all of them {other}")
        return found

    def _nothing(self, searched: Searched, time_limit_s: float | None) -> InfeasibleError | ConfigError:
        """The error that says why there is no plan."""
        devices, name = searched.devices, self.cluster.device.name
        if searched.answer.outcome is Outcome.TIME_LIMIT:
            return ConfigError(
                f"no plan was found within the time limit of {time_limit_s:g} s, and none is proven impossible; give "
                f"more time, a hand-written config, or constraints that leave less to search."
            )
        if not searched.scenarios:
            return InfeasibleError(
                f"no mesh of {devices} devices and global batch {self.request.global_batch} meets the "
                f"constraints {list(self.request.constraints)}; drop one."
            )
        least, scenario = leanest(searched.scenarios)
        if least == inf:
            return InfeasibleError(f"no legal plan on {devices} devices; {searched.answer.knob}")
        return InfeasibleError(
            f"memory is the binding limit: every plan on {devices} x {name} needs about {size_text(least)} of tensors "
            f"a device{tightest_stage(scenario)}, the limit is {size_text(self.limit_bytes)}. The smallest change that "
            f"would do: a memory limit of {size_text(least)}, or more devices."
        )


@contextmanager
def _collecting_new_objects_only() -> Iterator[None]:
    """Meanwhile the garbage collector doesn't look through what was there before: torch and the model."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _proven(tried: Sequence[Searched]) -> bool:
    """Whether scenarios were looked at to the end, so that where there is no plan none fits."""
    return any(one.scenarios for one in tried) and all(one.answer.outcome is not Outcome.TIME_LIMIT for one in tried)


def _less_with_fewer(found: tuple[float, int, Solved]) -> float:
    """The objective, with a preference too small to show for fewer devices."""
    objective, devices, _ = found
    return objective * (1 + NO_SLOWER * devices / (devices + 1))


def _largest(tried: Sequence[Searched]) -> Searched:
    return max(tried, key=lambda one: one.devices)


def _require_figures(objective: str, cluster: Cluster) -> None:
    """Raise ConfigError where the objective asks for a figure that the device lacks."""
    wanted = {"cost_per_token": "price_per_hour", "energy_per_token": "power_w"}.get(objective)
    if wanted and getattr(cluster.device, wanted) is None:
        raise ConfigError(
            f"objective={objective}: device {cluster.device.name!r} has no {wanted}; give it in a cluster file or "
            "in the device's file, or choose tokens_per_s_per_device."
        )


def _cpu_s() -> float:
    """CPU seconds of this process and those that it has begun and ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system
