"""The files of a plan: one a stage, with its layers, the values' way through them, and how parameters are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from autopar.emit.crossing import Comparison, mesh_sizes
from autopar.emit.groups import StageGroups
from autopar.emit.joined import plan_links
from autopar.emit.pipeline import Feed
from autopar.emit.placements import Placement, place_layers
from autopar.emit.program import identifiers
from autopar.emit.route import Route
from autopar.emit.source.layer import TAKEN, function_text
from autopar.emit.source.read import digest, stage_file
from autopar.emit.source.text import PaperGroups, Speaker
from autopar.emit.stage import Link, plan_storages, stage_route
from autopar.emit.storage import Storage
from autopar.files import write_atomically
from autopar.graph import OpGraph, layout_text
from autopar.plan import PlanRecord, StagePlan
from autopar.shard.program import Program
from autopar.shard.storage import Keeper

CPU = torch.device("cpu")
HEAD = '''"""Stage {number}: {span}, on {ranks} ({mesh}).

Written by autopar for global microbatches of {batch} samples; autopar.optimize(..., source=FOLDER) runs it,
with what you change. Tensors are this rank's shards. Each function is a layer under one strategy: it takes what random
masks are drawn by, parameters, buffers and inputs. relayout(x, A, B) moves x by A, and its gradient by B.
Outside of these functions rows are all-gathered and gradients reduce-scattered (ZeRO), or gradients summed:

{table}
"""

# ruff: noqa: E501, E702, F403, F405
import torch

from autopar.emit.source.runtime import *

aten, here = torch.ops.aten, Here()'''


def write_source(record: PlanRecord, graph: OpGraph, folder: Path) -> tuple[Path, ...]:
    """Write `stage_0.py`, `stage_1.py`, ... to `folder`; needs no processes. Raises EmitError on what has no source."""
    links: list[Link] | list[None] = [None]
    if len(record.stages) > 1:
        links = plan_links(record, graph, Feed(), Comparison.of(record.stages))
    texts = [
        _Stage(record, graph, number, stage, link).text()
        for number, (stage, link) in enumerate(zip(record.stages, links, strict=True))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        write_atomically(stage_file(folder, number), text)
    return tuple(stage_file(folder, number) for number in range(len(texts)))


class _Stage:
    """Writes one stage."""

    def __init__(self, record: PlanRecord, graph: OpGraph, number: int, stage: StagePlan, link: Link | None) -> None:
        self.record, self.graph, self.number, self.stage, self.link = record, graph, number, stage, link
        self.placements = place_layers(graph, stage)
        self.sizes = mesh_sizes(stage)
        self.speaker = Speaker(self.sizes)
        self.functions = self._functions()

    def _functions(self) -> dict[int, str]:
        """The name of each program's function: that of the first layer that runs it."""
        first: dict[int, Placement] = {}
        for placement in self.placements:
            first.setdefault(id(placement.program), placement)
        names = identifiers([p.layer.name for p in first.values()], TAKEN)
        return dict(zip(first, names, strict=True))

    def text(self) -> str:
        """The whole file."""
        layers, changed = self._layers()
        forward = self._forward()
        groups = [f"{name} = {_axes(name)}" for name in sorted(self.speaker.used)]
        parts = [
            self._head(),
            "\n".join([f'PLAN = "{digest(self.record)}"', f"BATCH = {self.record.global_microbatch}", "", *groups]),
            *layers,
            self._table(changed),
            forward,
        ]
        return "\n\n\n".join(parts) + "\n"

    def _head(self) -> str:
        names = [p.layer.name for p in self.placements]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        mesh = ", ".join(f"{axis.name}={axis.size}" for axis in self.stage.mesh) or "one device"
        devices = self.stage.devices
        ranks = f"ranks {devices[0]} to {devices[-1]}" if len(devices) > 1 else f"rank {devices[0]}"
        return HEAD.format(
            number=self.number, span=span, ranks=ranks, mesh=mesh,
            batch=self.record.global_microbatch, table="\n".join(self._parameters()),
        )  # fmt: skip

    def _parameters(self) -> Iterator[str]:
        """A line for each parameter; those that differ in a number of their name alone share one."""
        storages = plan_storages(self.graph, self.placements, self.record, len(self.sizes))
        rows: dict[tuple[str, ...], None] = {}
        for name in dict.fromkeys(n for p in self.placements for n in p.layer.params):
            shape = "x".join(map(str, storages[name].shape)) or "1"
            about = shape, layout_text(storages[name].layout), _kept(storages[name])
            rows.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), *about))
        yield f"    {'parameter':36} {'shape':>14}  {'layout':8} outside"
        for name, shape, layout, kept in rows:
            yield f"    {name:36} {shape:>14}  {layout:8} {kept}".rstrip()

    def _layers(self) -> tuple[list[str], dict[str, str]]:
        """The functions of all programs; those that differ outside training, by the name of the one in it."""
        texts, changed = [], dict[str, str]()
        for name, program, about in self._programs():
            training, evaluating = (self._function(name, about, program, how) for how in (True, False))
            texts.append(training)
            if training != evaluating:
                changed[name] = f"{name}_evaluating"
                texts.append(self._function(changed[name], about, program, False))
        return texts, changed

    def _function(self, name: str, about: str, program: Program, training: bool) -> str:
        return function_text(name, about, program, self.record.global_microbatch, training, self.speaker, CPU)

    def _programs(self) -> Iterator[tuple[str, Program, str]]:
        for key, name in self.functions.items():
            users = [p for p in self.placements if id(p.program) == key]
            more = f" and {len(users) - 3} more" if len(users) > 3 else ""
            yield name, users[0].program, f"{', '.join(p.layer.name for p in users[:3])}{more}."

    def _table(self, changed: dict[str, str]) -> str:
        names = [self.functions[id(p.program)] for p in self.placements]
        lines = [f"    {name},  # {p.layer.name}" for name, p in zip(names, self.placements, strict=True)]
        pairs = ", ".join(f"{a}: {b}" for a, b in changed.items())
        return "\n".join(["LAYERS = (", *lines, ")", f"EVALUATING = {{{pairs}}}"])

    def _forward(self) -> str:
        """The way of values through the layers."""
        routes = [self._route(place) for place in self.speaker.places]
        visits = [hop.visit for hop in routes[0].hops]
        made = {n for visit in visits for n in visit.outputs}
        read = dict.fromkeys(n for visit in visits for n in visit.inputs if n not in made)
        read |= dict.fromkeys(n for n in routes[0].goals if n not in made)
        every = list(dict.fromkeys([*read, *(n for visit in visits for n in visit.outputs)]))
        words = dict(zip(every, identifiers(every, TAKEN), strict=True))
        lines = [f'{words[n]} = values["{n}"]' for n in read]
        for i, hop in enumerate(routes[0].hops):
            lines += self._relays([route.hops[i].relays for route in routes], words)
            results = ", ".join(words[n] for n in hop.visit.outputs)
            operands = ", ".join([str(i), *(words[n] for n in hop.visit.inputs)])
            gone = [words[n] for n in hop.dead]
            lines.append(f"{results}, = layer({operands})" if results else f"layer({operands})")
            lines[-1] += f"; del {', '.join(gone)}" if gone else ""
        lines += self._relays([route.relays for route in routes], words)
        goals = ", ".join(words[n] for n in routes[0].goals)
        about = "From the model's inputs and what the stage before sends to what is sent on, or the loss."
        return "\n    ".join(["def forward(layer, values):", f'"""{about}"""', *lines, f"return ({goals},)"])

    def _relays(self, each: list[tuple[tuple[str, object], ...]], words: dict[str, str]) -> Iterator[str]:
        for relays in zip(*each, strict=True):
            name = relays[0][0]
            encoded = [between.encoded(self.record.global_microbatch) for _, between in relays]
            forward, backward = (self.speaker.moves([e[i] for e in encoded]) for i in (0, 1))
            yield f"{words[name]} = relayout({words[name]}, {forward}, {backward})"

    def _route(self, place: tuple[int, ...]) -> Route:
        groups = PaperGroups(self.sizes, place, CPU)
        seam: StageGroups = groups
        if self.link is not None and self.link.both.primes:
            seam = groups.over_primes(self.stage)
        return stage_route(self.graph, self.placements, self.link, groups, seam)


def _axes(name: str) -> str:
    """What a group's name stands for."""
    axes = [part[1:] for part in name.split("_")]
    return f"Axes({', '.join(axes)}{', prime=True' if name.startswith('p') else ''})"


def _kept(storage: Storage) -> str:
    """In words, what happens to a parameter and its gradient outside of the layers."""
    chunk, rest = ("_".join(f"d{a}" for a in axes) for axes in (storage.chunk_axes, storage.remaining_axes))
    when = {2: "every microbatch", 3: "every pass"} if storage.keeper is Keeper.FSDP else {}
    said = [f"ZeRO-{storage.zero} over {chunk} {when.get(storage.zero, 'once a step')}"] if chunk else []
    return "; ".join(said + ([f"all_reduce({rest}) of the gradient once a step"] if rest else []))
