"""Pipelines: hand-written ones, searched ones, and stages against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.cost.orders import Shape
from autopar.cost.schedule import Holding, holdings, simulate
from autopar.errors import ConfigError, InfeasibleError
from autopar.formulate.chains.columns import Budget, Column
from autopar.formulate.chains.known import Known
from autopar.formulate.config import ManualConfig, parse_constraints
from autopar.formulate.pipelines.book import Chunk, Seam, StageBook
from autopar.formulate.pipelines.scenario import PipelineScenario
from autopar.formulate.pipelines.space import Pipelines
from autopar.formulate.pipelines.stages import Units, balanced_cuts, even_cuts
from autopar.graph import CollectiveKey
from autopar.plan import POLICIES, LayerStrategy, PlanRecord
from autopar.schedules import group_of
from tests.formulate.cases import planner, traced

PIPELINES = [
    "pp=2,microbatch_size=1",
    "pp=2,schedule=gpipe,microbatch_size=2",
    "pp=2,dp=2,microbatch_size=1,zero=1",
    "pp=2,tp=2,microbatch_size=2,recompute=full",
    "pp=2,dp=2,microbatch_size=1,zero=3",
    "pp=2,virtual_stages=2,schedule=interleaved,microbatch_size=1",
    "pp=4,microbatch_size=2",
    "pp=2,schedule=zb,microbatch_size=1",
    "pp=2,dp=2,schedule=zbv,microbatch_size=1,recompute=full",
    "pp=2,schedule=dualpipev,microbatch_size=1",
]


def _estimate(model: str, text: str) -> PlanRecord:
    config = ManualConfig.parse(text)
    devices = config.pp * config.dp * config.tp
    return planner(model, f"1x{devices}xa100-80gb", 8).estimate(config)


@pytest.mark.parametrize("model", ["gpt", "tied", "llama"])
@pytest.mark.parametrize("text", PIPELINES)
def test_hand_written(model: str, text: str) -> None:
    """Stages cover the layers in order on groups of consecutive ranks, and the seconds by kind are the step."""
    config = ManualConfig.parse(text)
    if config.pp * config.chunks > len(Units(traced(model))):
        pytest.skip("fewer blocks than stages")
    record = _estimate(model, text)
    size = config.dp * config.tp
    assert record.pp_degree == config.pp
    assert record.schedule == config.schedule
    assert [s.first_layer for s in record.stages] == np.cumsum(
        [0, *(len(s.assignment) for s in record.stages[:-1])]
    ).tolist()
    assert sum(len(s.assignment) for s in record.stages) == len(record.layer_names)
    for number, stage in enumerate(record.stages):
        group = group_of(config.schedule, number, config.pp)
        assert stage.devices == tuple(range(group * size, (group + 1) * size))
    assert sum(record.time_by_kind_s.values()) == pytest.approx(record.step_time_s)
    assert record.bubble_s == record.time_by_kind_s["bubble"]
    assert sum(record.memory_by_category.values()) == record.peak_memory_bytes
    assert record.lower_bound_s is None


def test_neighbouring_stages_agree() -> None:
    """A stage leaves its values as the next one expects them."""
    record = _estimate("llama", "pp=2,tp=2,sp=1,microbatch_size=2")
    for before, behind in pairwise(record.stages):
        assert before.strategies[before.assignment[-1]].exit == behind.strategies[behind.assignment[0]].entry


def test_more_in_flight_holds_more() -> None:
    """gpipe keeps all microbatches, 1f1b as many as there are stages: its activations are less."""
    slim = _estimate("llama", "pp=2,microbatch_size=1")
    fat = _estimate("llama", "pp=2,schedule=gpipe,microbatch_size=1")
    assert fat.memory_by_category["activations"] > 2 * slim.memory_by_category["activations"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp=2,schedule=zbv,virtual_stages=3,microbatch_size=1", "virtual_stages=3"),
        ("pp=2,stage_layers=1/9,microbatch_size=1", "add up"),
        ("pp=2,virtual_stages=2,schedule=gpipe,microbatch_size=1", "gpipe"),
        ("pp=2,microbatch_size=8", "microbatch"),
    ],
)
def test_what_cannot_be_run_is_refused(text: str, words: str) -> None:
    """Schedules and shapes that can't be run are refused with a message that says why."""
    with pytest.raises(ConfigError, match=words):
        _estimate("llama", text)


def test_even_cuts() -> None:
    """Stages differ by one unit at most, and the ends are not the larger ones."""
    assert even_cuts(10, 4) == (0, 2, 5, 8, 10)
    assert even_cuts(8, 4) == (0, 2, 4, 6, 8)


def test_balanced_cuts() -> None:
    """A heavy last unit takes blocks from its group; of all cuts none has less work on the fullest group."""
    there_and_back = [(0, 3), (1, 2)]
    assert balanced_cuts([1.0] * 8, there_and_back) == (0, 2, 4, 6, 8)
    for heavy in (2.0, 3.5, 5.0):
        work = np.array([1.0] * 11 + [heavy])

        def most(inner: tuple[int, ...], work: NDArray[np.float64] = work) -> float:
            each = [work[a:b].sum() for a, b in pairwise((0, *inner, 12))]
            return float(max(each[0] + each[3], each[1] + each[2]))

        found = balanced_cuts(work.tolist(), there_and_back)
        assert most(found[1:-1]) == min(map(most, combinations(range(1, 12), 3)))


def test_stages_beside_a_heavy_head_are_shorter() -> None:
    """Where the head is as much work as some blocks, the search gives its group of a V-shaped pipeline fewer."""
    maker = planner("heavy head", "1x2xa100-80gb", 16, None, ("pp=2", "schedule=zbv", "microbatch_size=1"))
    plan, even = maker.plan(), maker.estimate(ManualConfig(pp=2, schedule="zbv", microbatch_size=1))
    sizes = [len(stage.assignment) for stage in plan.stages]
    assert sizes[0] + sizes[3] - 2 < sizes[1] + sizes[2]  # without embedding and head
    assert plan.step_time_s < even.step_time_s
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= plan.step_time_s


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_search_is_never_slower_than_configs(model: str) -> None:
    """With pipelines asked for, the plan is as fast as the best of a grid of hand-written ones; its bound is below."""
    maker = planner(model, "1x2xa100-80gb", 8, None, ("pp=2",))
    plan = maker.plan()
    assert plan.pp_degree == 2
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= plan.step_time_s
    for schedule, size, recompute in product(("1f1b", "gpipe"), (1, 2, 4), ("none", "full")):
        config = ManualConfig(pp=2, schedule=schedule, microbatch_size=size, recompute=recompute)
        assert plan.step_time_s <= maker.estimate(config).step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("share", [None, 0.8])
def test_stages_against_brute_force(share: float | None) -> None:
    """Of all partitions and all priced strategies of uniform stages none is faster when simulated; bounds are below."""
    free = planner("llama", "1x2xa100-80gb", 8, None, ("pp=2",))
    limit = None if share is None else int(free.plan().peak_tensor_bytes * share)
    maker = planner("llama", "1x2xa100-80gb", 8, limit, ("pp=2",))
    budget = Budget(maker.limit_bytes, POLICIES[maker.request.dtype], maker.request.optimizer)
    pipelines = Pipelines(maker.graph, maker.pricer, 8, budget, Known(maker.pricer))
    searched = list(pipelines.searched(2, parse_constraints(["pp=2", "microbatch_size=1"])))
    plain = [scenario for scenario in searched if scenario.shape.chunks == 1]
    split = [replace(s, shape=replace(s.shape, schedule="zb")) for s in plain if s.shape.schedule == "1f1b"]
    assert split
    for scenario in (*plain, *split):
        found = scenario.solve()
        best = _brute_force(scenario.book, scenario.shape, maker.limit_bytes)
        assert (found is None) == (best == np.inf)
        if found is not None:
            assert found.step_time_s <= best * (1 + 2e-3)
            assert max(scenario.first_bound_s(), scenario.bound_s()) <= best * (1 + 1e-9)
            assert scenario.quick_bound_s() <= best


@pytest.mark.parametrize("model", ["gpt", "tied"])
def test_cutoffs_leave_what_is_below_them(model: str) -> None:
    """Groups given no more work than a cutoff leaves them make the plan that is found without one, just below it; and
    work beyond that makes a path as long as the cutoff."""
    free = planner(model, "1x2xa100-80gb", 8, None, ("pp=2",))
    limit = int(free.plan().peak_tensor_bytes * 0.8)
    asked = parse_constraints(["pp=2", "microbatch_size=1"])

    def scenarios() -> list[PipelineScenario]:
        maker = planner(model, "1x2xa100-80gb", 8, limit, ("pp=2",))
        budget = Budget(maker.limit_bytes, POLICIES[maker.request.dtype], maker.request.optimizer)
        return list(Pipelines(maker.graph, maker.pricer, 8, budget, Known(maker.pricer)).searched(2, asked))

    cut = 0
    for scenario, again in zip(scenarios(), scenarios(), strict=True):
        found = scenario.solve()
        if found is None:
            continue
        near = again.solve(found.step_time_s * (1 + 1e-6))
        assert near is not None
        assert near.step_time_s == pytest.approx(found.step_time_s)
        assert again.solve(found.step_time_s * (1 - 1e-6)) is None
        ranges, cutoff_s = [book.ranges for book in scenario.books], found.step_time_s
        for cuts in scenario._tried or (even_cuts(len(scenario.book.units), scenario.shape.stages),):
            most = scenario._most_work(cuts, cutoff_s)
            paths = scenario._fixed_paths(cuts, ranges, most)
            assert (paths >= cutoff_s * (1 - 1e-9))[most < cutoff_s].all()
            cut += int((most < cutoff_s).sum())
    assert cut


def _brute_force(book: StageBook, shape: Shape, limit: int) -> float:
    """The fastest simulated step over all partitions, each run of layers of a stage under one strategy."""
    best, held = np.inf, [holdings(shape, g) for g in range(shape.groups)]
    for seam in book.seams:
        for middle in range(1, len(book.units)):
            cuts = (0, middle, len(book.units))
            stages = [
                _ways(book, Chunk(a, b), held_here, seam, limit)
                for (a, b), held_here in zip(pairwise(cuts), held, strict=True)
            ]
            sent = _sent_s(book, middle, seam)
            for one, other in product(*stages):
                forward, backward, step, weights = zip(one, other, strict=True)
                best = min(best, simulate(shape, forward, backward, [sent], step, weights).step_time_s)
    return best


def _sent_s(book: StageBook, unit: int, seam: Seam) -> float:
    key = CollectiveKey("broadcast", book.seam_bytes(unit, seam), 2, 1)
    return float(book.chains.pricer.collectives([key]).seconds[0])


def _ways(
    book: StageBook, chunk: Chunk, held: Sequence[Holding], seam: Seam, limit: int
) -> set[tuple[float, float, float, float]]:
    """(forward, backward, step, weights) of every legal choice of one column a run, by the memory's definition."""
    slices = list(book.units.slices(book.chains.runs, chunk.first, chunk.end))
    found = set()
    for columns in product(*(book.columns[r] for r, _ in slices)):
        states = [(c.strategy.entry, c.strategy.exit) for c in columns]
        joined = all(a[1] == b[0] for a, b in pairwise(states))
        loops = all(n == 1 or e == x for (_, n), (e, x) in zip(slices, states, strict=True))
        first = chunk.first == 0 or states[0][0] == seam.layout
        last = chunk.end == len(book.units) or states[-1][1] == seam.layout
        if joined and loops and first and last and _peak(book, chunk, held, columns, slices, seam) <= limit:
            figures = [(c.figures, n) for c, (_, n) in zip(columns, slices, strict=True)]
            found.add(
                (
                    sum(f.forward_s * n for f, n in figures),
                    sum(f.backward_s * n for f, n in figures),
                    sum(f.step_s * n for f, n in figures),
                    sum(f.weight_s * n for f, n in figures),
                )
            )
    return found


def _peak(
    book: StageBook,
    chunk: Chunk,
    held: Sequence[Holding],
    columns: Sequence[Column],
    slices: Sequence[tuple[int, int]],
    seam: Seam,
) -> int:
    """docs/design.md, "Memory", for a stage with several microbatches in flight."""
    memory = [(c.figures.memory, n) for c, (_, n) in zip(columns, slices, strict=True)]
    always = sum((m.parameters + m.optimizer + m.inputs) * n for m, n in memory) + book.inputs_bytes((chunk,), seam)
    gradients = sum(m.gradients * n for m, n in memory)
    moments = [always + gradients + max(m.step for m, _ in memory)]
    moments.append(always + sum((m.reduced + m.update) * n for m, n in memory))
    for holding in held:
        (backward,) = book.backwards((chunk,), [holding], seam)
        ((saved,), (grown,)) = holding.saved, holding.grown
        (late,), (begun,) = holding.put_off or (0,), holding.begun or (grown,)
        for r, (own, count) in enumerate(memory):
            total = always + backward.held_bytes
            for k, (m, n) in enumerate(memory):
                if holding.half == 2:  # gradients of weights of runs up to this one are made of what waited
                    total += saved * m.saved * n + late * m.put_off * n + m.gradients * n
                    total += (m.put_off - m.late) * n if k >= r else 0
                    continue
                total += (saved - (k > r)) * m.saved * n
                total += (late + (k > r) * holding.half) * m.put_off * n
                if begun or k > r:
                    total += (m.gradients - (0 if grown or (k > r and not holding.half) else m.late)) * n
            if holding.half == 2:
                larger = max(own.put_off, own.late)
                total += (larger - own.put_off) * count + own.put_off + own.late - larger
            elif grown and not holding.half:
                total += own.transient
            else:
                # of each layer the larger of what is saved and what that turns into; of one all it saved and makes
                made = (not begun) * (own.gradients - own.late) + (not grown and not holding.half) * own.late
                into = made + holding.half * own.put_off
                total += (max(own.saved, into) - own.saved) * count + own.saved + made - max(own.saved, into)
                total += own.parting if holding.half else own.transient
            moments.append(total)
    return max(moments)


def test_infeasible_names_the_limit() -> None:
    """Where nothing fits the message says what is needed and what there is."""
    with pytest.raises(InfeasibleError, match=r"limit is 1\.00 MiB"):
        planner("llama", "1x2xa100-80gb", 8, 1 << 20, ("pp=2",)).plan()


def test_partitions_of_blocks() -> None:
    """Every way to cut the blocks is a way to cut the layers: nothing is lost or doubled."""
    units = Units(traced("gpt"))
    for inner in combinations(range(1, len(units)), 1):
        cuts = (0, *inner, len(units))
        layers = [units.starts[b] - units.starts[a] for a, b in pairwise(cuts)]
        assert sum(layers) == len(traced("gpt").layers)


def test_ways_to_keep_tied_parameters_count_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ways, three are cheaper where embeddings are read and dearer in all, as the head's seconds say."""
    book = StageBook(None, None)  # type: ignore[arg-type]
    strategy = LayerStrategy((), (), {}, {})
    ways = [(0, 1.0, 9.0), (4, 1.0, 8.0), (8, 1.0, 7.0), (12, 2.0, 3.0), (16, 0.5, None)]
    seconds: dict[int, float] = {}

    def column(tie: int, cost_s: float) -> Column:
        made = Column(strategy, None, tie)  # type: ignore[arg-type]
        seconds[id(made)] = cost_s
        return made

    embed = tuple(column(tie, first) for tie, first, _ in ways)
    head = tuple(column(tie, last) for tie, _, last in ways if last is not None)
    book.__dict__["columns"] = (embed, (column(-1, 5.0),), head)
    monkeypatch.setattr(StageBook, "_seconds", lambda _, column: seconds[id(column)])
    assert book._ties() == [12, 8, 4]
