"""What the layers of a stage add up to: seconds of a step and bytes at its peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.layer import LayerFigures
from autopar.engine.stack_problem import held_at

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "transient", "reserve")


@dataclass(frozen=True)
class Layers:
    """`count` consecutive layers that cost alike; `run` numbers the run of equal layers they belong to.

    `in_flight` microbatches are under way at once.
    """

    run: int
    figures: LayerFigures
    count: int
    in_flight: int = 1


@dataclass(frozen=True)
class Prediction:
    """What the layers add up to."""

    step_time_s: float
    by_kind_s: dict[str, float]
    by_source_s: dict[str, float]
    memory: dict[str, int]


def predict(layers: Sequence[Layers], num_microbatches: int, reserve_bytes: int, seam_bytes: int = 0) -> Prediction:
    """Add up the seconds of a step and the bytes at its peak, for layers in their order on one device.

    `seam_bytes` are held until the optimizer step besides: what stages received and sent.
    """
    kinds: dict[str, float] = defaultdict(float)
    sources: dict[str, float] = defaultdict(float)
    for part in layers:
        figures = part.figures
        for total, micro, step in (
            (kinds, figures.micro_by_kind_s, figures.step_by_kind_s),
            (sources, figures.micro_by_source_s, figures.step_by_source_s),
        ):
            for key, seconds in micro.items():
                total[str(key)] += num_microbatches * seconds * part.count
            for key, seconds in step.items():
                total[str(key)] += seconds * part.count
    memory = max(_moments(layers, num_microbatches, seam_bytes), key=lambda moment: sum(moment.values()))
    return Prediction(sum(kinds.values()), dict(kinds), dict(sources), memory | {"reserve": reserve_bytes})


def _moments(layers: Sequence[Layers], num_microbatches: int, seam_bytes: int) -> Iterator[dict[str, int]]:
    """Bytes by category at each moment."""
    runs = 1 + max(part.run for part in layers)
    for moment in range(runs + 1):
        at_step = moment == runs
        held = dict.fromkeys(CATEGORIES[:-1], 0)
        held["activations"] = 0 if at_step else seam_bytes
        largest = 0
        for part in layers:
            memory, count = part.figures.memory, part.count
            times = held_at(moment, part.run, runs, num_microbatches, part.in_flight)
            held["parameters"] += memory.parameters * count
            held["optimizer"] += memory.optimizer * count
            held["gradients"] += memory.gradients * count * times.gradients
            held["activations"] += memory.saved * count * times.saved
            held["transient"] += memory.update * count * times.update
            extra = memory.step if at_step else memory.transient if part.run == moment else 0
            largest = max(largest, extra)
        held["transient"] += largest
        yield held


def shares(by_source_s: Mapping[str, float]) -> dict[str, float]:
    """Share of the seconds from each source."""
    total = sum(by_source_s.values()) or 1.0
    return {
        source: by_source_s.get(source, 0.0) / total for source in ("measured", "fitted", "roofline", "extrapolated")
    }
