"""Cutting a chain into stages: partitions in order of a bound on their step time, the best one first.

Let stage i work t_i seconds on a microbatch, forward and backward together, and let there be m of them. The first
microbatch reaches stage i after the forward passes of the stages before it, the stage then works m t_i seconds, and its
last gradient goes back through the backward passes of the stages before it. Hence for any schedule that runs a
microbatch through the stages in order

    step time >= max over i of  (t_0 + ... + t_{i-1}) + m t_i                                                    (*)

If only the sum tau of all t_i is known: let T be the right side of (*) and S_i = t_0 + ... + t_{i-1}. Then
S_{i+1} = S_i + t_i <= S_i + (T - S_i) / m = (1 - 1/m) S_i + T / m, so that by induction S_p <= T (1 - (1 - 1/m)^p), and

    step time >= tau / (1 - (1 - 1/m)^p).

Partitions are enumerated best-first (Hart, Nilsson, Raphael, 1968); what is left of the chain is estimated by a dynamic
programme over its suffixes (as in PipeDream, 2019), which is exact, so that no partition is looked at in vain.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from autopar.engine.stack_problem import Floats


def least_step_s(total_s: float, num_microbatches: int, stages: int) -> float:
    """Seconds that no step of a pipeline can beat whose stages together take `total_s` on a microbatch."""
    return total_s / (1.0 - (1.0 - 1.0 / num_microbatches) ** stages)


def bound_s(loads: Floats, spans: Floats, ends: NDArray[np.intp]) -> float:
    """No partition is better than this; inf if there is none.

    Loads and spans as in `partitions`, (K, p, n + 1, w): of units a to `ends[a, j]` - 1 for `ends` (n + 1, w), some of
    all ends.
    """
    return float(max(_suffixes(one, other, ends)[0][0] for one, other in zip(loads, spans, strict=True)))


def partitions(loads: Floats, spans: Floats) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All partitions of n units into p stages as (bound, p + 1 cuts from 0 to n), in order of the bound.

    `loads[k, i, a, b]`: seconds a step of stage i on units a to b - 1, `spans[k, i, a, b]`: seconds of one microbatch;
    both (K, p, n + 1, n + 1), inf where the stage can't be, loads no less than spans. The bound is the largest over i,
    and over the K ways to reckon, of the spans before i and the load of i. Equal bounds come in a fixed order.
    """
    stages, last = loads.shape[1], loads.shape[2] - 1
    ends = np.arange(last + 1)[None, :]
    suffix = np.array([_suffixes(one, other, ends) for one, other in zip(loads, spans, strict=True)])
    begin = (0.0,) * len(loads)
    heap: list[tuple[float, int, tuple[int, ...], float, tuple[float, ...]]] = [
        (float(suffix[:, 0, 0].max()), 0, (0,), 0.0, begin)
    ]
    while heap:
        bound, depth, cuts, reached, before = heappop(heap)
        if not np.isfinite(bound):
            return
        stage, start = -depth, cuts[-1]
        if stage == stages:
            yield bound, cuts
            continue
        so_far = np.array(before)[:, None]
        most = np.maximum(reached, (so_far + loads[:, stage, start]).max(axis=0))
        spent = so_far + spans[:, stage, start]
        bounds = np.maximum(most, (spent + suffix[:, stage + 1]).max(axis=0))
        for end in np.flatnonzero(np.isfinite(bounds)).tolist():
            if stage + 1 < stages or end == last:
                entry = (float(bounds[end]), depth - 1, (*cuts, end), float(most[end]), tuple(spent[:, end].tolist()))
                heappush(heap, entry)


def _suffixes(loads: Floats, spans: Floats, ends: NDArray[np.intp]) -> list[Floats]:
    """For each stage and first unit, the least bound of cutting what is left into the stages from there on."""
    stages, size = loads.shape[:2]
    end = np.full(size, np.inf)
    end[-1] = 0.0
    found = [end]
    for stage in reversed(range(stages)):
        found.append(np.maximum(loads[stage], spans[stage] + found[-1][ends]).min(axis=1))
    return found[::-1]
