"""What a plan comes to in the few numbers that other frameworks are told: one degree of each kind for all blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from autopar.errors import ConfigError
from autopar.formulate.config import ManualConfig
from autopar.plan import POLICIES, LayerStrategy, MeshAxis, PlanRecord
from autopar.roles import ways

DEGREES = {
    "batch": "dp", "batch+tensor": "dp", "batch+experts": "dp", "tensor": "tp", "tensor+sequence": "tp",
    "sequence": "cp", "experts+sequence": "cp",
}  # fmt: skip
"""The degree that each role of a mesh axis counts for; experts are counted apart, by the configuration."""


class Degrees(NamedTuple):
    """How many ways a layer splits its batch, its tensors (with `sequence` also what lies between) and its sequence."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    sequence: bool = False
    zero: int = 0

    def __str__(self) -> str:
        sequence = " with sequence parallelism" if self.sequence else ""
        return f"dp={self.dp} tp={self.tp}{sequence} cp={self.cp} zero={self.zero}"


@dataclass(frozen=True)
class Recipe:
    """A plan in numbers; `mistakes` says what of it can't be put so, for any framework, and what would do instead.

    `stage_blocks` and `recomputed` (blocks that run again as a whole) are by stage, in the order of the model;
    `selective` where every block runs the core of attention again. `notes` are what settings leave open.
    """

    record: PlanRecord
    degrees: Degrees
    ep: int
    stage_blocks: tuple[int, ...]
    recomputed: tuple[int, ...]
    selective: bool
    mistakes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def devices(self) -> int:
        """Devices that the plan uses."""
        return len({d for stage in self.record.stages for d in stage.devices})

    @property
    def recompute_all(self) -> bool:
        """Whether every block runs again as a whole."""
        return self.recomputed == self.stage_blocks

    @property
    def piped(self) -> bool:
        """Whether the plan is a pipeline."""
        return self.record.pp_degree > 1

    def require(self, *mistakes: str) -> None:
        """Raise ConfigError with what can't be put in numbers and these further `mistakes`, if there are any."""
        found = (*self.mistakes, *(m for m in mistakes if m))
        if found:
            raise ConfigError(*found)


class _Block(NamedTuple):
    """A layer that belongs to block `name`, on stage number `stage`."""

    name: str
    stage: int
    degrees: Degrees
    idle: int
    recompute: str


def read(record: PlanRecord) -> Recipe:
    """What the plan comes to; its blocks are the layers with a number in their name."""
    layers = list(_layers(record))
    blocks = [x for x in layers if re.search(r"(^|\.)\d+(\.|$)", x.name)] or layers
    degrees = blocks[0].degrees
    names = [[*dict.fromkeys(_block_name(x.name) for x in blocks if x.stage == k)] for k in range(len(record.stages))]
    full = {_block_name(x.name) for x in blocks if x.recompute == "full"}
    kinds = {x.recompute for x in blocks}
    config = ManualConfig.parse(record.request.config or "")
    share, left = divmod(record.global_microbatch, degrees.dp)
    strategies = [strategy for stage in record.stages for strategy in stage.strategies]
    group = config.zero_group if config.zero_group != "all" else str(max(s.zero_group for s in strategies))
    mistakes = [
        *_unlike(blocks),
        f"{blocks[0].idle} devices of each group do the same work; plan again with fewer" if blocks[0].idle > 1 else "",
        "blocks mix selective with other recomputation; plan with one: --constraint recompute=selective, or none"
        if "selective" in kinds and len(kinds) > 1
        else "",
        "recompute=light is not exported, as others have no such choice of operators; plan with "
        "--constraint recompute=none or full"
        if "light" in kinds
        else "",
        f"dp={degrees.dp} replicas share microbatches of {record.global_microbatch} unevenly; plan for another batch"
        if left or not share
        else "",
        f"dtype_policy={record.request.policy}: not exported; plan with a dtype alone"
        if record.request.policy != POLICIES.get(record.request.dtype, record.request.policy)
        else "",
        f"zero_group={group}: ZeRO over a part of the replicas is not exported; plan with zero_group=all"
        if group not in ("all", "0")
        else "",
        "experts are split: not exported; plan with --constraint tp=1, or by hand with ep="
        if config.ep == 1 and any("experts" in role for strategy in strategies for role in strategy.roles)
        else "",
    ]
    return Recipe(
        record, degrees, config.ep, tuple(map(len, names)),
        tuple(sum(n in full for n in of) for of in names), "selective" in kinds,
        tuple(m for m in mistakes if m), tuple(_notes(record, layers, blocks)),
    )  # fmt: skip


def _layers(record: PlanRecord) -> Iterator[_Block]:
    for number, stage in enumerate(record.stages):
        names = record.layer_names[stage.first_layer :]
        for name, index in zip(names, stage.assignment, strict=False):
            strategy = stage.strategies[index]
            yield _Block(name, number, *_degrees(strategy, stage.mesh), strategy.recompute)


def _degrees(strategy: LayerStrategy, mesh: tuple[MeshAxis, ...]) -> tuple[Degrees, int]:
    """The layer's degrees, and how many devices do the same."""
    found = ways(strategy, mesh)
    counts = {key: prod(n for role, n in found.items() if DEGREES.get(role) == key) for key in ("dp", "tp", "cp")}
    zero = strategy.zero if counts["dp"] * counts["cp"] > 1 else 0
    return Degrees(**counts, sequence="tensor+sequence" in found, zero=zero), found.get("nothing", 1)


def _block_name(name: str) -> str:
    """The name up to its first number: layers of one block share it."""
    match = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
    return match.group() if match else name


def _unlike(blocks: list[_Block]) -> Iterator[str]:
    """Blocks that are split otherwise than the first."""
    first = blocks[0]
    others: dict[Degrees, list[str]] = {}
    for block in blocks:
        if block.degrees != first.degrees:
            others.setdefault(block.degrees, []).append(block.name)
    for degrees, names in others.items():
        yield (
            f"{_some(names)}: split as {degrees}, {first.name} as {first.degrees}; other frameworks split all blocks "
            f"alike. Plan with --constraint dp={first.degrees.dp}, tp=, sp= and zero= likewise"
        )


def _notes(record: PlanRecord, layers: list[_Block], blocks: list[_Block]) -> Iterator[str]:
    common = blocks[0].degrees
    ends = [x for x in layers if x not in blocks and x.degrees[:3] != common[:3]]
    for layer in ends:
        yield f"{layer.name}: the plan splits it as {layer.degrees}; there it is split as the framework does"
    for kind in sorted({s.offload for stage in record.stages for s in stage.strategies} - {"none"}):
        yield f"the plan keeps {kind} in the host's memory: ask for that there, too"
    used = len({d for stage in record.stages for d in stage.devices})
    yield f"start it on {used} devices; data, learning rate and the model's own dimensions are not part of a plan"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
