"""From the fx graph of `torch.export` to a `Flat` list of operators."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from autopar.errors import TraceError
from autopar.graph import Argument, DeviceArg, Dtype, Extent, Op, Ref, TensorSpec
from autopar.trace import marker
from autopar.trace.composite import COMPOSITE
from autopar.trace.flat import BUFFER, INPUT, PARAM, BlockCall, Item, in_module
from autopar.trace.layers.blocks import Block
from autopar.trace.opaque.operator import OPAQUE, OPAQUE_MARK, Form
from autopar.trace.sizes import DependsOnDataError, NotLinearError, extent, spec_of
from autopar.trace.torch_private import HIGHER_ORDER, OVERLOAD, taken_apart

ROOT = "model."
"""Prefix of the model's own names inside the exported wrapper."""

_ASSERTS = ("_assert", "sym_constrain")
_TORCH = str(Path(torch.__file__).parent)
_DROPPED_KEYWORDS = frozenset({"pin_memory", "layout", "memory_format", "non_blocking"})
_INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


class Converter:
    """Reads one exported program; afterwards `items`, `values` and `outputs` are those of a `Flat`."""

    def __init__(
        self,
        program: ExportedProgram,
        names: tuple[str, ...],
        canonical: dict[str, str],
        blocks: list[Block],
        forms: Mapping[int, Form],
    ):
        self.items: list[Item] = []
        self.values: dict[str, TensorSpec] = {}
        self.outputs: list[str] = []
        self._blocks = blocks
        self._forms = forms
        self._taken: set[str] = set()
        self._module = ""
        self._entered = 0
        inputs = iter(names)
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        env: dict[fx.Node, Any] = {}
        for node, given in zip(placeholders, program.graph_signature.input_specs, strict=True):
            env[node] = self._placeholder(node, given, inputs, canonical, program)
        results = self._walk(program.graph_module, env)
        self.outputs = [self._as_name(r) for r in results]

    def _as_name(self, result: Any) -> str:
        if not isinstance(result, Ref):
            raise TraceError(f"the model returns {result!r} instead of a tensor. Return tensors computed in forward.")
        return result.name

    def _placeholder(
        self, node: fx.Node, given: Any, inputs: Iterator[str], canonical: dict[str, str], program: ExportedProgram
    ) -> Any:
        value: Any = node.meta.get("val")
        if given.kind == InputKind.USER_INPUT:
            name = INPUT + next(inputs)
        elif given.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            own = given.target.removeprefix(ROOT)
            name = (PARAM if given.kind == InputKind.PARAMETER else BUFFER) + canonical.get(own, own)
        elif given.kind == InputKind.CONSTANT_TENSOR:
            return self._constant(node, program.constants[given.target])
        else:
            raise TraceError(f"the model keeps {given.target} ({given.kind.name}), which can't be part of a plan.")
        self.values[name] = spec_of(value)
        return Ref(name)

    def _constant(self, node: fx.Node, value: Any) -> Ref:
        """A small tensor made from Python numbers in forward, as ops that make it."""
        if not isinstance(value, Tensor) or (value.is_meta and value.numel()) or value.numel() > 64:
            raise TraceError(f"{node.name} is a constant tensor that is no buffer. Register it with register_buffer.")
        dtype = Dtype(str(value.dtype).removeprefix("torch."))
        kwargs = (("dtype", dtype), ("device", DeviceArg()))
        if not value.numel():
            shape = tuple(value.shape)
            spec = TensorSpec(tuple(Extent(0, s) for s in shape), dtype.name)
            return self._emit("full", "aten.full.default", (shape, 0), kwargs, (spec,))[0]
        scalars = []
        for number in value.flatten().tolist():
            scalars.append(
                self._emit("full", "aten.full.default", ((), number), kwargs, (TensorSpec((), dtype.name),))[0]
            )
        if not value.ndim:
            return scalars[0]
        row = TensorSpec((Extent(0, value.numel()),), dtype.name)
        stacked = self._emit("stack", "aten.stack.default", (tuple(scalars),), (), (row,))[0]
        if value.ndim == 1:
            return stacked
        shape = tuple(value.shape)
        spec = TensorSpec(tuple(Extent(0, s) for s in shape), dtype.name)
        return self._emit("view", "aten.view.default", (stacked, shape), (), (spec,))[0]

    def _emit(
        self,
        name: str,
        target: str,
        args: tuple[Argument, ...],
        kwargs: tuple[tuple[str, Argument], ...],
        specs: tuple[TensorSpec, ...],
    ) -> list[Ref]:
        results = tuple(self._free(name if len(specs) == 1 else f"{name}_{i}") for i in range(len(specs)))
        self.values |= dict(zip(results, specs, strict=True))
        self.items.append(
            Op(
                results[0] if results else name,
                target,
                args,
                kwargs,
                results,
                (None,) * len(results),
                module=self._module,
            )
        )
        return [Ref(r) for r in results]

    def _free(self, name: str) -> str:
        found, n = name, 0
        while found in self._taken:
            n += 1
            found = f"{name}__{n}"
        self._taken.add(found)
        return found

    def _walk(self, graph: fx.GraphModule, env: dict[fx.Node, Any]) -> list[Any]:
        """Convert the nodes of `graph`; `env` gives what each node has become. Returns its outputs."""
        for node in graph.graph.nodes:
            if node.op == "call_function":
                env[node] = self._call(graph, node, env)
            elif node.op == "output":
                return [env[a] if isinstance(a, fx.Node) else a for a in node.args[0]]
        return []

    def _call(self, graph: fx.GraphModule, node: Any, env: dict[fx.Node, Any]) -> Any:
        stack = node.meta.get("nn_module_stack")
        if stack:
            self._module = _innermost([path for path, _ in stack.values()])
        try:
            return self._called(graph, node, env)
        except DependsOnDataError as error:
            if error.path:
                raise
            raise DependsOnDataError(str(error), self._module, line_of(node.meta.get("stack_trace", ""))) from error

    def _called(self, graph: fx.GraphModule, node: Any, env: dict[fx.Node, Any]) -> Any:
        target = node.target
        if target is operator.getitem:
            return env[node.args[0]][node.args[1]]
        if isinstance(target, HIGHER_ORDER):
            return self._inline(graph, node, env)
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)):
            size = extent(value)
            return size if size.per_sample else size.fixed
        if isinstance(value, (torch.SymFloat, torch.SymBool)) and not free_symbols(
            value
        ):  # an assertion has settled it
            value = float(value) if isinstance(value, torch.SymFloat) else bool(value)
        if isinstance(value, (bool, float)):
            return value
        name = str(target)
        if any(a in name for a in _ASSERTS):
            return None
        if isinstance(value, (torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(value):
            raise DependsOnDataError(f"{name} computes a number from values")
        if isinstance(value, (torch.SymFloat, torch.SymBool)) or not isinstance(target, OVERLOAD):
            raise NotLinearError(f"{name} computes {value} from the batch size")
        if name == marker.ENTER:
            self._entered = len(self.items)
            return [env[n] for n in node.args[0]]
        if name == marker.BLOCK:
            return self._block(node, env)
        if name in COMPOSITE:
            return self._apart(node, env)
        if name == OPAQUE_MARK:
            tensors, form = _argument(node.args[0], env), self._forms[node.args[1]].text()
            return self._emit(node.name, OPAQUE, (tensors, form), (), tuple(map(spec_of, value)))
        return self._op(node, name, value, env)

    def _op(self, node: fx.Node, target: str, value: Any, env: dict[fx.Node, Any]) -> Any:
        numbers = [self._complex(a, value) if isinstance(a, complex) and a.imag else a for a in node.args]
        args = tuple(a if isinstance(a, Ref) else _argument(a, env) for a in numbers)
        kwargs = tuple((k, _argument(a, env)) for k, a in node.kwargs.items() if k not in _DROPPED_KEYWORDS)
        if target == "aten.clone.default" and node.kwargs.get("memory_format") is torch.contiguous_format:
            target = "aten.contiguous.default"
        if isinstance(value, Tensor):
            return self._emit(node.name, target, args, kwargs, (spec_of(value),))[0]
        tensors = [v for v in value or () if isinstance(v, Tensor)]
        return self._emit(node.name, target, args, kwargs, tuple(map(spec_of, tensors)))

    def _complex(self, number: complex, result: Tensor) -> Ref:
        """A complex number as a tensor; one of the kind that a call with such a `result` takes."""
        dtype = str(result.dtype).removeprefix("torch.")
        real = "float64" if result.dtype == torch.complex128 else "float32"
        kwargs = (("dtype", Dtype(real)), ("device", DeviceArg()))
        spec = TensorSpec((), real)
        parts = [
            self._emit("full", "aten.full.default", ((), x), kwargs, (spec,))[0] for x in (number.real, number.imag)
        ]
        return self._emit("complex", "aten.complex.default", tuple(parts), (), (TensorSpec((), dtype),))[0]

    def _apart(self, node: Any, env: dict[fx.Node, Any]) -> Any:
        """The operators that a composite one is made of."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        body = taken_apart(node.target, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
        inner = [n for n in body.graph.nodes if n.op == "placeholder"]
        results = self._walk(body, dict(zip(inner, (env[n] for n in tensors), strict=True)))
        return results if isinstance(node.meta["val"], (tuple, list)) else results[0]

    def _block(self, node: Any, env: dict[fx.Node, Any]) -> list[Ref]:
        inputs, produced, _, index = node.args
        block = self._blocks[index]
        if produced:
            results = [env[n] for n in produced]
            self.items[self._entered :] = [_inside(i, block.path) for i in self.items[self._entered :]]
        else:
            results = [Ref(self._free(f"{node.name}_{i}")) for i in range(len(node.meta["val"]))]
            self.values |= {r.name: spec_of(v) for r, v in zip(results, node.meta["val"], strict=True)}
        given = tuple(env[n].name for n in inputs)
        self.items.append(BlockCall(block.path, block.kind, bool(produced), given, tuple(r.name for r in results)))
        return results

    def _inline(self, graph: fx.GraphModule, node: Any, env: dict[fx.Node, Any]) -> Any:
        """A region under `torch.no_grad` or autocast: its ops, with the results detached if gradients are off."""
        name = str(node.target)
        body_at = next((i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr"), None)
        if body_at is None or not any(known in name for known in _INLINED):
            raise TraceError(f"{self._module or 'the model'}: {name} can't be planned yet. Use ordinary operators.")
        body: Any = graph.get_submodule(str(node.args[body_at].target))
        inner = [n for n in body.graph.nodes if n.op == "placeholder"]
        given = [env[a] if isinstance(a, fx.Node) else a for a in node.args[body_at + 1 :]]
        results = self._walk(body, dict(zip(inner, given, strict=True)))
        if node.args[0] is False and "set_grad" in name:
            results = [self._detached(r) for r in results]
        return results

    def _detached(self, result: Any) -> Any:
        if not isinstance(result, Ref):
            return result
        return self._emit("detach", "aten.detach.default", (result,), (), (self.values[result.name],))[0]


def line_of(stack_trace: str) -> str:
    """`file:line` of the innermost frame of a trace as fx keeps it that is not torch's own; '' if there is none."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack_trace)
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(_TORCH)]
    return own[-1] if own else ""


def _innermost(paths: list[str]) -> str:
    """Path in the model of the last of a stack of modules; torch shortens those under shared modules."""
    path = ""
    for given in paths:
        inside = not path or given == path or given.startswith(f"{path}.")
        path = given if inside else f"{path}.{given}"
    return "" if path == ROOT[:-1] else path.removeprefix(ROOT)


def _inside(item: Item, path: str) -> Item:
    """An op of the block at `path`, named so that it can be told."""
    if not isinstance(item, Op) or in_module(item, path):
        return item
    return replace(item, module=f"{path}.{item.module}" if item.module else path)


def _argument(value: Any, env: dict[fx.Node, Any]) -> Argument:
    if isinstance(value, fx.Node):
        return env[value]  # type: ignore[no-any-return]
    if isinstance(value, (list, tuple)):
        return tuple(_argument(v, env) for v in value)
    if isinstance(value, torch.dtype):
        return Dtype(str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return DeviceArg()
    if isinstance(value, (torch.layout, torch.memory_format)):
        return None
    if isinstance(value, torch.SymInt):
        size = extent(value)
        return size if size.per_sample else size.fixed
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, complex) and not value.imag:
        return value.real
    raise TraceError(f"an operator takes {value!r} ({type(value).__name__}), which can't be kept in a plan.")
