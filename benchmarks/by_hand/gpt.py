"""The GPT that both sides train."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Dims:
    """Sizes of a GPT, and of the batch that a step takes."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    vocabulary: int = 2048
    tokens: int = 128
    batch: int = 16


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.before_attention, self.before_ffn = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        normed = self.before_attention(x)
        heads = (f(normed).unflatten(-1, (-1, self.head_size)) for f in (self.query, self.key, self.value))
        q, k, v = (h.transpose(1, 2) for h in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.before_ffn(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a norm and a head of its own."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.embedding = nn.Embedding(dims.vocabulary, dims.width)
        self.positions = nn.Parameter(0.02 * torch.randn(dims.tokens, dims.width))
        self.blocks = nn.ModuleList(Block(dims.width, dims.heads) for _ in range(dims.layers))
        self.norm = nn.LayerNorm(dims.width)
        self.head = nn.Linear(dims.width, dims.vocabulary, bias=False)

    def logits(self, ids: Tensor) -> Tensor:
        """(batch, tokens) to (batch, tokens, vocabulary)."""
        x = self.embedding(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy over all tokens."""
        return cross_entropy(self.logits(ids), labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(dims: Dims) -> GPT:
    """The same GPT on every rank."""
    torch.manual_seed(0)
    return GPT(dims)


def text(dims: Dims) -> Tensor:
    """The batch that every step takes: (batch, tokens + 1)."""
    return torch.randint(dims.vocabulary, (dims.batch, dims.tokens + 1), generator=torch.Generator().manual_seed(1))
