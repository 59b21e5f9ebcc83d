"""Small models of many shapes for the tests of tracing; each takes the tensors that `batch_of` makes for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, WIDTH = 40, 8, 16


class Mlp(nn.Module):
    """A plain chain of linear layers: no repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 3),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


class Strange(nn.Module):
    """A block with a nested output, a buffer, a constant and an optional argument."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.0 + index))
        self.register_buffer("shift", torch.arange(WIDTH) / (10.0 + index))

    def forward(
        self, state: dict[str, Any], power: int, extra: Tensor | None = None
    ) -> tuple[dict[str, Tensor], float]:
        x = state["x"]
        y = self.up(torch.sigmoid(self.down(x)) ** power) * self.scale + self.shift
        y = y if extra is None else y + extra
        return {"x": x + y, "seen": y.mean(dim=-1, keepdim=True)}, 0.5


class Residual(nn.Module):
    """Strange blocks, one value that passes several of them by, and work between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Strange(i) for i in range(4))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor, power: int = 2) -> dict[str, Any]:
        start = self.stem(x)
        state: dict[str, Any] = {"x": start, "seen": None}
        for block in self.blocks:
            state, half = block({"x": state["x"]}, power, extra=start)
            state["x"] = state["x"] * half + state["seen"]
        return {"scores": self.out(state["x"]), "loss": (self.out(state["x"] + start) - y).pow(2).mean()}


class TiedBlocks(nn.Module):
    """All blocks share one matrix, the head is the embedding; parameters that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        for i in (1, 2):
            self.get_submodule(f"blocks.{i}.1").weight = self.get_parameter("blocks.0.1.weight")
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, *, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Result(NamedTuple):
    """A nested output."""

    parts: tuple[Tensor, Tensor]
    note: str


class TwoHeads(nn.Module):
    """No loss of its own; inputs in a nested dict; a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, batch: dict[str, Tensor], sign: float) -> Result:
        with torch.no_grad():
            size = self.left.weight.abs().sum() + batch["x"].abs().mean(dim=1, keepdim=True)
        left = self.left(batch["x"]) * sign / size
        return Result((left, self.right(batch["x"]) - batch["mask"]), "fine")


@dataclass(frozen=True)
class Case:
    """How to make a model and a batch of `n` for it; `tolerance` is relative (float32 where the model casts to it)."""

    model: Callable[[], nn.Module]
    batch_of: Callable[[int], dict[str, Any]]
    tolerance: float = 1e-12


def _vectors(n: int) -> dict[str, Any]:
    return {"x": torch.randn(n, 6, dtype=torch.float64), "y": torch.randn(n, 3, dtype=torch.float64)}


def _tokens(n: int, name: str = "input_ids") -> dict[str, Any]:
    return {name: torch.randint(0, VOCAB, (n, SEQ)), "labels": torch.randint(0, VOCAB, (n, SEQ))}


def _nested(n: int) -> dict[str, Any]:
    x = torch.randn(n, 6, dtype=torch.float64)
    return {"batch": {"x": x, "mask": torch.ones(n, 3, dtype=torch.float64)}, "sign": -1.0}


def _decoder(spec: str) -> Callable[[], nn.Module]:
    from autopar.trace.models.decoder import Decoder
    from autopar.trace.models.dimspec import parse_dims

    return lambda: Decoder(parse_dims(spec))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_embd=WIDTH, n_head=4, vocab_size=VOCAB, n_positions=SEQ, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
        intermediate_size=24,
    )  # fmt: skip
    return LlamaForCausalLM(config)


CASES = {
    "mlp": Case(Mlp, _vectors),
    "residual": Case(Residual, lambda n: _vectors(n) | {"power": 3}),
    "tied": Case(TiedBlocks, lambda n: _tokens(n, "tokens")),
    "two heads": Case(TwoHeads, _nested),
    "gpt": Case(_decoder(f"gpt:layers=3,hidden={WIDTH},heads=4,vocab={VOCAB},seq={SEQ}"), _tokens),
    "llama": Case(_decoder(f"llama:layers=3,hidden={WIDTH},heads=4,kv_heads=2,vocab={VOCAB},seq={SEQ}"), _tokens),
    "hf gpt2": Case(_gpt2, _tokens),
    "hf llama": Case(_llama, _tokens, 1e-7),
}
