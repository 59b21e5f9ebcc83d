"""Submodules that are traced as one operator each: they are called through a marker instead of running."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.graph import Extent, TensorSpec
from autopar.trace.opaque.operator import Form, decoded, encoded
from autopar.trace.opaque.trial import RESULT, Learned, UnfitError, learn
from autopar.trace.sizes import NotOneOperator, extent

_LIBRARY = torch.library.Library("autopar_trace", "FRAGMENT")
_LIBRARY.define("opaque(Tensor[] tensors, int index) -> Tensor[]")
_PUBLIC = torch.library.Library("autopar", "FRAGMENT")
_PUBLIC.define("opaque(Tensor[] tensors, str form) -> Tensor[]")
_NUMBERS = itertools.count()
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class _Call:
    """What was learned of a call whose last tensors, after `owned` of the submodule's own, are of `inputs`."""

    learned: Learned
    inputs: tuple[TensorSpec, ...]
    owned: int


_CALLS: dict[int, _Call] = {}


@torch.library.register_fake("autopar_trace::opaque", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _opaque_fake(tensors: list[Tensor], index: int) -> list[Tensor]:
    call = _CALLS[index]
    batch = _batch_of(tensors[call.owned :], call.inputs)
    made = []
    for spec in call.learned.results:
        shape = [e.per_sample * batch + e.fixed if e.is_batch else e.fixed for e in spec.shape]
        made.append(torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta"))
    return made


def _batch_of(tensors: list[Tensor], specs: tuple[TensorSpec, ...]) -> Any:
    """The number of samples, a symbol where it is one."""
    for tensor, spec in zip(tensors, specs, strict=True):
        for size, e in zip(tensor.shape, spec.shape, strict=True):
            if e.is_batch:
                return (size - e.fixed) // e.per_sample
    return 1


class StandIns:
    """Which submodules stand as one operator, and what is known of their calls.

    `paths` gives, by path, why each does; it may grow between exports. `forms` are those of the calls by number: equal
    calls have equal numbers.
    """

    def __init__(self, model: nn.Module, compute: str) -> None:
        self.paths: dict[str, str] = {}
        self.forms: dict[int, Form] = {}
        # while a model is traced, torch gives proxies of its modules to who asks for them by name
        self._modules, self._compute = dict(model.named_modules(remove_duplicate=False)), compute
        self._known: dict[object, int] = {}

    def add(self, path: str, why: str) -> None:
        """Let the submodule at `path`, and all of its class, stand as one operator; its parent if it stands already.

        Raises TraceError with `why` when that would be the whole model.
        """
        modules = self._modules
        while path and (path in self.paths or isinstance(modules[path], _CONTAINERS)):
            path = path.rpartition(".")[0]
        if not path:
            raise TraceError(why)
        alike = [p for p, m in modules.items() if p and type(m) is type(modules[path])]
        self.paths = {p: w for p, w in self.paths.items() if not _within(p, alike)}
        self.paths |= {p: why for p in alike if not _within(p, alike)}

    def notes(self) -> Iterator[str]:
        """What to tell of them."""
        for why, paths in groupby(self.paths, key=lambda p: self.paths[p]):
            names = list(paths)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            reason = why.partition(". Make ")[0]
            yield f"{names[0]}{more} runs as one operator, which only the batch can split: {reason}"

    def install(self, model: nn.Module, batch: int | None) -> None:
        """Put the stand-ins into `model`, a copy to be run at `batch` samples (None: not told from other sizes)."""
        for path in self.paths:
            module = model.get_submodule(path)
            module.forward = self._forward(path, module, batch)

    def _forward(self, path: str, module: nn.Module, batch: int | None) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            given: list[Tensor] = []
            try:
                call = encoded([list(args), dict(kwargs)], given, lambda x: isinstance(x, Tensor))
                index = self._number(path, tuple(named), module, call, tuple(_spec(t, batch) for t in given))
            except (TypeError, UnfitError) as error:
                raise NotOneOperator(path, str(error)) from error
            made = torch.ops.autopar_trace.opaque.default([*named.values(), *given], index)
            trained = any(t.requires_grad for t in (*named.values(), *given))
            fresh = iter([r.requires_grad_(trained) if _is_plain(r) else r for r in made])
            output = _CALLS[index].learned.output
            return output.rebuild([next(fresh) if leaf is RESULT else leaf for leaf in output.leaves])

        return forward

    def _number(
        self, path: str, names: tuple[str, ...], module: nn.Module, call: Any, specs: tuple[TensorSpec, ...]
    ) -> int:
        """The number of a call of these tensors and other arguments, tried if it is new."""
        shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
        key = (type(module), names, shapes, repr(call), specs, module.training)
        if key not in self._known:

            def run(real: nn.Module, tensors: Any) -> Any:
                args, kwargs = decoded(call, tensors)
                return real(*args, **kwargs)

            found = learn(self._modules[path], run, specs, self._compute)
            index = self._known[key] = next(_NUMBERS)
            self.forms[index] = Form(
                names, call, found.apart, found.draws, found.flops, max(map(_elements, specs), default=0),
                found.saved_bytes,
            )  # fmt: skip
            _CALLS[index] = _Call(found, specs, len(names))
        return self._known[key]


def _elements(spec: TensorSpec) -> int:
    return prod(spec.shape_at(1))


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a meta tensor that no trace is made of."""
    return type(tensor) is Tensor and tensor.is_floating_point()


def _within(path: str, others: list[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def _spec(tensor: Tensor, batch: int | None) -> TensorSpec:
    dims = []
    for size in tensor.shape:
        known = extent(size)
        if batch and not known.is_batch and known.fixed and known.fixed % batch == 0:
            known = Extent(known.fixed // batch)
        dims.append(known)
    return TensorSpec(tuple(dims), str(tensor.dtype).removeprefix("torch."), tensor.is_floating_point())
