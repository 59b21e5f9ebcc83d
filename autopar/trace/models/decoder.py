"""The GPT and Llama families of transformers from their dimensions, in small modules that train for real."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.dims import Dims

IGNORE = -100
"""Label of tokens that do not count in the loss."""


ROTARY_BASE = 10000.0
"""Base of the wavelengths of rotary positions."""


class _ResidualLinear(nn.Linear):
    """A linear layer whose output is added to the residual stream."""


class Attention(nn.Module):
    """Causal self-attention, (batch, seq, hidden) -> the same; query heads in groups over fewer key heads."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.head_dim, self.grouped = dims.head_dim, dims.kv_heads != dims.heads
        self.q_proj = nn.Linear(dims.hidden, dims.heads * dims.head_dim, dims.bias)
        self.k_proj = nn.Linear(dims.hidden, dims.kv_heads * dims.head_dim, dims.bias)
        self.v_proj = nn.Linear(dims.hidden, dims.kv_heads * dims.head_dim, dims.bias)
        self.o_proj = _ResidualLinear(dims.heads * dims.head_dim, dims.hidden, dims.bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """`rotation` is (cos, sin), each (seq, head_dim / 2), or None without rotary positions."""
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """(batch, seq, hidden) -> the same by GELU or SiLU-gated ffn."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden, dims.ffn, dims.bias) if dims.gated else None
        self.up_proj = nn.Linear(dims.hidden, dims.ffn, dims.bias)
        self.down_proj = _ResidualLinear(dims.ffn, dims.hidden, dims.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to every token."""
        up = self.up_proj(x)
        inner = F.gelu(up) if self.gate_proj is None else F.silu(self.gate_proj(x)) * up
        out: Tensor = self.down_proj(inner)
        return out


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.attn_norm, self.attn = _norm(dims), Attention(dims)
        self.mlp_norm, self.mlp = _norm(dims), FeedForward(dims)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """(batch, seq, hidden) -> the same."""
        x = x + self.attn(self.attn_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A causal language model: tokens and labels -> logits and next-token loss."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.embed = nn.Embedding(dims.vocab, dims.hidden)
        self.positions = nn.Embedding(dims.seq, dims.hidden) if dims.positions else None
        self.blocks = nn.ModuleList(Block(dims) for _ in range(dims.layers))
        self.norm = _norm(dims)
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False)
        if dims.tied:
            self.head.weight = self.embed.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """GPT-2's initialisation: normal with 0.02, smaller where a block adds to the residual stream."""
        if not isinstance(module, (nn.Linear, nn.Embedding)) or module.weight.is_meta:
            return
        narrower = math.sqrt(2 * self.dims.layers) if isinstance(module, _ResidualLinear) else 1.0
        nn.init.normal_(module.weight, std=0.02 / narrower)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """`input_ids`, `labels`: (batch, seq) token numbers, labels equal to the inputs (shifted here).

        Returns `logits` (batch, seq, vocab) and, with labels, `loss`: the mean over tokens whose label counts.
        """
        x = self.embed(input_ids)
        at = torch.arange(input_ids.shape[1], device=input_ids.device)
        if self.positions is not None:
            x = x + self.positions(at)
        rotation = None if self.positions is not None else rotary(at, self.dims.head_dim, ROTARY_BASE, x.dtype)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        return {"logits": logits} if labels is None else {"loss": next_token_loss(logits, labels), "logits": logits}


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each token's successor; half-precision logits are widened to float32."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    return F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=IGNORE)


def rotary(at: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (seq, head_dim / 2) of rotary positions `at` (Su et al. 2021), computed in float32."""
    steps = torch.arange(0, head_dim, 2, device=at.device, dtype=torch.float32)
    angles = at.float().unsqueeze(1) * theta ** (-steps / head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last dim of `x` (batch, heads, seq, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _norm(dims: Dims) -> nn.Module:
    return nn.LayerNorm(dims.hidden) if dims.bias else nn.RMSNorm(dims.hidden, eps=1e-5)
