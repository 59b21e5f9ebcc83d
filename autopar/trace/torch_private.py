"""Every private name of torch that tracing uses; a test checks that each exists."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import no_python_dispatcher
from torch._functorch import utils as functorch_utils
from torch.export._trace import _compiling_state_context  # type: ignore[attr-defined]
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten


def as_if_exporting() -> AbstractContextManager[None]:
    """Inside, `torch.compiler.is_exporting()` is true, so that models take the branches they take under export."""
    return _compiling_state_context()


@contextmanager
def off_the_record() -> Iterator[None]:
    """Inside, operators run for real although a trace is being made, and the trace does not see them."""
    compiler: Any = torch.compiler
    flags = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = False
    try:
        with _disable_current_modes(), no_python_dispatcher():
            yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = flags


@contextmanager
def functions_seen(see: Callable[[Any, Sequence[Any]], None]) -> Iterator[None]:
    """Inside, `see` is told the class and the arguments of each `autograd.Function` before it is applied."""
    last_step = functorch_utils.unwrap_dead_wrappers  # of `Function.apply`, which itself may lie about as `f = F.apply`

    def told(args: Any) -> Any:
        see(sys._getframe(1).f_locals["cls"], args)
        return last_step(args)

    functorch_utils.unwrap_dead_wrappers = told
    try:
        yield
    finally:
        functorch_utils.unwrap_dead_wrappers = last_step


def hint_of(size: Any) -> int:
    """The number that a size has while it is traced, which may be a symbol; asking binds it to nothing."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def storage_id(tensor: Tensor) -> int:
    """A number that tensors of one storage share while it is alive."""
    return int(tensor.untyped_storage()._cdata)


def owned_tensors(owner: nn.Module) -> dict[str, Tensor]:
    """The tensors a module itself holds: parameters, buffers and plain attributes, which count as buffers."""
    both: dict[str, Any] = {**owner._parameters, **owner._buffers, **vars(owner)}
    return {name: tensor for name, tensor in both.items() if isinstance(tensor, Tensor)}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor a model holds under every dotted name it has."""
    for path, owner in model.named_modules(remove_duplicate=False):
        for name, tensor in owned_tensors(owner).items():
            yield (f"{path}.{name}" if path else name), tensor


def put_tensor(owner: nn.Module, name: str, tensor: Tensor) -> None:
    """Let `tensor` be what the module holds as `name`, whatever is there now."""
    places: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
    next((place for place in places if name in place), vars(owner))[name] = tensor


def is_persistent(owner: nn.Module, name: str) -> bool:
    """Whether a buffer goes into the state dict; a plain attribute does not."""
    return name in owner._buffers and name not in owner._non_persistent_buffers_set


def taken_apart(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """The operators that a composite one is made of, as a function of the tensors (fake ones) among its arguments."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def call(*given: Tensor) -> Any:
        left = iter(given)
        own_args, own_kwargs = tree_unflatten([next(left) if isinstance(x, Tensor) else x for x in leaves], structure)
        made = operator.decompose(*own_args, **own_kwargs)
        return made if isinstance(made, (tuple, list)) else (made,)

    mode = next(t.fake_mode for t in tensors)  # type: ignore[attr-defined]
    with mode:
        return make_fx(call)(*tensors)


CONSTRUCTORS: frozenset[Any] = frozenset(_device_constructors())
"""Functions that make tensors of numbers and take the device on which."""
MODULE_HOOK = BackwardHookFunction
"""The function that modules with hooks on their gradients pass their tensors through."""
HIGHER_ORDER = torch._ops.HigherOrderOperator
OVERLOAD = torch._ops.OpOverload
