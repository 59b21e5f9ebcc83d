"""The values of parameters and buffers: those of a real module, or initialised module by module for one on meta."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import EmitError
from autopar.trace.torch_private import named_tensors, owned_tensors, put_tensor


def values(
    module: nn.Module,
    device: torch.device,
    seed: int,
    wanted: Callable[[str], bool] = lambda _: True,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and buffer (further names of tied ones left out) with its whole value, one module at a time.

    A real tensor is given as it is, or as `agree` makes it (of every one, wanted or not). Of a module on meta, each
    submodule that owns tensors is made real alone on `device`, initialised by its own `reset_parameters()` and then by
    the model's `_init_weights(...)` of it and of every module around it (Transformers' convention), and dropped. Random
    numbers are seeded with `seed` and the submodule's name: values depend neither on the plan nor on the number of
    ranks, but differ from those of a model initialised in one go. Those whose names are not `wanted` are left out.
    Raises EmitError where values stay unset.
    """
    seen: set[int] = set()
    for name, owner in module.named_modules():
        own = owned_tensors(owner)
        unseen = {k: t for k, t in own.items() if id(t) not in seen}
        new = [k for k in unseen if wanted(_join(name, k))]
        seen.update(map(id, own.values()))
        if any(t.is_meta for t in unseen.values()):
            made = _initialised(module, name, own, device, seed) if new else {}
            yield from ((_join(name, k), made[k]) for k in new)
            continue
        for k, t in unseen.items():
            whole = t.detach() if agree is None else agree(t.detach())
            if k in new:
                yield _join(name, k), whole


def from_rank_0(module: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    """What makes every rank of the job use rank 0's values, as models may be initialised differently on each.

    Collective. Raises EmitError where the model is on meta on some ranks only.
    """
    here = [name for name, tensor in named_tensors(module) if tensor.is_meta]
    first: list[object] = [here]
    dist.broadcast_object_list(first, 0, device=device)
    alike: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(alike, first[0] == here)
    if not all(alike):
        raise EmitError(
            "the model is on meta on some ranks and real on others; make it alike on all: values are those of rank 0."
        )

    def agree(tensor: Tensor) -> Tensor:
        shared = tensor.to(device, copy=True).contiguous()
        dist.broadcast(shared, 0)
        return shared

    return agree


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _initialised(
    model: nn.Module, name: str, own: dict[str, Tensor], device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Real values of the tensors `own` of submodule `name`; the model is left as it was."""
    owner = model.get_submodule(name)
    made = {k: _unset(t, device) for k, t in own.items()}
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        try:
            _put(owner, made)
            _run_initialisers(model, name)
            made = owned_tensors(owner)
        finally:
            _put(owner, own)
    for key, tensor in made.items():
        if tensor.is_meta or (tensor.is_floating_point() and bool(tensor.isnan().any())):
            raise EmitError(
                f"{_join(name, key)} of {type(owner).__name__} is on meta and nothing initialises it: give the class a "
                f"reset_parameters() that sets it, or hand in a model with real values."
            )
    return {k: t.detach() for k, t in made.items()}


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:
        return tensor
    fill = float("nan") if tensor.is_floating_point() else 0
    made = torch.full(tensor.shape, fill, dtype=tensor.dtype, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _put(owner: nn.Module, tensors: dict[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        put_tensor(owner, key, tensor)


def _run_initialisers(model: nn.Module, name: str) -> None:
    """Initialise submodule `name`, then let each module around it adjust it, innermost first."""
    owner = model.get_submodule(name)
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(owner, method, None)):
            getattr(owner, method)()
    adjust = getattr(model, "_init_weights", None)
    if not callable(adjust):
        return
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        adjust(model.get_submodule(".".join(parts[:depth])))
