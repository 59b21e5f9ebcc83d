"""The lowered form of a layer under a strategy: local calls and layout changes, one after the other.

`lower` (in `lower.py`) makes it; the cost model prices it, the memory model walks it and the emitter turns it into
code, so what is priced is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from autopar.graph import Layout, Op, TensorSpec, hashed_once
from autopar.shard.factors import Grains

MoveKind: TypeAlias = Literal[
    "all_reduce",  # P -> R (or B): sum over the axes
    "all_gather",  # S(dim) -> R
    "reduce_scatter",  # P -> S(dim)
    "all_to_all",  # S(dim) -> S(to_dim)
    "slice",  # R -> S(dim): local, no communication
    "pad",  # S(dim) -> P: own shard, zeros elsewhere: local
    "divide",  # R -> P: one share of the whole: local
]


@dataclass(frozen=True, slots=True)
class Move:
    """One elementary change of layout over one or several mesh axes at once (flattened in axis order)."""

    kind: MoveKind
    axes: tuple[int, ...]
    dim: int = -1
    to_dim: int = -1


@dataclass(frozen=True, slots=True)
class Relayout:
    """`result` is `source` put from one layout into another; `backward` does the same for the gradient, reversed."""

    source: str
    result: str
    from_layout: Layout
    to_layout: Layout
    forward: tuple[Move, ...]
    backward: tuple[Move, ...]


@hashed_once
@dataclass(frozen=True)
class Call:
    """One op on local shards. `operands[i]` is the name to read in place of `op.operands[i]` (after relayouts).

    `factors` is the factor each mesh axis splits ('' = none). `kernel` names the function of `kernels.py` to run
    instead of the ATen op, '' where the op on local shards (with local sizes) is right. `grains` are those of the rule.
    A mean is that of the means of each rank of the axes `apart`.
    """

    op: Op
    operands: tuple[str, ...]
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]
    factors: tuple[str, ...]
    kernel: str = ""
    grains: Grains = ()
    apart: tuple[int, ...] = ()


Step: TypeAlias = Relayout | Call


def read_by(step: Step) -> tuple[str, ...]:
    """Names that a step reads."""
    return (step.source,) if isinstance(step, Relayout) else step.operands


def made_by(step: Step) -> tuple[str, ...]:
    """Names that a step makes."""
    return (step.result,) if isinstance(step, Relayout) else step.op.results


@dataclass(frozen=True)
class Program:
    """A lowered layer: `steps` in order; `layouts` of every name a step reads or makes; specs by name (global shapes).

    `inputs` enter in the layouts that follow the strategy's entry; `outputs` name, for each output of the class, what
    to hand on, in the layouts that follow its exit. Parameters and buffers are stored in `layouts[name]`.
    `axis_sizes` are those of the stage's mesh. `regions` are steps of which only what they read from outside is kept
    for the backward pass, in which they run again; with `light`, what they make is not kept by others either.
    """

    axis_sizes: tuple[int, ...]
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    outputs: tuple[str, ...]
    layouts: dict[str, Layout] = field(hash=False)
    values: dict[str, TensorSpec] = field(hash=False)
    regions: tuple[range, ...] = ()
    light: bool = False

    def entering(self, region: range) -> tuple[str, ...]:
        """Names that a region reads and doesn't make."""
        inside = {name for i in region for name in made_by(self.steps[i])}
        read = dict.fromkeys(name for i in region for name in read_by(self.steps[i]))
        return tuple(name for name in read if name not in inside)

    def leaving(self, region: range) -> tuple[str, ...]:
        """Names that a region makes and others read."""
        read = {name for step in self.steps[region.stop :] for name in read_by(step)} | {*self.outputs}
        return tuple(name for i in region for name in made_by(self.steps[i]) if name in read)
