"""Models of the `transformers` library, as users bring them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.trace.capture import trace
from autopar.verify import verify
from tests.integration.test_exact import planned
from tests.pool import Pool

transformers = pytest.importorskip("transformers")


def model_of(name: str) -> nn.Module:
    """A tiny model, in training, without dropout, every parameter random."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "gpt2":
        config = transformers.GPT2Config(**sizes, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(**sizes, intermediate_size=64, num_key_value_heads=2)
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.train()


def inputs_of() -> dict[str, Any]:
    """Example inputs with labels."""
    return {name: torch.zeros(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}


def check(record: PlanRecord, graph: OpGraph, name: str) -> dict[str, Any]:
    """On a rank: verify the plan."""
    return verify(record, model_of(name), inputs_of(), graph=graph).to_json()


@pytest.mark.parametrize(
    "config", ["dp=4,zero=1,microbatch_size=2", "tp=4,microbatch_size=16", "dp=2,tp=2,microbatch_size=2"]
)
@pytest.mark.parametrize(("name", "tolerance"), [("gpt2", 1e-9), ("llama", 1e-4)])
def test_plan_of_a_transformers_model_is_exact(pool: Pool, name: str, tolerance: float, config: str) -> None:
    """To float64's rounding, but for what computes in float32 whatever the dtype: the loss, and Llama's norms."""
    graph = trace(model_of(name), inputs_of(), compute_dtype="float64")
    report = pool.run(4, check, planned(graph, config), graph, name)[0]
    assert not report["missing_gradients"]
    assert report["loss_difference"] < 1e-6, report
    assert max(report["gradient"]["value"], report["parameter"]["value"]) < tolerance, report
