"""The frozen record of a plan: what was asked, what was chosen, what is predicted. Torch-free, versioned JSON.

`autopar.Plan` (in `api.py`) wraps this record with explain, report, timeline and emit_source.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.graph import Layout

PLAN_FORMAT = 1
"""Number of the file format; a reader refuses a larger one and migrates a smaller one."""


@dataclass(frozen=True)
class MeshAxis:
    """One axis of a stage's device mesh. Ranks run row-major over the axes: the last axis has neighbouring ranks.

    `name` is `d0`, `d1`, ...; `stride` is the distance in ranks between neighbours on the axis.
    """

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class LayerStrategy:
    """How one layer is run over the mesh of its stage.

    `entry`, `exit`: layouts of the main value of the cut in front and behind. `ops`: for each op by name, the factor
    that each mesh axis splits ('' = none: the axis' ranks do the same work). `relays`: the layout a value (input or op
    result) is put in once, before its consumers read it; values not named stay as produced; for a parameter or buffer,
    the layout it is stored in. `zero`: 0 replicated over the data axes, 1 optimizer state sharded, 2 and gradients,
    3 and parameters. `recompute`: `none` or `full`.
    """

    entry: Layout
    exit: Layout
    ops: dict[str, tuple[str, ...]] = field(hash=False)
    relays: dict[str, Layout] = field(hash=False)
    zero: int = 0
    recompute: str = "none"

    def data_axes(self, batch_dim: int | None) -> tuple[int, ...]:
        """Axes over which ZeRO shards: those that split the batch dim of the main value at the layer's entry."""
        return tuple(i for i, p in enumerate(self.entry) if p >= 0 and p == batch_dim)
