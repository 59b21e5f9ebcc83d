"""From a traced model and a cluster to a plan: the scenarios worth looking at, the search over them, the record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, prod

from autopar.cluster import Cluster
from autopar.cost.pricer import Pricer
from autopar.cost.sync import optimizer_assumptions
from autopar.cost.work import unknown_targets
from autopar.engine.search import Answer, Outcome, Scenario, search
from autopar.engine.stack_problem import Status
from autopar.errors import ConfigError, InfeasibleError
from autopar.formulate.assemble import Solved, assemble
from autopar.formulate.chains import Known
from autopar.formulate.config import Constraint, ManualConfig, parse_constraints
from autopar.formulate.kinds import kind_of
from autopar.formulate.mesh import config_mesh, search_meshes
from autopar.formulate.pins import Pins, covered_ops, pins_of, pins_of_constraints
from autopar.formulate.pipeline import PipelineScenario, SolvedPipeline
from autopar.formulate.pipelines import Pipelines
from autopar.formulate.relayout_prices import RelayoutPrices
from autopar.formulate.runs import layer_runs
from autopar.formulate.scenario import Budget, SolvedScenario, StageScenario
from autopar.formulate.stages import block_indices
from autopar.formulate.tables import Setting
from autopar.graph import OpGraph
from autopar.plan import Fingerprint, MeshAxis, PlanRecord, Request
from autopar.shard.rules import rule_for

AnyScenario = StageScenario | PipelineScenario
LEANEST_BOUNDED, LEANEST_TRIED = 16, 4
"""Scenarios bounded, and of these solved, to say how much memory would do."""


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

    @property
    def used_devices(self) -> int:
        """How many devices a searched plan uses: those of the job, or fewer where a constraint says so.

        Raises ConfigError where there are not that many.
        """
        constraints = parse_constraints(list(self.request.constraints))
        used = next((int(c.value) for c in constraints if c.key == "devices" and not c.pattern), 0)
        if used > self.request.devices:
            raise ConfigError(f"constraint devices={used}: there are {self.request.devices}; give at most that.")
        return used or self.request.devices

    def plan(self, config: ManualConfig | None = None, top: int = 1, time_limit_s: float | None = None) -> PlanRecord:
        """The fastest plan under the limit, with at most `top - 1` alternatives of other kinds, the fastest of each.

        Raises InfeasibleError, naming the limit and the smallest change that would do, where there is none; ConfigError
        where the time limit came before any plan.
        """
        began = time.process_time()
        scenarios = list(self._scenarios(config, self.limit_bytes))
        answer = search(
            [_as_engine_scenario(s) for s in scenarios], top=top, kind=kind_of if top > 1 else None,
            time_limit_s=time_limit_s,
        )  # fmt: skip
        if answer.outcome is Outcome.TIME_LIMIT:
            raise ConfigError(
                f"no plan was found within the time limit of {time_limit_s:g} s, and none is proven impossible; give "
                f"more time, a hand-written config, or constraints that leave less to search."
            )
        if answer.best is None:
            raise InfeasibleError(self._why_infeasible(answer, scenarios))
        records = [
            self._record(found.payload, answer.lower_bound, began) for found in [answer.best, *answer.alternatives]
        ]
        first = records[0]
        if answer.outcome is Outcome.FEASIBLE:
            cut = f"the search was cut short after {time_limit_s:g} s: more time may find a faster plan"
            first = replace(first, assumptions=(*first.assumptions, cut))
        return replace(first, alternatives=tuple(records[1:]))

    def estimate(self, config: ManualConfig) -> PlanRecord:
        """What a hand-written plan costs, feasible or not."""
        began = time.process_time()
        (scenario,) = self._scenarios(config, None)
        solved = scenario.solve()
        if solved is None or (isinstance(solved, SolvedScenario) and solved.solution.status is not Status.OPTIMAL):
            raise ConfigError(f"config can't be laid out on this model: {scenario.name}. Change a degree.")
        return self._record(solved, None, began)

    # --- scenarios ------------------------------------------------------------------------------------------------

    def _scenarios(self, config: ManualConfig | None, limit: int | None) -> Iterator[AnyScenario]:
        if config is not None:
            yield self._configured(config, limit)
            return
        constraints = parse_constraints(list(self.request.constraints))
        _refuse_unmatched(constraints, self.graph)
        budget = Budget(limit, self.request.policy, self.request.optimizer)
        known = Known(self.pricer)
        one_stage = all(c.key != "pp" or c.value == "1" for c in constraints)
        for mesh in search_meshes(self.cluster, self.used_devices) if one_stage else ():
            pins = pins_of_constraints(constraints, mesh, self.graph)
            if pins is None:
                continue
            relayouts = RelayoutPrices(self.pricer, mesh)
            for last, count in self._microbatch_counts(mesh, pins[-1], constraints):
                runs = layer_runs(self.graph, [*pins[:-1], last])
                setting = Setting(mesh, self.request.global_batch // count, count)
                yield StageScenario(runs, setting, self.pricer, budget, relayouts, known)
        yield from self._pipelines(limit, known).searched(self.used_devices, constraints)

    def _pipelines(self, limit: int | None, known: Known) -> Pipelines:
        budget = Budget(limit, self.request.policy, self.request.optimizer)
        return Pipelines(self.graph, self.pricer, self.request.global_batch, budget, known)

    def _microbatch_counts(
        self, mesh: tuple[MeshAxis, ...], pins: Pins, constraints: Sequence[Constraint]
    ) -> Iterator[tuple[Pins, int]]:
        """Numbers of microbatches with the pins of the last layer, which makes the loss.

        Where `microbatch_size` is given they follow from how many ways that layer splits the batch.
        """
        batch = self.request.global_batch
        size = next((int(c.value) for c in constraints if c.key == "microbatch_size" and not c.pattern), None)
        if size is None:
            yield from ((pins, m) for m in range(1, batch + 1) if batch % m == 0 and self._may_split(m))
            return
        inner = [frozenset(range(first, len(mesh))) for first in range(len(mesh) + 1)]
        for axes in inner if pins.tensor_axes is None else [pins.tensor_axes]:
            samples = size * prod(axis.size for i, axis in enumerate(mesh) if i not in axes)
            if batch % samples == 0 and self._may_split(batch // samples):
                yield replace(pins, tensor_axes=axes), batch // samples

    def _may_split(self, count: int) -> bool:
        return count == 1 or self.graph.separable

    def _configured(self, config: ManualConfig, limit: int | None) -> AnyScenario:
        blocks = block_indices(self.graph)
        config = config.fit(self.cluster.devices, self.request.global_batch, len(blocks))
        _refuse_unsupported(config)
        count = self.request.global_batch // (config.dp * config.microbatch_size)
        if not self._may_split(count):
            raise ConfigError(
                f"microbatch_size={config.microbatch_size} makes {count} microbatches, but the batch can't be split in "
                f"time: {self.graph.why_not_separable}. Give microbatch_size={self.request.global_batch // config.dp}."
            )
        batch = self.request.global_batch // count
        too_many = {d for d in (config.for_block(i, config.devices).dp for i in range(len(blocks))) if batch % d}
        if too_many:
            raise ConfigError(
                f"layers: a global microbatch of dp*microbatch_size = {batch} sequences can't be split over dp = "
                f"{max(too_many)}; give microbatch_size={max(too_many) * config.microbatch_size // config.dp} or more."
            )
        if config.pp > 1:
            return self._pipelines(limit, Known(self.pricer)).configured(config, count)
        mesh = config_mesh(config, len(blocks))
        pins = [
            pins_of(config, blocks.index(i) if i in blocks else None, mesh, len(blocks))
            for i in range(len(self.graph.layers))
        ]
        runs = layer_runs(self.graph, pins)
        setting = Setting(mesh, batch, count)
        budget = Budget(limit, self.request.policy, self.request.optimizer)
        return StageScenario(runs, setting, self.pricer, budget, RelayoutPrices(self.pricer, mesh), Known(self.pricer))

    # --- answers --------------------------------------------------------------------------------------------------

    def _record(self, solved: Solved, bound_s: float | None, began: float) -> PlanRecord:
        record = self._assembled(solved, bound_s, began)
        if record.lower_bound_s is None or record.lower_bound_s <= record.step_time_s:
            return record
        above = record.lower_bound_s / record.step_time_s - 1
        doubt = (
            f"the lower bound is not proven: timings that don't grow evenly with size put it {above:.1%} above the plan"
        )
        return replace(record, lower_bound_s=record.step_time_s, gap=0.0, assumptions=(*record.assumptions, doubt))

    def _assembled(self, solved: Solved, bound_s: float | None, began: float) -> PlanRecord:
        return assemble(
            solved, self.graph, self.cluster, self.request,
            Fingerprint(self.graph.digest, self.pricer.identity(), self.cluster.device.name),
            limit_bytes=self.limit_bytes, assumptions=self._assumptions(), lower_bound_s=bound_s,
            trace_s=self.trace_s, search_s=time.process_time() - began,
        )  # fmt: skip

    def _assumptions(self) -> tuple[str, ...]:
        found = list(self.graph.assumptions)
        if not self.graph.separable:
            found.append(f"one microbatch: {self.graph.why_not_separable}")
        found += [f"{target} is priced by the bytes of its operands alone" for target in unknown_targets(self.graph)]
        found += [f"{where} has no sharding rule: every rank runs it whole" for where in ops_without_rule(self.graph)]
        found += [*optimizer_assumptions(self.request.optimizer), *self.pricer.assumptions]
        return tuple(found)

    def _why_infeasible(self, answer: Answer[Solved], scenarios: Sequence[AnyScenario]) -> str:
        if not scenarios:
            return (
                f"no mesh of {self.used_devices} devices and global batch {self.request.global_batch} meets the "
                f"constraints {list(self.request.constraints)}; drop one."
            )
        rough = sorted(scenarios, key=lambda s: s.least_bytes)[:LEANEST_BOUNDED]
        for scenario in rough:
            scenario.bound_s()
        leanest = sorted(rough, key=lambda s: s.least_bytes)[:LEANEST_TRIED]
        found = [(s.enough_bytes(), i) for i, s in enumerate(leanest)]
        least, place = min(found, default=(inf, 0))
        if least == inf:
            return f"no legal plan on {self.used_devices} devices; {answer.knob}"
        return (
            f"memory is the binding limit: every plan on {self.used_devices} x {self.cluster.device.name} "
            f"needs about {_size(least)} of tensors a device{_where(leanest[place])}, the limit is "
            f"{_size(self.limit_bytes)}. "
            f"The smallest change that would do: a memory limit of {_size(least)}, or more devices."
        )


def _where(scenario: AnyScenario) -> str:
    """Which stage of the leanest plan needs most."""
    if isinstance(scenario, StageScenario):
        return ""
    return f" (stage {scenario.tightest()[1]} of {scenario.name} binds)"


def ops_without_rule(graph: OpGraph) -> list[str]:
    """Operators that can't be split, each with the module it stands in first."""
    first: dict[str, str] = {}
    for layer in graph.classes:
        for op in layer.ops:
            if op.operands and rule_for(op, layer) is None:
                first.setdefault(op.target, op.module)
    return [f"{target} ({module or 'the model itself'})" for target, module in first.items()]


def _size(size_bytes: float) -> str:
    """Bytes in a unit, rounded up: what is written, given as a limit, is enough."""
    unit, name = (1 << 30, "GiB") if size_bytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{ceil(100 * size_bytes / unit) / 100:.2f} {name}"


def _as_engine_scenario(scenario: AnyScenario) -> Scenario[Solved]:
    def solve(cutoff_s: float) -> tuple[float, Solved] | None:
        solved = scenario.solve(cutoff_s)
        if isinstance(solved, SolvedPipeline):
            return solved.step_time_s, solved
        return (solved.solution.objective_s, solved) if solved and solved.solution.walks else None

    if isinstance(scenario, StageScenario):
        return Scenario(
            scenario.name, scenario.bound_s, solve, first=scenario.first_bound_s,
            others=lambda cutoff_s: [(s.solution.objective_s, s) for s in scenario.families(cutoff_s)],
        )  # fmt: skip
    return Scenario(scenario.name, scenario.bound_s, solve, scenario.quick_bound_s(), scenario.first_bound_s)


def _refuse_unmatched(constraints: Sequence[Constraint], graph: OpGraph) -> None:
    """Say which patterns name no module that computes anything."""
    layers = range(len(graph.layers))
    mistakes = [
        f"constraint {c.pattern}:{c.key}: no module of the model has such a name; its layers are "
        f"{', '.join(layer.name for layer in graph.layers[:4])}, ..."
        for c in constraints
        if c.pattern and not any(covered_ops(c, graph, i) for i in layers)
    ]
    if mistakes:
        raise ConfigError(*mistakes)


def _refuse_unsupported(config: ManualConfig) -> None:
    """Say which keys this version can't plan."""
    wanted = {
        "cp": 1,
        "ep": 1,
        "offload": "none",
        "zero_group": "all",
    }
    mistakes = [
        f"{key}={getattr(config, key)}: not supported in this version; give {value or 'nothing'}"
        for key, value in wanted.items()
        if getattr(config, key) != value
    ]
    if config.framework != "autopar":
        mistakes.append(f"framework={config.framework}: predicted by `estimate` only; give autopar to plan")
    if mistakes:
        raise ConfigError(*mistakes)
