"""When what a group of devices has sent is known to have arrived: by what comes back from where it went.

A group that has begun an operation has received what that needs. So once something has come that it made in this
operation or a later one, what was sent to it for the operation has arrived, and nobody needs to keep or wait for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.cost.orders import Indices, Kind, Shape, order


class Sent(NamedTuple):
    """What the operations of a group send, one entry each: by which operation it is made, at the start of which one it
    is known to have arrived (their count: not within the step), whether it is a gradient."""

    made: Indices
    arrived: Indices
    gradient: Indices


@lru_cache(maxsize=1024)
def arrivals(shape: Shape, group: int) -> Sent:
    """What a group sends to others, in the order in which it is made."""
    own = order(shape, group)
    numbers, back = np.arange(len(own)), _is_back(own)
    passes = own[:, 2] != Kind.WEIGHT
    source, target = (_neighbours(shape, own, step, passes) for step in (-1, 1))
    arrived = np.full(len(own), len(own))
    for peer in set(target[target >= 0].tolist()):
        place = _places(shape, peer)
        heard = np.full(len(own), -1)
        comes, goes = source == peer, target == peer
        heard[comes] = place[_stages(own, -1)[comes], own[comes, 1], back[comes]]
        needed = place[_stages(own, 1)[goes], own[goes, 1], back[goes]]
        arrived[goes] = np.searchsorted(np.maximum.accumulate(heard), needed)
    sends = target >= 0
    return Sent(numbers[sends], arrived[sends], back[sends])


@lru_cache(maxsize=1024)
def gradients_under_way(shape: Shape, group: int) -> Indices:
    """(operations, chunks): of how many microbatches each chunk of a group has sent gradients that are not known to
    have arrived, as an operation begins."""
    own, sent = order(shape, group), arrivals(shape, group)
    stages = np.array(shape.stages_of(group))
    made, arrived = sent.made[sent.gradient > 0], sent.arrived[sent.gradient > 0]
    chunk = (own[made, 0][:, None] == stages).astype(np.intp)
    change = np.zeros((len(own) + 1, len(stages)), dtype=np.intp)
    np.add.at(change, made + 1, chunk)
    np.add.at(change, arrived, -chunk)
    counted: Indices = np.cumsum(change, axis=0)[:-1]
    return counted


def _is_back(work: Indices) -> Indices:
    kind = work[:, 2]
    back: Indices = ((kind != Kind.FORWARD) & (kind != Kind.JOINT)).astype(np.intp)
    return back


def _stages(work: Indices, step: int) -> Indices:
    """The stage from which the input of each operation comes (-1), or to which its result goes (1)."""
    found: Indices = work[:, 0] + np.where(_is_back(work) > 0, -step, step)
    return found


def _neighbours(shape: Shape, work: Indices, step: int, passes: Indices) -> Indices:
    """The group of that stage; -1 where there is none, or it is this very group."""
    stage = _stages(work, step)
    groups = np.array([shape.group_of(s) for s in range(shape.stages)])
    there = passes & (stage >= 0) & (stage < shape.stages)
    found = groups[np.clip(stage, 0, shape.stages - 1)]
    peers: Indices = np.where(there & (found != groups[work[:, 0]]), found, -1)
    return peers


@lru_cache(maxsize=1024)
def _places(shape: Shape, group: int) -> Indices:
    """(stages, microbatches, 2): the number of a group's operation that passes forward (0) or backward over a stage."""
    work = order(shape, group)
    passes = work[:, 2] != Kind.WEIGHT
    place = np.full((shape.stages, shape.num_microbatches, 2), -1)
    place[work[passes, 0], work[passes, 1], _is_back(work)[passes]] = np.flatnonzero(passes)
    return place
