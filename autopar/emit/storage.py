"""How every parameter lies on the ranks of a stage: what layers compute with, and what the optimizer sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.emit.groups import Axes, StageGroups
from autopar.errors import PlanError
from autopar.graph import PARTIAL, REPLICATE, Layer, Layout, OpGraph, TensorSpec, layout_text
from autopar.plan import DtypePolicy, LayerStrategy
from autopar.shard.storage import ParameterStorage, parameter_storage


@dataclass(frozen=True)
class Storage(ParameterStorage):
    """Where one parameter lies.

    `shape` is global. Layers compute with its shard under `layout`. `dtype` is stored, `compute_dtype` computed with.
    `hosted`: what is stored, and so gradients and optimizer states, is in the host's memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    gradient_dtype: torch.dtype
    layout: Layout
    trainable: bool
    hosted: bool = False

    @property
    def split_axes(self) -> Axes:
        """Axes that split the shard layers compute with."""
        return tuple(a for a, p in enumerate(self.layout) if p >= 0)

    def compute_shard(self, whole: Tensor, groups: StageGroups) -> Tensor:
        """This rank's part of the global tensor `whole` that its layers compute with (a view)."""
        return shard(whole, self.layout, groups)

    def stored_shard(self, computed: Tensor, groups: StageGroups) -> Tensor:
        """This rank's rows of the shard `computed` that layers compute with (a view)."""
        if not self.chunk_axes:
            return computed
        return chunk(computed, 0, groups.ways(self.chunk_axes), groups.index(self.chunk_axes))

    def mesh_dims(self, groups: StageGroups) -> tuple[Axes, ...]:
        """The dims of the mesh of the parameter's DTensor: each of `split_axes`, all of `chunk_axes`, all others."""
        dims = (*((a,) for a in self.split_axes), self.chunk_axes, self.whole_axes(groups))
        return tuple(axes for axes in dims if axes)

    def whole_axes(self, groups: StageGroups) -> Axes:
        """Axes whose ranks store the same."""
        return tuple(a for a in groups.all_axes if a not in self.split_axes + self.chunk_axes)

    def as_dtensor(self, stored: Tensor, groups: StageGroups) -> Tensor:
        """The DTensor of which this rank holds `stored`; `stored` itself where there is no mesh."""
        if not groups.distributed:
            return stored
        dims = self.mesh_dims(groups)
        placements = [Shard(self.layout[a]) for a in self.split_axes] + [Shard(0)] * bool(self.chunk_axes)
        replicated = [Replicate()] * (len(dims) - len(placements))
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            stored, groups.mesh(dims, stored.device.type), (*placements, *replicated),
            run_check=False, shape=torch.Size(self.shape), stride=stride,
        )  # fmt: skip


def chunk(tensor: Tensor, dim: int, ways: int, index: int) -> Tensor:
    """Part `index` of `tensor` dealt over `ways` ranks along `dim`: equal parts, the last ones shorter or empty."""
    size = tensor.shape[dim]
    part = -(-size // ways)
    start = min(index * part, size)
    return tensor.narrow(dim, start, min(part, size - start))


def shard(whole: Tensor, layout: Layout, groups: StageGroups) -> Tensor:
    """This rank's part of `whole` under `layout` (a view)."""
    for axis, placement in enumerate(layout):
        if placement >= 0:
            whole = chunk(whole, placement, groups.sizes[axis], groups.index((axis,)))
    return whole


@dataclass(frozen=True)
class Use:
    """One use of a parameter: the layer, its strategy, the layout its program wants, the axes ZeRO shards over."""

    layer: Layer
    strategy: LayerStrategy
    layout: Layout
    zero_axes: Axes


UNUSED = ParameterStorage((), (), 0)
"""How a parameter that no layer reads is kept."""


def plan_storage(name: str, spec: TensorSpec, uses: list[Use], policy: DtypePolicy, axes: int) -> Storage:
    """The storage of parameter `name` from all its uses. Raises PlanError if these want it stored differently."""
    layout = uses[0].layout if uses else (REPLICATE,) * axes
    for use in uses:
        if use.layout != layout or PARTIAL in use.layout:
            raise PlanError(
                f"parameter {name} is to be stored as {layout_text(layout)!r} for layer {uses[0].layer.name} and as "
                f"{layout_text(use.layout)!r} for {use.layer.name}; all uses need one layout. Make the plan anew."
            )
    kept = parameter_storage(spec, layout, uses[0].zero_axes, uses[0].strategy.zero) if uses else UNUSED
    compute = getattr(torch, spec.dtype)
    return Storage(
        kept.chunk_axes, kept.sum_axes, kept.zero, name, spec.shape_at(1), _stored(compute, policy.parameters),
        compute, _stored(compute, policy.gradients), layout, spec.requires_grad,
        any(use.strategy.offload == "optimizer" for use in uses),
    )  # fmt: skip


def _stored(compute: torch.dtype, policy: str) -> torch.dtype:
    """The dtype of a policy; integers and booleans stay what they are."""
    dtype: torch.dtype = getattr(torch, policy)
    return dtype if compute.is_floating_point else compute


def parameter_uses(
    graph: OpGraph, layers: Iterable[tuple[Layer, LayerStrategy, Axes, dict[str, Layout]]]
) -> dict[str, list[Use]]:
    """Every use of every parameter; `layers` gives layer, strategy, axes of ZeRO and the layouts of its program."""
    uses: dict[str, list[Use]] = {name: [] for name in graph.params}
    for layer, strategy, zero_axes, layouts in layers:
        for name, local in zip(layer.params, graph.classes[layer.class_index].params, strict=True):
            uses[name].append(Use(layer, strategy, layouts[local], zero_axes))
    return uses
