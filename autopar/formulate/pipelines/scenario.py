"""One pipeline scenario: a mesh for each group of devices, a microbatch, a schedule. Where to cut, how to run it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from autopar.cost.orders import Shape
from autopar.cost.schedule import fullest, holdings
from autopar.engine.partition import bound_s, least_step_s, partitions
from autopar.engine.stack_problem import Floats
from autopar.formulate.chains.strategies import Chains
from autopar.formulate.layers.tables import Setting
from autopar.formulate.pipelines.book import Chunk, GroupPlan, Ranges, Seam, StageBook, StagePart
from autopar.formulate.pipelines.ground import Ground
from autopar.formulate.pipelines.paths import Ints, LeastPasses, Work, group_paths, left_out
from autopar.formulate.pipelines.piped import PipedTime, run
from autopar.formulate.pipelines.stages import balanced_cuts, even_cuts
from autopar.graph import DTYPE_BYTES
from autopar.plan import Between
from autopar.schedules import SPLIT

CANDIDATES = 24
"""Partitions simulated at most for one seam."""

NEWTON_STEPS, NEAR, STEEP = 2, 0.999, 0.1
"""Steps to the work at which a path is as long as a cutoff; the share over which slopes are taken; the least slope."""

Cuts = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SolvedPipeline:
    """A pipeline in full: plans of the groups of devices, where these stand, what they send each other, and a step in
    time."""

    shape: Shape
    setting: Setting
    groups: tuple[GroupPlan, ...]
    time: PipedTime
    between: Between
    ground: Ground

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return self.time.simulation.step_time_s

    @property
    def stages(self) -> list[StagePart]:
        """The stages in order of the model."""
        return _in_order(self.groups, self.shape)

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors on the fullest device."""
        return max(group.peak_bytes for group in self.groups)


@dataclass
class PipelineScenario:
    """`books`: what stages can be, for each group of devices. `cuts` None: wherever pays.

    `ideal_s`: seconds of a microbatch at the devices' full speed, 0 if not known.
    """

    books: tuple[StageBook, ...]
    ground: Ground
    shape: Shape
    cuts: Cuts | None = None
    ideal_s: float = 0.0

    @property
    def book(self) -> StageBook:
        """The first group's, for what all have in common."""
        return self.books[0]

    @property
    def chains(self) -> Chains:
        """The strategies that there are for the layers of the first group."""
        return self.book.chains

    @property
    def alike(self) -> Hashable:
        """The same for scenarios on the same devices in the same order under the same schedule."""
        return self.shape, self.ground.devices

    @property
    def possible(self) -> bool:
        """Whether pins and batch leave plans at all."""
        return all(book.chains.possible for book in dict.fromkeys(self.books))

    @property
    def _seams(self) -> list[Seam]:
        """Seams worth trying on some group and possible on all."""
        books = list(dict.fromkeys(self.books))
        return [s for s in dict.fromkeys(seam for b in books for seam in b.seams) if all(b.knows(s) for b in books)]

    @property
    def name(self) -> str:
        """Stages, mesh and microbatches."""
        shape, setting = self.shape, self.book.chains.setting
        chunks = f" in {shape.chunks} chunks each" if shape.chunks > 1 else ""
        mesh = "x".join(map(str, setting.sizes)) or "1"
        return (
            f"{shape.groups} stages ({shape.schedule}){chunks} of {mesh} devices{self.chains.inside}, "
            f"{shape.num_microbatches} microbatches of {setting.batch}"
        )

    @property
    def least_bytes(self) -> float:
        """No plan of the scenario holds less than this on every device, once bounded."""
        return min(book.least_bytes for book in self.books)

    def quick_bound_s(self) -> float:
        """A bound from the model's operations alone."""
        return self._least_step_s(self.ideal_s)

    def calls_bound_s(self) -> float:
        """A bound from the calls of layers alone, without changes of layout."""
        if not self.possible:
            return np.inf
        if self._tried:
            return self._bound_by([book.calls_ranges for book in self.books], (0,) * self.shape.stages)
        each = zip(*(book.chains.calls for book in dict.fromkeys(self.books)), strict=True)
        runs = self.book.chains.runs
        fastest = [run.count * min(one.both_s for one in calls) for run, calls in zip(runs, each, strict=True)]
        return self._least_step_s(sum(fastest))

    def _least_step_s(self, micro_s: float) -> float:
        """A bound from the seconds of a microbatch."""
        shape, stages = self.shape, self.shape.stages
        if self._tried or shape.schedule in SPLIT or len(set(self.books)) > 1 or not np.isfinite(micro_s):
            return shape.num_microbatches * micro_s / shape.groups
        return least_step_s(micro_s, shape.num_microbatches, stages)

    def first_bound_s(self) -> float:
        """A bound from the longest run of layers alone, with one microbatch in flight; inf where no plan is legal."""
        one = tuple(int(stage < self.shape.groups) for stage in range(self.shape.stages))
        return self._bound_by([book.rough_ranges for book in self.books], one) if self.possible else np.inf

    def run_bound_s(self) -> float:
        """A bound from the longest run of layers alone with prices of bytes."""
        return self._bound_by([book.run_ranges for book in self.books], fullest(self.shape))

    def bound_s(self) -> float:
        """Seconds that no plan of this scenario under the limit can beat; inf where none is legal or small enough."""
        return self._bound_by([book.ranges for book in self.books], fullest(self.shape))

    def guess_s(self) -> float:
        """About what the fastest plan takes: the bound, with all passes as much longer as the byte limit makes them and
        as many microbatches in flight in all chunks of a group.

        Bounds let the passes on the way to a group, and those of a part of its work, do as if there were no limit.
        """
        ranges, shape = [book.ranges for book in self.books], self.shape
        held = [sum(fullest(shape)[s] for s in shape.stages_of(g)) for g in range(shape.groups)]
        in_flight = [-(-held[shape.group_of(s)] // shape.chunks) for s in range(shape.stages)]
        cuts = self.cuts or even_cuts(len(self.book.units), shape.stages)
        each = [
            own.stretch(chunks, [in_flight[s] for s in shape.stages_of(g)])
            for g, (own, chunks) in enumerate(zip(ranges, self._chunks(cuts), strict=True))
        ]
        times = sum(each) / len(each)
        if not np.isfinite(times):
            return self.bound_s()
        known = {own: own.stretched(times) for own in dict.fromkeys(ranges)}
        return self._bound_by([known[own] for own in ranges], in_flight)

    def _bound_by(self, ranges: Sequence[Ranges], in_flight: Sequence[int]) -> float:
        if not self._tried:
            ends = self._ends(ranges, in_flight)
            return bound_s(*self._bounds(ranges, in_flight, ends), ends)
        return min(self._fixed_bound(cuts, ranges, in_flight) for cuts in self._tried)

    @cached_property
    def _tried(self) -> tuple[Cuts, ...]:
        """The cuts that are tried; none where they are searched for.

        Those given; with several chunks a device the most even ones, and those that even out the groups' work.
        """
        if self.cuts is not None or self.shape.chunks == 1:
            return () if self.cuts is None else (self.cuts,)
        units, groups = self.book.units, range(self.shape.groups)
        balanced = balanced_cuts(units.flops, [self.shape.stages_of(g) for g in groups])
        return tuple(dict.fromkeys((balanced, even_cuts(len(units), self.shape.stages))))

    def _ends(self, ranges: Sequence[Ranges], in_flight: Sequence[int]) -> Ints:
        """(n + 1, w): where a stage from each unit on may end, as no partition with a longer one has a lower bound than
        the most even one."""
        units = len(self.book.units)
        most = self._fixed_bound(even_cuts(units, self.shape.stages), ranges, in_flight)
        short = np.min([own.passes_s for own in dict.fromkeys(ranges)], axis=0) <= most
        start = np.arange(units + 1)[:, None]
        width = int((short * (start.T - start)).max()) or units
        found: Ints = np.minimum(start + np.arange(1, width + 1), units)
        return found

    def _bounds(self, ranges: Sequence[Ranges], in_flight: Sequence[int], end: Ints) -> tuple[Floats, Floats]:
        """Loads and spans (2, stages, n + 1, w) of each stage, which is a group, from each unit on to `end`: of paths
        by themselves, and of those that wait for the stages before."""
        start = np.arange(len(self.book.units) + 1)[:, None]
        by_count: dict[tuple[Ranges, int], Floats] = {}
        for key in zip(ranges, in_flight, strict=True):
            if key not in by_count:
                by_count[key] = key[0].load(key[1])[start, end]
        loads = _by_stage([by_count[key] for key in zip(ranges, in_flight, strict=True)])
        known = {own: (own.passes_s[start, end], own.least.of(start, end)) for own in dict.fromkeys(ranges)}
        passes, each = _by_stage([known[own][0] for own in ranges]), [known[own][1] for own in ranges]
        work = self._work([_joined(each)], loads, passes)
        paths = group_paths(self.shape, self._least(ranges), start[None, None], end[None, None], work)
        spans = _by_stage([self._span(own, start, end) for own in ranges])
        return np.stack([np.broadcast_to(of, spans.shape) for of in paths]), np.stack([np.zeros_like(spans), spans])

    def _fixed_bound(self, cuts: Cuts, ranges: Sequence[Ranges], in_flight: Sequence[int]) -> float:
        """The longest of the paths of all groups."""
        return float(self._fixed_paths(cuts, ranges, self._loads(cuts, ranges, in_flight)).max())

    def _loads(self, cuts: Cuts, ranges: Sequence[Ranges], in_flight: Sequence[int]) -> Floats:
        """(groups,): least seconds of work of each group."""
        loads = [
            own.joint_load(chunks, [in_flight[s] for s in self.shape.stages_of(g)])
            for g, (own, chunks) in enumerate(zip(ranges, self._chunks(cuts), strict=True))
        ]
        return np.array(loads)

    def _fixed_paths(self, cuts: Cuts, ranges: Sequence[Ranges], loads: Floats) -> Floats:
        """(groups,): the longest path of each group, which works for `loads` (groups,)."""
        shape = self.shape
        of_group = np.array([shape.stages_of(g) for g in range(shape.groups)])
        starts, ends = np.array(cuts)[of_group], np.array(cuts)[of_group + 1]
        passes = np.array([own.passes_s[a, b].sum() for own, a, b in zip(ranges, starts, ends, strict=True)])
        each = [
            _joined([own.least.of(a, b) for own, a, b in zip(ranges, starts[:, c], ends[:, c], strict=True)])
            for c in range(shape.chunks)
        ]
        paths = group_paths(shape, self._least(ranges), starts, ends, self._work(each, loads, passes))
        spans = np.empty(shape.stages)
        for g, own in enumerate(ranges):
            spans[of_group[g]] = self._span(own, starts[g], ends[g])
        before = np.concatenate([[0.0], np.cumsum(spans)])[of_group[:, 0]]
        longest: Floats = np.maximum(paths.alone, before + paths.behind)
        return longest

    def _most_work(self, cuts: Cuts, cutoff_s: float) -> Floats:
        """(groups,): seconds of work at which a group's path is as long as the cutoff, or a bit more.

        Paths are convex in the work: steps along their slopes from above (Newton's) stay above.
        """
        ranges = [book.ranges for book in self.books]
        loads = np.full(self.shape.groups, cutoff_s)
        for _ in range(NEWTON_STEPS if np.isfinite(cutoff_s) else 0):
            paths, less = (self._fixed_paths(cuts, ranges, loads * share) for share in (1.0, NEAR))
            if not np.isfinite(paths).all():
                break
            slopes = np.maximum((paths - less) / (loads * (1 - NEAR)), STEEP)
            loads = loads - np.maximum(paths - cutoff_s, 0.0) / slopes
        return loads

    def _least(self, ranges: Sequence[Ranges]) -> LeastPasses:
        """Of passes up to each unit, on the devices that suit it best."""
        each = [own.least for own in dict.fromkeys(ranges)]
        if len(each) > 1:
            gains = [np.min([np.diff(up_to) for up_to in of], axis=0) for of in zip(*each, strict=True)]
            each = [LeastPasses(*(np.concatenate([[0.0], np.cumsum(gain)]) for gain in gains))]
        return each[0] if self.shape.schedule in SPLIT else each[0]._replace(inputs=each[0].backward)

    def _work(self, each: Sequence[tuple[Floats, Floats, Floats]], loads: Floats, passes: Floats) -> Work:
        """What groups work, by the passes of `each` chunk and by bounds of all with and without what is done once."""

        def work(once: bool, ahead: Ints, late: Ints) -> Floats:
            return left_out(self.shape.num_microbatches, loads if once else passes, each, ahead, late)

        return work

    def _span(self, own: Ranges, start: Ints, end: Ints) -> Floats:
        """Seconds of one microbatch to a stage's end and back, but for weights that are put off."""
        passes: Floats = own.passes_s[start, end] / self.shape.num_microbatches
        if self.shape.schedule not in SPLIT:
            return passes
        forward, _, inputs = own.least.of(start, end)
        return np.where(np.isfinite(passes), forward + inputs, np.inf)

    # --- exact ----------------------------------------------------------------------------------------------------

    def solve(self, cutoff_s: float = np.inf) -> SolvedPipeline | None:
        """The fastest plan below `cutoff_s`, None if none was found."""
        if not self.possible:
            return None
        best: SolvedPipeline | None = None
        for seam in self._seams:
            for cuts in self._tried or (None,):
                found = self._search(seam, cutoff_s) if cuts is None else self._at_cuts(cuts, seam, cutoff_s)
                if found is not None and found.step_time_s < cutoff_s:
                    best, cutoff_s = found, found.step_time_s
        return best

    def enough_bytes(self) -> float:
        """A limit under which `solve` has an answer, near the least there is; inf where nothing is legal."""
        return self.tightest()[0]

    def tightest(self) -> tuple[float, int]:
        """Of the most even stages, all as lean as can be, the one that holds most: its bytes and its number."""
        found = [
            max(
                (self.books[g].least_peak(c, holdings(self.shape, g), seam), g)
                for g, c in enumerate(self._chunks(cuts))
            )
            for seam in self._seams
            for cuts in self._tried or (even_cuts(len(self.book.units), self.shape.stages),)
        ]
        return min(found, default=(np.inf, 0))

    def _at_cuts(self, cuts: Cuts, seam: Seam, cutoff_s: float) -> SolvedPipeline | None:
        """The fastest plan with stages cut so; groups that promise least to have one come first."""
        plans: dict[int, GroupPlan] = {}
        chunks, most_s = self._chunks(cuts), self._most_work(cuts, cutoff_s)
        loads = self._loads(cuts, [book.ranges for book in self.books], fullest(self.shape))
        for g in np.argsort(-loads / np.where(np.isfinite(most_s), most_s, 1.0), kind="stable").tolist():
            plan = self._solved(g, chunks[g], seam, float(most_s[g]))
            if plan is None:
                return None
            plans[g] = plan
        return self._simulated([plans[g] for g in range(self.shape.groups)], seam)

    def _chunks(self, cuts: Cuts) -> list[tuple[Chunk, ...]]:
        """Chunks of each group."""
        stages = [Chunk(a, b) for a, b in pairwise(cuts)]
        return [tuple(stages[s] for s in self.shape.stages_of(g)) for g in range(self.shape.groups)]

    def _solved(self, group: int, chunks: Sequence[Chunk], seam: Seam, cutoff_s: float) -> GroupPlan | None:
        book = self.books[group]
        return book.solve(chunks, holdings(self.shape, group), seam, book.chains.budget.limit_bytes, cutoff_s)

    def _search(self, seam: Seam, cutoff_s: float) -> SolvedPipeline | None:
        """Look at partitions in order of their bound; a stage is solved when a partition with it comes first."""
        every = np.broadcast_to(np.arange(len(self.book.units) + 1), (len(self.book.units) + 1,) * 2)
        loads, spans = map(np.array, self._bounds([book.ranges for book in self.books], fullest(self.shape), every))
        exact: dict[tuple[int, int, int], GroupPlan | None] = {}
        best: SolvedPipeline | None = None
        seen: set[Cuts] = set()
        while len(seen) < CANDIDATES:
            cuts = self._next(loads, spans, seen, cutoff_s)
            if cuts is None:
                break
            chunks = self._chunks(cuts)
            unknown = [i for i, (c,) in enumerate(chunks) if (i, c.first, c.end) not in exact]
            for i in unknown:
                self._learn(i, chunks[i][0], seam, exact, loads, spans, cutoff_s)
            if unknown:
                continue
            seen.add(cuts)
            found = self._at_cuts(cuts, seam, cutoff_s)
            if found is not None and found.step_time_s < cutoff_s:
                best, cutoff_s = found, found.step_time_s
        return best

    def _next(self, loads: Floats, spans: Floats, seen: set[Cuts], cutoff_s: float) -> Cuts | None:
        """The first partition not seen yet whose bound is below the cutoff."""
        for bound, cuts in partitions(loads, spans):
            if bound >= cutoff_s:
                return None
            if cuts not in seen:
                return cuts
        return None

    def _learn(
        self,
        stage: int,
        chunk: Chunk,
        seam: Seam,
        exact: dict[tuple[int, int, int], GroupPlan | None],
        loads: Floats,
        spans: Floats,
        cutoff_s: float,
    ) -> None:
        """Put a stage's exact figures in the place of its bounds."""
        plan = self._solved(stage, (chunk,), seam, cutoff_s)
        exact[stage, chunk.first, chunk.end] = plan
        place = stage, chunk.first, chunk.end
        if plan is None:
            loads[(slice(None), *place)] = spans[(slice(None), *place)] = np.inf
            return
        (part,) = plan.chunks
        ranges = [book.ranges for book in self.books]
        start, end = np.array([[chunk.first]]), np.array([[chunk.end]])
        paths = group_paths(self.shape, self._least(ranges), start, end, self._exact_work(part))
        put_off = part.weight_s if self.shape.schedule in SPLIT else 0.0
        loads[0][place], loads[1][place] = paths.alone[stage], paths.behind[stage]
        spans[1][place] = part.forward_s + part.backward_s - put_off

    def _exact_work(self, part: StagePart) -> Work:
        """What groups work that have this one chunk each."""
        forward_s, backward_s, step_s, weight_s = part.seconds

        def work(once: bool, ahead: Ints, late: Ints) -> Floats:
            all_of_it = self.shape.num_microbatches * (forward_s + backward_s) + once * step_s
            found: Floats = all_of_it - ahead[:, 0] * forward_s - late[:, 0] * weight_s
            return found

        return work

    def _simulated(self, groups: Sequence[GroupPlan], seam: Seam) -> SolvedPipeline:
        shape, setting = self.shape, self.book.chains.setting
        stages = _in_order(groups, shape)
        between = self._between(stages, seam)
        seconds = [stage.seconds for stage in stages]
        found = run(shape, seconds, between, self.ground)
        return SolvedPipeline(shape, setting, tuple(groups), found, between, self.ground)

    def _between(self, stages: Sequence[StagePart], seam: Seam) -> Between:
        """What the stages send each other, and the gradients of parameters that several groups hold."""
        users: dict[str, set[int]] = {}
        size: dict[str, int] = {}
        for i, stage in enumerate(stages):
            for name, held in self._tied_bytes(stage):
                users.setdefault(name, set()).add(self.shape.group_of(i))
                size[name] = held
        shared = [name for name, groups in users.items() if len(groups) > 1]
        return Between(
            tuple(self.book.seam_bytes(s.chunk.first, seam) for s in stages[1:]),
            tuple(size[name] for name in shared),
            tuple(tuple(sorted(users[name])) for name in shared),
        )

    def _tied_bytes(self, stage: StagePart) -> Iterator[tuple[str, int]]:
        """Tied parameters that a stage uses, with the bytes of their gradients on one device."""
        graph, chains = self.book.units.graph, self.book.chains
        layer_index = self.book.units.starts[stage.chunk.first]
        for part in stage.parts:
            run = chains.runs[part.run]
            names = dict(zip(run.layer.params, graph.layers[layer_index].params, strict=True))
            for local in run.around.tied:
                layout = part.column.strategy.relays.get(local, ())
                spec = run.layer.values[local]
                ways = int(np.prod([chains.setting.sizes[a] for a, p in enumerate(layout) if p >= 0]))
                elements = spec.bytes_at(1) // DTYPE_BYTES[spec.dtype] // ways
                yield names[local], elements * DTYPE_BYTES[chains.budget.policy.gradients]
            layer_index += part.count


def _joined(each: Sequence[tuple[Floats, Floats, Floats]]) -> tuple[Floats, Floats, Floats]:
    """Passes of a chunk of each group, (groups, ...) each."""
    forward, backward, inputs = (_by_stage(of) for of in zip(*each, strict=True))
    return forward, backward, inputs


def _by_stage(each: Sequence[Floats]) -> Floats:
    """Arrays of the stages as one, which is not to be changed: where all are the same it is that one seen often."""
    if all(own is each[0] for own in each):
        return np.broadcast_to(each[0], (len(each), *each[0].shape))
    return np.stack(each)


def _in_order(groups: Sequence[GroupPlan], shape: Shape) -> list[StagePart]:
    return [groups[shape.group_of(s)].chunks[s // shape.groups] for s in range(shape.stages)]
