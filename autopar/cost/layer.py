"""One layer on one device: all that it asks for, and the seconds and bytes that come of it on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from autopar.cost.demand import Demand, DemandTimes, price_demands
from autopar.cost.memory import LayerMemory
from autopar.cost.pricer import Pricer, Source
from autopar.cost.program import weights_alone
from autopar.cost.sync import exposed_s


@dataclass(frozen=True)
class LayerWork:
    """What a layer under a strategy asks for, whatever the cluster.

    In every microbatch `calls` (ops and layout changes), `passing` (layout changes of values that pass the layer by),
    `micro_sync` (gathers and scatters of parameters, hidden behind the calls as far as the device can) and `rerun`
    (what of the calls runs again in the backward pass); once a step `step_sync` and `optimizer`.
    """

    calls: Demand
    passing: Demand
    micro_sync: Demand
    rerun: Demand
    step_sync: Demand
    optimizer: Demand
    memory: LayerMemory


@dataclass(frozen=True)
class LayerFigures:
    """One layer on one device. `micro_s` in every microbatch, `step_s` once a step; both split by kind and by source.

    Kinds: `compute`, `recompute`, `communication` (exposed), `optimizer`. `pass_s` splits `micro_s` another way:
    `forward`, `backward` and `recompute` without communication, `forward communication`, `backward communication`. Of
    `backward`, gradients of weights that can be made apart take `weight_s`.
    """

    micro_s: float
    step_s: float
    memory: LayerMemory
    micro_by_kind_s: Mapping[str, float] = field(hash=False)
    step_by_kind_s: Mapping[str, float] = field(hash=False)
    micro_by_source_s: Mapping[Source, float] = field(hash=False)
    step_by_source_s: Mapping[Source, float] = field(hash=False)
    pass_s: Mapping[str, float] = field(hash=False)
    weight_s: float
    work: LayerWork = field(hash=False, compare=False, repr=False)

    @property
    def forward_s(self) -> float:
        """Seconds of the forward pass of a microbatch, communication included."""
        return self.pass_s["forward"] + self.pass_s["forward communication"]

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass of a microbatch, recomputation and communication included."""
        return self.micro_s - self.forward_s

    def slowed(self, factor: float) -> LayerFigures:
        """The same on a device that takes `factor` times as long for all but communication."""

        def times(seconds: Mapping[str, float]) -> dict[str, float]:
            return {kind: s * (1.0 if "communication" in kind else factor) for kind, s in seconds.items()}

        micro, step = times(self.micro_by_kind_s), times(self.step_by_kind_s)
        return replace(
            self, micro_s=sum(micro.values()), step_s=sum(step.values()), micro_by_kind_s=micro, step_by_kind_s=step,
            pass_s=times(self.pass_s), weight_s=factor * self.weight_s,
        )  # fmt: skip


def figures_of(work: LayerWork, pricer: Pricer) -> LayerFigures:
    """Price the work of a layer on the pricer's cluster."""
    return figures_of_all([work], pricer)[0]


def figures_of_all(works: Sequence[LayerWork], pricer: Pricer) -> list[LayerFigures]:
    """Price the work of several layers at once."""
    parts = [
        (w.calls, w.passing, w.micro_sync, w.rerun, w.step_sync, w.optimizer, *weights_alone(w.calls)) for w in works
    ]
    times = price_demands([demand for own in parts for demand in own], pricer)
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    overlap = pricer.cluster.device.overlap
    return [_add_up(times, slice(a, b), w, overlap) for w, (a, b) in zip(works, pairwise(ends), strict=True)]


def _add_up(times: DemandTimes, own: slice, work: LayerWork, overlap: float) -> LayerFigures:
    """The figures of a layer, whose parts are the demands `own`."""
    forward, backward = times.forward_compute_s[own].tolist(), times.backward_compute_s[own].tolist()
    sent, returned = times.forward_communication_s[own].tolist(), times.backward_communication_s[own].tolist()
    beside = forward[0] + backward[0] + forward[3]
    gathers = sent[2] + returned[2]
    exposed = exposed_s(gathers, beside, overlap) / gathers if gathers else 0.0
    passes = {
        "forward": forward[0] + forward[2],
        "backward": backward[0] + backward[2],
        "recompute": forward[3],
        "forward communication": sent[0] + forward[1] + sent[1] + exposed * sent[2],
        "backward communication": returned[0] + sent[3] + backward[1] + returned[1] + exposed * returned[2],
    }
    micro = {
        "compute": passes["forward"] + passes["backward"],
        "recompute": forward[3],
        "communication": passes["forward communication"] + passes["backward communication"],
    }
    step = {"compute": forward[4], "communication": sent[4], "optimizer": forward[5]}
    micro_sources: dict[Source, float] = {}
    step_sources: dict[Source, float] = {}
    for source, of_all in times.by_source.items():
        seconds = of_all[own]
        if seconds.any():
            micro_sources[source] = float(seconds[:4].sum())
            step_sources[source] = float(seconds[4:6].sum())
    weights_s = backward[6] + backward[7] / 2
    return LayerFigures(
        sum(passes.values()), sum(step.values()), work.memory, micro, step, micro_sources, step_sources, passes,
        weights_s, work,
    )  # fmt: skip
