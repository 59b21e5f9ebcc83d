"""What the layers of a stage add up to: seconds of a step and bytes at its peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.layer import LayerFigures
from autopar.engine.moments import REDUCING, Backward, Bytes, Moment, held_at, moments_of, one_at_a_time

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "transient", "reserve")


@dataclass(frozen=True)
class Layers:
    """`count` consecutive layers that cost alike; `run` numbers the run of equal layers they belong to, in `chunk`."""

    run: int
    figures: LayerFigures
    count: int
    chunk: int = 0


@dataclass(frozen=True)
class Prediction:
    """What the layers add up to."""

    step_time_s: float
    by_kind_s: dict[str, float]
    by_source_s: dict[str, float]
    memory: dict[str, int]


def predict(
    layers: Sequence[Layers],
    num_microbatches: int,
    reserve_bytes: int,
    backwards: Sequence[Backward] = (),
    inputs_bytes: int = 0,
) -> Prediction:
    """Add up the seconds of a step and the bytes at its peak, for layers in their order on one device.

    `backwards`: see `StackProblem`. `inputs_bytes` of the batch are held besides.
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
    backwards = backwards or [one_at_a_time(num_microbatches)]
    memory = max(_moments(layers, backwards, inputs_bytes), key=lambda moment: sum(moment.values()))
    return Prediction(sum(kinds.values()), dict(kinds), dict(sources), memory | {"reserve": reserve_bytes})


def _moments(layers: Sequence[Layers], backwards: Sequence[Backward], inputs_bytes: int) -> Iterator[dict[str, int]]:
    """Bytes by category at each moment."""
    chunk_of = {part.run: part.chunk for part in layers}
    runs = sorted(chunk_of)
    for moment in moments_of(backwards, [chunk_of[r] for r in runs]):
        number = Moment(moment.backward, runs[moment.run]) if moment.backward else moment
        yield _held(layers, number, inputs_bytes)


def _held(layers: Sequence[Layers], moment: Moment, inputs_bytes: int) -> dict[str, int]:
    held = dict.fromkeys(CATEGORIES[:-1], 0)
    held["activations"] = inputs_bytes + (moment.backward.held_bytes if moment.backward else 0)
    largest = 0
    for part in layers:
        memory, count = part.figures.memory, part.count
        times = held_at(moment, part.run, part.chunk)
        held["parameters"] += memory.parameters * count
        held["optimizer"] += memory.optimizer * count
        gradients = memory.gradients * times.gradients - memory.late * times.unmade
        held["gradients"] += (gradients + memory.reduced * times.reduced) * count
        held["activations"] += (memory.saved * times.saved + memory.put_off * times.put_off + memory.inputs) * count
        held["transient"] += memory.update * count * times.update
        extra = memory.step if moment == REDUCING else memory.transient if part.run == moment.run else 0
        if times.turn:
            changing = Bytes(
                memory.saved, memory.gradients, memory.late, memory.transient, memory.put_off, memory.parting
            )
            more = int(times.turn.more(changing))
            made = int(times.turn.made(changing)) if more > times.turn.before(changing) else 0
            held["gradients"] += made * count
            held["activations"] += (more - made) * count
            extra = int(times.turn.on_top(changing)) if part.run == moment.run else 0
        largest = max(largest, extra)
    held["transient"] += largest
    return held


def shares(by_source_s: Mapping[str, float]) -> dict[str, float]:
    """Share of the seconds from each source."""
    total = sum(by_source_s.values()) or 1.0
    return {
        source: by_source_s.get(source, 0.0) / total for source in ("measured", "fitted", "roofline", "extrapolated")
    }
