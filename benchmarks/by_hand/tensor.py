"""Tensor parallelism as Megatron has it, with plain functional collectives.

Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3: queries, keys, values and the first feed-forward product
are split by columns, the products behind them by rows; embedding, head and loss are split over the vocabulary.
"""

# ruff: noqa: ARG004 - signatures are those of autograd functions

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from benchmarks.by_hand.gpt import GPT, Block, Dims, build
from benchmarks.by_hand.side import Side, rows


def split(dims: Dims) -> Side:
    """Every rank takes the whole batch and its part of each product."""
    model = Split(build(dims))
    ids, labels = rows(dims, 0, 1)

    def loss() -> Tensor:
        mean: Tensor = model(ids, labels)
        mean.backward()
        return mean.detach()

    return Side(list(model.parameters()), loss)


class Split(nn.Module):
    """The parts of a GPT that one rank has."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.first = dist.get_rank() * (model.head.out_features // dist.get_world_size())
        self.embedding = nn.Parameter(_part(model.embedding.weight, 0))
        self.positions = nn.Parameter(model.positions.detach().clone())
        self.blocks = nn.ModuleList(SplitBlock(block) for block in model.blocks)
        self.norm = model.norm
        self.head = nn.Parameter(_part(model.head.weight, 0))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy over all tokens."""
        x = Sum.apply(self._looked_up(ids)) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(Spread.apply(self.norm(x)), self.head)
        loss: Tensor = CrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self.first)
        return loss

    def _looked_up(self, ids: Tensor) -> Tensor:
        mine = ids - self.first
        outside = (mine < 0) | (mine >= len(self.embedding))
        return F.embedding(mine.masked_fill(outside, 0), self.embedding).masked_fill(outside.unsqueeze(-1), 0.0)


class SplitBlock(nn.Module):
    """The heads and the columns of the feed-forward layer that one rank has."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.head_size = block.head_size
        self.before_attention, self.before_ffn = block.before_attention, block.before_ffn
        self.query, self.key, self.value, self.up = map(_columns, (block.query, block.key, block.value, block.up))
        self.out, self.down = nn.Parameter(_part(block.out.weight, 1)), nn.Parameter(_part(block.down.weight, 1))
        self.out_bias, self.down_bias = block.out.bias, block.down.bias

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same, whole on every rank."""
        normed = Spread.apply(self.before_attention(x))
        heads = (f(normed).unflatten(-1, (-1, self.head_size)) for f in (self.query, self.key, self.value))
        q, k, v = (h.transpose(1, 2) for h in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + (Sum.apply(F.linear(mixed, self.out)) + self.out_bias)
        inner = F.gelu(self.up(Spread.apply(self.before_ffn(x))))
        return x + (Sum.apply(F.linear(inner, self.down)) + self.down_bias)


def _part(whole: Tensor, dim: int) -> Tensor:
    return whole.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def _columns(whole: nn.Linear) -> nn.Linear:
    part = nn.Linear(whole.in_features, whole.out_features // dist.get_world_size(), device="meta")
    part.weight, part.bias = nn.Parameter(_part(whole.weight, 0)), nn.Parameter(_part(whole.bias, 0))
    return part


def _sum(x: Tensor, how: str = "sum") -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(all_reduce(x, how, dist.group.WORLD))


class Spread(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _sum(gradient)


class Sum(torch.autograd.Function):
    """The sum over the ranks, whose gradient goes to each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class CrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of logits (rows, part of the vocabulary); probabilities are kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int) -> Tensor:
        logits = logits - _sum(logits.amax(-1), "max").unsqueeze(-1)
        mine = labels - first
        outside = (mine < 0) | (mine >= logits.shape[-1])
        mine = mine.masked_fill(outside, 0)
        wanted = logits.gather(-1, mine.unsqueeze(-1)).squeeze(-1).masked_fill_(outside, 0.0)
        weights = logits.exp_()
        sums = _sum(torch.stack([wanted, weights.sum(-1)]))
        ctx.save_for_backward(weights.div_(sums[1].unsqueeze(-1)), mine, outside)
        return (sums[1].log() - sums[0]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, mine, outside = ctx.saved_tensors
        probabilities.scatter_add_(-1, mine.unsqueeze(-1), (outside.to(probabilities.dtype) - 1).unsqueeze(-1))
        return probabilities.mul_(gradient / len(mine)), None, None
