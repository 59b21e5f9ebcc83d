"""Which kinds of recomputation a layer is offered."""

from __future__ import annotations

from functools import lru_cache

from autopar.cost.activations import activations
from autopar.graph import LayerClass
from autopar.plan import LayerStrategy
from autopar.shard.lower import lower
from autopar.shard.regions import rerun_regions

WORTH = 0.05
"""Share of the bytes kept for the backward that recomputation of some ops must save to be searched. The result of a
fused attention, some 4 %, costs more time to make again than whole recomputation of that share of the layers."""
SOME = ("light", "selective")
"""Kinds that run some ops again."""


@lru_cache(maxsize=1024)
def offered(layer: LayerClass, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Of the kinds `wanted` those that make sense for a layer.

    Without a region that a kind would run again, it is none; among others it is left out where it saves next to
    nothing.
    """
    kinds = tuple(dict.fromkeys(kind if rerun_regions(layer, kind) else "none" for kind in wanted))
    return tuple(kind for kind in kinds if len(wanted) == 1 or kind not in SOME or _is_worth(layer, kind)) or ("none",)


def _is_worth(layer: LayerClass, kind: str) -> bool:
    return kept_bytes(layer, kind) < (1 - WORTH) * kept_bytes(layer, "none")


@lru_cache(maxsize=256)
def kept_bytes(layer: LayerClass, recompute: str) -> int:
    """Bytes that a layer keeps for the backward of one sample on one device."""
    main = layer.values[layer.inputs[0]]
    return activations(lower(layer, LayerStrategy((), (), {}, {}, 0, recompute), (), main, main), 1).saved
