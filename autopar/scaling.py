"""The best plan by size of the cluster, and what the devices added each time bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.asked import Asked, Inputs, traced
from autopar.cluster import load_cluster
from autopar.errors import ConfigError, InfeasibleError
from autopar.report.scale import Size

A_NODE = 8
"""Devices of a node, where there are several."""


def sizes(text: str) -> list[int]:
    """`8..4096` as 8, 16, ... 4096: doubled from the first, and the last; one number alone is itself."""
    first, dots, last = text.partition("..")
    given = [int(part) if part.strip().isdecimal() else 0 for part in ((first, last) if dots else (first,))]
    if min(given) < 1 or given[-1] < given[0]:
        raise ConfigError(f"devices={text!r}: give the first and the last number of devices, such as 8..4096")
    found = [given[0]]
    while found[-1] * 2 < given[-1]:
        found.append(found[-1] * 2)
    return list(dict.fromkeys([*found, given[-1]]))


def scale(
    asked: Asked,
    example_inputs: Inputs,
    counts: Sequence[int],
    device: str,
    *,
    loss_fn: Callable[..., Any] | None = None,
    profile: str | Path | None = None,
    say: Callable[[str], object] = str,
) -> Iterator[Size]:
    """Plans for clusters of `counts` devices in nodes of eight, one after the other; the model is traced once.

    Of `asked` the cluster doesn't count. Raises ConfigError on bad arguments before anything is traced.
    """
    from autopar.formulate.planner import Planner
    from autopar.pricing import pricing

    clusters = [load_cluster(cluster_name(count, device)) for count in counts]
    requests = [replace(asked, cluster=cluster).checked()[0] for cluster in clusters]
    graph, trace_s = traced(asked, example_inputs, loss_fn)
    alone = 0.0
    before = 0, 0.0
    for count, cluster, request in zip(counts, clusters, requests, strict=True):
        say(f"planning {cluster.name}")
        try:
            with pricing(cluster, profile) as pricer:
                plan = Planner(graph, cluster, pricer, request, trace_s).plan(time_limit_s=asked.time_limit_s)
        except InfeasibleError as error:
            yield Size(count, None, None, str(error))
            continue
        rate = asked.global_batch / plan.step_time_s
        added = (rate - before[1]) / (count - before[0])
        yield Size(count, plan, added / alone if alone else None)
        alone, before = alone or added, (count, rate)


def cluster_name(count: int, device: str) -> str:
    """The cluster of `count` devices in nodes of eight, or in one node where there are fewer or it isn't a multiple."""
    whole, rest = divmod(count, A_NODE)
    if whole > 1 and rest:
        raise ConfigError(f"devices={count}: give a multiple of the {A_NODE} devices of a node")
    return f"{whole}x{A_NODE}x{device}" if whole > 1 else f"{count}x{device}"
