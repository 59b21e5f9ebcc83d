from __future__ import annotations

import pytest
import torch

from autopar.cost.activations import activations, outputs_saved
from autopar.cost.memory import layer_memory
from autopar.cost.states import held_parameters
from autopar.graph import REPLICATE, OpGraph
from autopar.plan import POLICIES, LayerStrategy
from autopar.shard.lower import lower_layer
from autopar.trace import load_model, trace

BATCH, SEQUENCE = 4, 64
DIMS = "layers=3,hidden=64,heads=4,vocab=512"


def predicted(graph: OpGraph) -> tuple[int, int]:
    """Saved bytes of the whole model, and the most activations and transients at once (docs/design.md, "Memory")."""
    read = {name for layer in graph.layers for name in layer.inputs} | {graph.loss}
    kept: set[str] = set()
    saved = peak = 0
    for index, layer in enumerate(graph.layers):
        local = graph.classes[layer.class_index]
        program = lower_layer(graph, index, LayerStrategy((REPLICATE,), (REPLICATE,), {}, {}), (1,))
        walked = activations(
            program, BATCH, accumulates=True,
            held=frozenset(own for name, own in zip(layer.inputs, local.inputs, strict=True) if name in kept),
            unread=frozenset(i for i, name in enumerate(layer.outputs) if name not in read),
        )  # fmt: skip
        found = layer_memory(program, BATCH, POLICIES["fp32"], "sgd", held_parameters(program, (), 0), walked)
        saved += found.saved
        peak = max(peak, saved + found.transient)
        names = zip((*layer.inputs, *layer.outputs), (*local.inputs, *local.outputs), strict=True)
        kept |= {name for name, own in names if own in outputs_saved(local)}
    return saved, peak


def real(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The same of a real run: by hooks on what autograd packs, and by the profiler's memory events."""
    storages: dict[int, int] = {}
    packed: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t)
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**inputs)["loss"]
    for held in (*model.parameters(), *model.buffers()):
        storages.pop(held.untyped_storage().data_ptr(), None)
    packed.clear()
    loss.backward()  # from now on the gradients of parameters exist
    del loss
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(**inputs)["loss"].backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return sum(storages.values()), peak + sum(t.nbytes for t in inputs.values())


@pytest.mark.parametrize("spec", [f"llama:{DIMS},kv_heads=2", f"gpt:{DIMS}"])
def test_bytes_equal_those_of_a_real_step(spec: str) -> None:
    """What autograd keeps, and the peak of activations and temporaries, of whole models on one device: each byte."""
    loaded = load_model(spec, seq_len=SEQUENCE)
    graph = trace(loaded.model, loaded.inputs)
    model = loaded.model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.normal_(tensor, std=0.02)
    assert isinstance(loaded.inputs, dict)
    inputs = {name: torch.randint(0, 512, (BATCH, *t.shape[1:])) for name, t in loaded.inputs.items()}
    assert predicted(graph) == real(model, inputs)
