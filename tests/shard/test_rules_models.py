"""The rules against traces of real models: all ops have one, and all hold at a batch the trace did not see."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.graph import LayerClass, Op, TensorSpec
from autopar.shard.check import differences
from autopar.shard.rules import assignments, rule_for
from autopar.trace import trace

BATCH = 4
COMMUNICATING = ("cross_entropy", "dropout")


class _Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.net(x), y)


def _regression() -> tuple[nn.Module, dict[str, Tensor]]:
    return _Regression(), {"x": torch.randn(3, 6), "y": torch.randn(3, 4)}


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(3, 8, dtype=torch.long), "labels": torch.zeros(3, 8, dtype=torch.long)}


def _gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=16, attn_pdrop=0.0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config), _tokens()


def _llama() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config), _tokens()


def _value(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    shape, dtype = spec.shape_at(BATCH), getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(2, shape, generator=generator).to(dtype)  # 0 or 1: a token, a class, a truth


def _distinct_ops(classes: tuple[LayerClass, ...]) -> Iterator[tuple[Op, LayerClass]]:
    """One op of each kind: equal target, options and shapes."""
    seen = set()
    for layer in classes:
        for op in layer.ops:
            specs = tuple(layer.values[name] for name in (*op.operands, *op.results))
            kind = (op.target, repr([a for a in op.args if not hasattr(a, "name")]), specs)
            if kind not in seen:
                seen.add(kind)
                yield op, layer


@pytest.mark.parametrize("make", [_regression, _gpt2, _llama])
def test_rules_hold_in_models(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    """Every op of the model has a rule, and sharded equals whole for every assignment of one and of two axes."""
    model, inputs = make()
    graph = trace(model, inputs, compute_dtype="float64")
    generator = torch.Generator().manual_seed(0)
    for op, layer in _distinct_ops(graph.classes):
        rule = rule_for(op, layer)
        assert rule is not None, op.target
        operands = [_value(layer.values[name], generator) for name in op.operands]
        for sizes in ((2,), (2, 2)):
            for factors in assignments(rule, op, layer, sizes, BATCH):
                if rule.kernel(factors) not in COMMUNICATING:
                    faults = differences(rule, op, layer, operands, sizes, factors, BATCH)
                    assert faults == [], (op.target, sizes, factors)
