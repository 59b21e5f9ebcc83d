"""The parameters of a stage: what the optimizer holds, what layers compute with, and how gradients come home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from autopar.emit import buckets
from autopar.emit.groups import Axes, StageGroups
from autopar.emit.storage import Storage
from autopar.emit.torch_private import copy_all, laid_out_as
from autopar.shard.host import host_memory

T = TypeVar("T")


class StageParameter:
    """One parameter kept by us (`Keeper.STEP`): gathered once a step, its gradient reduced once a step.

    `public` is what the optimizer sees; `compute` the leaf tensor that layers read. Where nothing is gathered or cast
    the two share memory.
    """

    def __init__(
        self, storage: Storage, stored: Tensor, public: nn.Parameter, compute_shape: torch.Size, device: torch.device
    ) -> None:
        self.storage = storage
        self.stored = stored
        self.public = public
        self.shared = not (storage.chunk_axes or storage.hosted) and storage.dtype == storage.compute_dtype
        self._gradient: Tensor | None = None
        own = stored.new_empty(0 if self.shared else compute_shape, dtype=storage.compute_dtype, device=device)
        self.compute = stored.detach() if self.shared else own
        self._want_gradient()

    def source(self) -> Tensor:
        """What layers compute with."""
        return self.compute

    def _want_gradient(self) -> None:
        if not self.storage.trainable:
            return
        self.compute.requires_grad_()
        if self.storage.gradient_dtype != self.storage.compute_dtype:
            self.compute.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, leaf: Tensor) -> None:
        """Add the microbatch's gradient to the sum in the dtype gradients are reduced in."""
        if leaf.grad is None:
            return
        wide = leaf.grad.to(self.storage.gradient_dtype)
        self._gradient = wide if self._gradient is None else self._gradient.add_(wide)
        leaf.grad = None

    def take_gradient(self) -> Tensor:
        """The gradient accumulated since the last call (zeros where none arrived), dropped here."""
        found = self._gradient if self._gradient is not None else self.compute.grad
        self._gradient = self.compute.grad = None
        if found is None:
            return torch.zeros_like(self.compute, dtype=self.storage.gradient_dtype, requires_grad=False)
        return found


def refresh(parameters: Sequence[StageParameter], groups: StageGroups) -> None:
    """Make compute copies anew from the stored values: cast, and gather what is dealt over ranks.

    Done before every step: in-place changes of a DTensor leave no trace on its version, so staleness can't be seen. For
    the same reason the copies are written past autograd: where nothing changed they are written with what they hold.
    """
    copied = [p for p in parameters if not p.shared]
    for axes, members in _by_axes([(p.storage.chunk_axes, p) for p in copied]):
        targets = [p.compute.data for p in members]
        if not axes:
            copy_all(targets, [p.stored for p in members])
            continue
        pieces = [p.stored.to(p.storage.compute_dtype) for p in members]
        buckets.all_gather(pieces, targets, groups.group(axes))  # type: ignore[arg-type]


def _by_axes(items: Sequence[tuple[Axes, T]]) -> list[tuple[Axes, list[T]]]:
    """`items` by their axes, in order of first appearance."""
    found: dict[Axes, list[T]] = {}
    for axes, item in items:
        found.setdefault(axes, []).append(item)
    return list(found.items())


def reduce_gradients(parameters: Sequence[StageParameter], groups: StageGroups) -> list[tuple[Storage, Tensor, Axes]]:
    """The stored shard of each trainable parameter's gradient, with the axes over which it is still to be summed."""
    trained = [p for p in parameters if p.storage.trainable]
    gradients = {p.storage.name: p.take_gradient() for p in trained}
    scattered = [(p.storage.chunk_axes, p) for p in trained if p.storage.scatters]
    for axes, members in _by_axes(scattered):
        whole = [gradients.pop(p.storage.name) for p in members]
        parts = buckets.reduce_scatter(whole, groups.group(axes))  # type: ignore[arg-type]
        gradients.update(zip([p.storage.name for p in members], parts, strict=True))
    return [(p.storage, gradients[p.storage.name], p.storage.remaining_axes) for p in trained]


def finish_gradients(gradients: Sequence[tuple[Storage, Tensor, Axes]], groups: StageGroups) -> dict[str, Tensor]:
    """Sum what is still to be summed: this rank's stored shard of each gradient, by the parameter's name."""
    for axes, members in _by_axes([(axes, gradient) for _, gradient, axes in gradients]):
        if axes:
            buckets.all_reduce(members, groups.group(axes))
    return {s.name: _stored_part(s, gradient, groups).to(s.dtype) for s, gradient, _ in gradients}


def _stored_part(storage: Storage, gradient: Tensor, groups: StageGroups) -> Tensor:
    return gradient if not storage.chunk_axes or storage.scatters else storage.stored_shard(gradient, groups)


def add_gradient(gradient: Tensor, public: nn.Parameter) -> None:
    """Add this rank's shard `gradient` to `public.grad`."""
    if local(public.detach()).device != gradient.device:  # the optimizer steps on the host: it must have arrived
        gradient = host_memory(gradient.shape, gradient.dtype, gradient.device).copy_(gradient)
    if public.grad is None:
        public.grad = laid_out_as(public, gradient)
    else:
        local(public.grad).add_(gradient)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing memory."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
