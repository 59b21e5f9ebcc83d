"""What is looked at next to the best plans, where these send much: meshes of one axis more, ZeRO inside nodes.

Steepest descent over the factorisations of the devices: those next to one have a prime factor on another axis. It
starts at the meshes that promise most and goes on from what it finds as long as that is faster. The outermost axis
splits the batch in all layers, so that a layer is solved as over the free axes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from time import monotonic

from autopar.cost.demand import price_demands
from autopar.cost.layer import LayerFigures
from autopar.cost.pricer import Pricer
from autopar.engine.search import Found, joined
from autopar.formulate.kinds import kind_of
from autopar.formulate.pipelines.scenario import SolvedPipeline
from autopar.formulate.record.assemble import Solved, chosen
from autopar.formulate.searched import Searched, searched
from autopar.formulate.space import AnyScenario, Space

WORTH = 0.1
"""One more axis is looked at where changes of layout, from which it may gain, take this share of the best step; ZeRO
inside nodes where gathers and sums of parameters do."""
GAIN = 0.005
"""Plans are looked for that are faster by this share."""
FROM = 3
"""Meshes from which the descent starts at most."""


def refined(found: Searched, space: Space, top: int = 1, end_s: float = inf) -> Searched:
    """What was found, or better plans next to it; the bound is that of all scenarios looked at."""
    answer, best = found.answer, found.answer.best
    if best is None:
        return found
    relaid, kept = sent_shares(best, found.scenarios[0].chains.pricer)
    ways = [space.finer] * (relaid >= WORTH) + [space.grouped] * (kept >= WORTH)
    scenarios, around, seen = list(found.scenarios), _promising(found, best), set[str]()
    while ways and around and monotonic() < end_s:
        new = list(_next_to(around, ways, seen))
        below_s = best.objective * (1 - GAIN)
        more = searched(tuple(new), top, end_s, below_s if top == 1 else inf, thorough=False)
        answer, scenarios = joined(answer, more, top, kind_of if top > 1 else None), [*scenarios, *new]
        gained = more.best if more.best and more.best.objective < below_s else None
        around = [scenario for scenario in new if gained and scenario.name == gained.name]
        best = gained or best
    return replace(found, scenarios=tuple(scenarios), answer=answer)


def sent_shares(found: Found[Solved], pricer: Pricer) -> tuple[float, float]:
    """Shares of a step that a device spends on changes of layout, and beside them on keeping parameters in step."""
    solved, layers = found.payload, list(_layers(found.payload))
    count = solved.setting.num_microbatches
    times = price_demands([demand for own, _ in layers for demand in (own.work.calls, own.work.passing)], pricer)
    each = (times.forward_communication_s + times.backward_communication_s).reshape(-1, 2).sum(axis=1).tolist()
    relaid_s = count * sum(n * seconds for (_, n), seconds in zip(layers, each, strict=True))
    kinds = [(own.micro_by_kind_s["communication"], own.step_by_kind_s["communication"], n) for own, n in layers]
    sent_s = sum(n * (count * micro + step) for micro, step, n in kinds)
    step_s = solved.setting.groups * found.objective
    return relaid_s / step_s, max(0.0, sent_s - relaid_s) / step_s


def _layers(solved: Solved) -> Iterator[tuple[LayerFigures, int]]:
    """Figures of all layers, with how many have them."""
    if isinstance(solved, SolvedPipeline):
        yield from ((part.column.figures, part.count) for stage in solved.stages for part in stage.parts)
    else:
        yield from ((column.figures, count) for _, column, count in chosen(solved))


def _promising(found: Searched, best: Found[Solved]) -> list[AnyScenario]:
    """The scenario of the best answer, and of others those with the least bounds, each on a mesh of its own."""
    bounded = sorted(zip(found.answer.bounds, range(len(found.scenarios)), strict=True))
    ordered = [found.scenarios[i] for bound, i in bounded if bound < best.objective]
    own = [scenario for scenario in found.scenarios if scenario.name == best.name]
    meshes: dict[object, AnyScenario] = {}
    for scenario in (*own, *ordered):
        setting = scenario.chains.setting
        meshes.setdefault((setting.mesh, setting.groups), scenario)
    return list(meshes.values())[:FROM]


def _next_to(
    around: Sequence[AnyScenario], ways: Sequence[Callable[[AnyScenario], Iterator[AnyScenario]]], seen: set[str]
) -> Iterator[AnyScenario]:
    """The scenarios next to some in some ways that were not `seen`, which they then are."""
    for scenario in (near for one in around for way in ways for near in way(one)):
        if scenario.name not in seen:
            seen.add(scenario.name)
            yield scenario
