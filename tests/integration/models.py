"""Small models for tests on real processes. Every parameter is random, biases too: a bias that starts at zero and whose
gradient is zero in exact arithmetic would show rounding errors that AdamW has blown up, not errors of a plan."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from autopar.graph import OpGraph
from autopar.trace.capture import trace
from autopar.trace.spec import load_model

SPECS = {
    "gpt": "gpt:layers=2,hidden=32,heads=4,vocab=64,seq=8",
    "llama": "llama:layers=2,hidden=32,heads=8,kv_heads=4,ffn=64,vocab=64,seq=8",
}


class Mlp(nn.Module):
    """Three linear layers and a cross-entropy that leaves some targets out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return nn.functional.cross_entropy(self.last(torch.tanh(self.second(hidden))), labels)


@cache
def example(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A real model in float64 and example inputs: the same on every process."""
    if name == "mlp":
        model: nn.Module = Mlp()
        inputs = {"x": torch.zeros(2, 16), "labels": torch.tensor([0, -100])}
    else:
        loaded = load_model(SPECS[name])
        model, inputs = loaded.model.to_empty(device="cpu"), dict(loaded.inputs)
    generator = torch.Generator().manual_seed(1)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model, inputs


@cache
def traced(name: str, dtype: str = "float64") -> OpGraph:
    """The trace of `example(name)`."""
    model, inputs = example(name)
    return trace(model, inputs, compute_dtype=dtype)
