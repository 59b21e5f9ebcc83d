"""What autograd keeps, against the memory that a real run keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autopar.graph import DTYPE_BYTES, LayerClass, OpGraph
from autopar.trace import trace
from tests.trace.models import CASES

BATCH = 6


def _saved_bytes(graph: OpGraph) -> int:
    """Distinct storages that the graph says are kept for backward, parameters and buffers apart."""
    inside = sum(_layer_bytes(graph.classes[x.class_index]) for x in graph.layers)
    return inside + sum(graph.values[n].bytes_at(BATCH) for n in _kept_inputs(graph))


def _owner(kind: LayerClass, name: str) -> str:
    """The value whose storage `name` lies in."""
    while (op := kind.producer.get(name)) and (alias := op.alias_of[op.results.index(name)]):
        name = alias
    return name


def _layer_bytes(kind: LayerClass) -> int:
    owners = {_owner(kind, n) for op in kind.ops for n in op.saved.values} & set(kind.producer)
    extra = sum(e.bytes_at(BATCH) for op in kind.ops for e in op.saved.extra)
    return sum(kind.values[n].bytes_at(BATCH) for n in owners) + extra


def _kept_inputs(graph: OpGraph) -> Iterator[str]:
    """Values of the chain that a later layer keeps but the layer that made them does not."""
    by_maker = {
        n: (x, local)
        for x in graph.layers
        for n, local in zip(x.outputs, _kind(graph, x.class_index).outputs, strict=True)
    }
    kept: set[str] = set()
    for layer in graph.layers:
        kind = _kind(graph, layer.class_index)
        owners = {_owner(kind, n) for op in kind.ops for n in op.saved.values}
        kept |= {n for n, local in zip(layer.inputs, kind.inputs, strict=True) if local in owners}
    for name in kept:
        if name not in by_maker:
            yield name
            continue
        layer, local = by_maker[name]
        kind = _kind(graph, layer.class_index)
        if _owner(kind, local) not in {_owner(kind, n) for op in kind.ops for n in op.saved.values}:
            yield name


def _kind(graph: OpGraph, index: int) -> LayerClass:
    return graph.classes[index]


def _really_saved(model: nn.Module, name: str) -> int:
    """Bytes of distinct storages packed in a real forward pass, parameters and buffers apart."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage().data_ptr()
        if key not in own:
            found[key] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**CASES[name].batch_of(BATCH))
    return sum(found.values())


@pytest.mark.parametrize("name", ["mlp", "residual", "tied", "two heads"])
def test_saved_bytes_equal_a_real_run(name: str) -> None:
    """The bytes kept for backward are to the byte those a real forward pass packs, at another batch size."""
    torch.manual_seed(0)
    model = CASES[name].model().double()
    graph = trace(model, CASES[name].batch_of(3))
    assert _saved_bytes(graph) == _really_saved(model, name)


def test_attention_keeps_what_fused_kernels_keep() -> None:
    """Query, key, value and output, and one float32 a query and head; never the scores."""
    graph = trace(CASES["llama"].model(), CASES["llama"].batch_of(2), compute_dtype="bfloat16")
    kind = graph.classes[1]
    op = next(o for o in kind.ops if "attention" in o.target)
    assert op.saved.values == (*op.operands, *op.results)
    assert [(e.shape_at(3), e.dtype) for e in op.saved.extra] == [((3, 4, 8), "float32")]
    scores = 8 * 8 * 4 * 3 * DTYPE_BYTES["bfloat16"]
    assert sum(e.bytes_at(3) for e in op.saved.extra) < scores
