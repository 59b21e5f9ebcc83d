"""Dimensions of a decoder, a transformer language model, and what follows from them: parameters and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dims:
    """A decoder by its dims.

    `gated`: SiLU-gated feed-forward, three matrices instead of two; `tied`: the head shares the embedding's weight;
    `bias`: linear layers and norms have one, and these are layer norms, else RMS norms; `positions`: learned ones, else
    rotary. With `experts` every block has so many feed-forwards of inner width `ffn`, of which a token takes `topk`.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq: int
    gated: bool
    tied: bool
    bias: bool
    positions: bool
    experts: int = 0
    topk: int = 0

    @property
    def attention_params(self) -> int:
        """Elements of a block's attention: query, key, value and output projections, and the norm before."""
        inner, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (inner + 2 * shared + 2 * self.hidden) if self.bias else 0
        return self.hidden * (2 * inner + 2 * shared) + self.hidden + biases

    @property
    def expert_params(self) -> int:
        """Elements of one feed-forward."""
        matrices = 3 if self.gated else 2
        return matrices * self.hidden * self.ffn + ((matrices - 1) * self.ffn + self.hidden if self.bias else 0)

    @property
    def block_params(self) -> int:
        """Elements of a block: attention, feed-forwards with their router, and the norm between."""
        router = self.hidden * self.experts
        return (
            self.attention_params + max(1, self.experts) * self.expert_params + router + self.hidden * (1 + self.bias)
        )

    @property
    def embedding_params(self) -> int:
        """Elements of the token embedding."""
        return self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        """Elements of the whole model."""
        ends = self.embedding_params * (1 if self.tied else 2) + self.hidden * (1 + self.bias)
        return self.layers * self.block_params + ends + (self.seq * self.hidden if self.positions else 0)

    @property
    def active_params(self) -> int:
        """Elements of matrices that a token is multiplied with: the head's once, of experts `topk`."""
        inner = 2 * (self.heads + self.kv_heads) * self.head_dim
        feed = (3 if self.gated else 2) * self.ffn * max(1, self.topk if self.experts else 1)
        return self.layers * self.hidden * (inner + feed + self.experts) + self.embedding_params

    def model_flops(self, sequences: int) -> float:
        """FLOPs of a step over so many sequences, without recomputation; causal attention counts half.

        6 a parameter and token, and 6 s d a head and token for the two products of attention.
        """
        tokens = sequences * self.seq
        return tokens * (6.0 * self.active_params + 6.0 * self.layers * self.heads * self.head_dim * self.seq)

    def hardware_flops(self, sequences: int) -> float:
        """FLOPs of a step with full recomputation, attention counted whole: equation 3 of Narayanan et al., 2021.

        96 B s l h² (1 + s / (6 h) + V / (16 l h)), which holds for heads as wide as the model and ffn = 4 h.
        """
        s, l, h, v = self.seq, self.layers, self.hidden, self.vocab  # noqa: E741
        return 96.0 * sequences * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
