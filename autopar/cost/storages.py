"""In which storages the values of a program lie, and which of them its steps make, read and keep: at any batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from autopar.cost.work import is_pointwise, passes_gradient
from autopar.shard.program import Program, Relayout, Step, made_by, read_by
from autopar.shard.put_off import product_with_weight
from autopar.shard.saved import run_again, saved_names

Names = tuple[str, ...]


class Place(NamedTuple):
    """What a step does to values and to storages.

    `made`: names of its results, `made_in` their storages, `used_in` also those it reads, `kept_in` those it keeps for
    its backward. `wanting`: names it reads that get a gradient, but for `weights`, which are parameters; `passes_on`:
    whether that is the gradient of the result, in the same buffer. `product`: the storage of what is multiplied by a
    weight, '' in other steps. `buffered`: of changes of layout along an inner dim both ends, which go through a second
    buffer. `summed`: operands of pointwise ops that get a gradient; `scored`: the operand of a cross entropy.
    """

    made: Names
    made_in: Names
    used_in: frozenset[str]
    kept_in: frozenset[str]
    wanting: Names
    weights: Names = ()
    passes_on: bool = False
    product: str = ""
    buffered: Names = ()
    summed: Names = ()
    scored: str = ""


class Again(NamedTuple):
    """Of a region the steps that run again, the last of them to use each storage it makes, and those it keeps.

    `there[k]`: storages it made anew that are there in the backward of its k-th step, which need them or are its
    `results`; the last one holds in that of later steps, too. `wanted`: the last step in whose backward, the first to
    come, what it makes is there. `results`: the storages it makes that stay until its own backward has ended; none but
    in light regions.
    """

    steps: range
    last: dict[str, int]
    kept: frozenset[str]
    there: tuple[frozenset[str], ...]
    wanted: int
    results: frozenset[str]


@dataclass(frozen=True, eq=False)
class Storages:
    """A program's storages, each named by the first value that lies in it."""

    program: Program

    @cached_property
    def of(self) -> dict[str, str]:
        """The storage of each value."""
        found = {name: name for name in (*self.program.params, *self.program.buffers, *self.program.inputs)}
        for step in self.program.steps:
            for name, source in _results(step):
                found[name] = found[source] if source else name
        return found

    @cached_property
    def steps(self) -> tuple[Place, ...]:
        """Each step with its storages."""
        return tuple(map(self._place, self.program.steps))

    @cached_property
    def region_of(self) -> dict[int, range]:
        """The region of each step that is in one."""
        return {i: region for region in self.program.regions for i in region}

    @cached_property
    def needed_from(self) -> dict[str, int]:
        """Storages kept for the backward, with the first step that needs them: the last to do so in the backward."""
        first: dict[str, int] = {}
        for region in self.program.regions:
            for s in self._read_from_outside[region] - self.remade:
                first[s] = min(region.start, first.get(s, region.start))
        for i, place in enumerate(self.steps):
            for s in place.kept_in - self.remade if i not in self.region_of else ():
                first[s] = min(i, first.get(s, i))
        return first

    @cached_property
    def remade(self) -> frozenset[str]:
        """Storages that light regions make: nobody keeps them."""
        return frozenset().union(*map(self._made_in, self.program.regions)) if self.program.light else frozenset()

    @cached_property
    def last_needed(self) -> dict[str, int]:
        """The last step that needs each storage, the first to do so in the backward pass."""
        return {s: i for i, place in enumerate(self.steps) for s in place.kept_in}

    @cached_property
    def last_used(self) -> dict[str, int]:
        """The last step that uses each storage."""
        return self._last_of(range(len(self.steps)))

    @cached_property
    def ends(self) -> Names:
        """Storages of the inputs, then of the outputs."""
        return tuple(self.of[name] for name in (*self.program.inputs, *self.program.outputs))

    @cached_property
    def again(self) -> dict[range, Again]:
        """What of each region runs again."""
        found: dict[range, Again] = {}
        for region in sorted(self.program.regions, key=lambda r: -r.start):
            steps, made = run_again(region, self.program.steps, self.program.light), self._made_in(region)
            last = {s: i for s, i in self._last_of(steps).items() if s in made}
            kept = frozenset(s for i in region for s in self.steps[i].kept_in)
            wanted, results = region.stop - 1, frozenset[str]()
            if self.program.light:
                readers = [i for i, place in enumerate(self.steps) if i >= region.stop and place.kept_in & made]
                later = [again.wanted for other, again in found.items() if self._read_from_outside[other] & made]
                wanted = max([wanted, *readers, *later])
                results = made & {self.of[name] for name in self.program.leaving(region)}
            up_to = accumulate((self.steps[i].kept_in for i in region), lambda some, more: some | more)
            there = tuple((some & made) | results for some in up_to)
            found[region] = Again(steps, last, kept | results, there, wanted, results)
        return found

    def _made_in(self, region: range) -> frozenset[str]:
        """Storages that a region makes."""
        return frozenset(s for i in region for s in self.steps[i].made_in) - self._read_from_outside[region]

    @cached_property
    def _read_from_outside(self) -> dict[range, frozenset[str]]:
        """By region the storages that it reads and doesn't make."""
        return {
            region: frozenset(map(self.of.__getitem__, self.program.entering(region)))
            for region in self.program.regions
        }

    def _last_of(self, steps: range) -> dict[str, int]:
        return {s: i for i in steps for s in self.steps[i].used_in}

    def wants(self, name: str) -> bool:
        """Whether a value gets a gradient."""
        return self.program.values[name].requires_grad

    def _place(self, step: Step) -> Place:
        made, read, params = made_by(step), read_by(step), self.program.params
        made_in = tuple(self.of[name] for name in made)
        used_in = frozenset((*made_in, *(self.of[name] for name in read)))
        wanting = tuple(name for name in dict.fromkeys(read) if self.wants(name))
        flowing = tuple(name for name in wanting if name not in params)
        if isinstance(step, Relayout):
            inner = any(m.kind != "slice" and max(m.dim, m.to_dim) > 0 for m in step.forward)
            ends = (step.source, step.result) if inner else ()
            return Place(made, made_in, used_in, frozenset(), flowing, passes_on=not step.backward, buffered=ends)
        target, roles = step.op.target, product_with_weight(step, self.program)
        return Place(
            made, made_in, used_in, frozenset(self.of[name] for name in saved_names(step)), flowing,
            weights=tuple(name for name in wanting if name in params),
            passes_on=passes_gradient(target),
            product=self.of[read[roles.x]] if roles else "",
            summed=wanting if is_pointwise(target) else (),
            scored=read[0] if ".cross_entropy_loss" in target else "",
        )  # fmt: skip


def _results(step: Step) -> list[tuple[str, str | None]]:
    """Names a step makes, each with the name it shares its storage with."""
    if isinstance(step, Relayout):
        return [(step.result, None if step.forward else step.source)]
    read_as = dict(zip(step.op.operands, step.operands, strict=True))
    return [(r, read_as[a] if a else None) for r, a in zip(step.op.results, step.op.alias_of, strict=True)]
