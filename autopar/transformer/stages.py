"""How blocks are dealt out to the stages of a pipeline."""

from __future__ import annotations

from autopar.dims import Dims
from autopar.transformer.layout import Layout


def stage_blocks(shape: Dims, layout: Layout) -> list[float]:
    """Blocks of each stage: as given, else as even as they can be, fewer at the ends."""
    if layout.stage_layers:
        return [float(n) for n in layout.stage_layers]
    count = layout.pp * layout.chunks
    base, more = divmod(shape.layers, count)
    first = (count - more + 1) // 2
    return [float(base + (first <= s < first + more)) for s in range(count)]
