"""Two plain predictors of a step, that any model has to beat: a constant share of peak, and a closed form."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from autopar.cluster import profiles_folder
from autopar.validation.runs import Run

SHARE_OF_PEAK = 0.45


@dataclass(frozen=True)
class Closed:
    """The seven constants: efficiencies of products and of attention, shares of the two bandwidths, seconds a message,
    the share of gradients' traffic that is hidden, and seconds a step."""

    gemm: float = 0.6
    attention: float = 0.4
    inside: float = 0.7
    between: float = 0.7
    latency_s: float = 2e-5
    hidden: float = 0.5
    fixed_s: float = 0.05

    @classmethod
    def of(cls, table: Mapping[str, float]) -> Closed:
        """From a table of constants by name."""
        return cls(**{str(key): float(value) for key, value in table.items()})


@cache
def shipped_closed() -> Closed:
    """The constants fitted to all published rows; the defaults where none are shipped."""
    path = profiles_folder() / "steps.toml"
    if not path.is_file():
        return Closed()
    return Closed.of(tomllib.loads(path.read_text(encoding="utf-8")).get("closed_form", {}))


def _flops(run: Run) -> tuple[float, float]:
    """FLOPs of products and of attention that a device does in a step, recomputation included."""
    shape, layout = run.shape, run.layout
    again = 1 + (layout.recomputed / 3)
    tokens = run.global_batch * shape.seq
    products = 6.0 * shape.active_params * tokens * again / layout.devices
    scores = 6.0 * shape.layers * shape.heads * shape.head_dim * shape.seq * tokens * again / layout.devices
    return products, scores * (1 if layout.fused_attention else 2)


def _peak(run: Run) -> float:
    rates = run.cluster.device.peak_flops_per_s
    return rates.get(run.layout.gemm_dtype) or max(rates.values())


def constant_share_s(run: Run) -> float:
    """Seconds at 45 % of the peak of the layers' dtype, on hardware FLOPs."""
    return sum(_flops(run)) / (SHARE_OF_PEAK * _peak(run))


def closed_form_s(run: Run, known: Closed) -> float:
    """Compute at two efficiencies, the bubble, tensor-parallel sums inside a node, gradients between nodes."""
    shape, layout, cluster = run.shape, run.layout, run.cluster
    products, scores = _flops(run)
    half = run.cluster.device.peak_flops_per_s.get(layout.compute) or _peak(run)
    compute = products / (known.gemm * _peak(run)) + scores / (known.attention * half)
    tokens = layout.microbatch * shape.seq / layout.cp
    sums = (4 + 2 * layout.recomputed) * shape.layers / layout.pp * layout.num_microbatches
    size = 2 * (layout.tp - 1) / layout.tp * 2.0 * tokens * shape.hidden
    tensor = sums * (size / (known.inside * cluster.intra.bytes_per_s) + known.latency_s) if layout.tp > 1 else 0.0
    filled = 1 + (layout.pp - 1) / (layout.num_microbatches * layout.chunks)
    ranks = layout.data_ranks
    held = shape.num_params / (layout.tp * layout.pp)
    times = (layout.num_microbatches * 3 if layout.zero == 3 else 2) * (ranks - 1) / ranks
    link = cluster.inter if layout.devices > cluster.devices_per_node else cluster.intra
    shared = max(1, min(cluster.devices_per_node // layout.tp, ranks)) if cluster.nodes > 1 else 1
    data = times * held * 2.0 / (known.between * link.bytes_per_s * shared)
    return (compute + tensor) * filled + (1 - known.hidden) * data + known.fixed_s
