"""Small models for tests on real processes. Every parameter is random, biases too: a bias that starts at zero and whose
gradient is zero in exact arithmetic would show rounding errors that AdamW has blown up, not errors of a plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from autopar.graph import OpGraph
from autopar.trace.capture import trace
from autopar.trace.models.spec import load_model

SPECS = {
    "gpt": "gpt:layers=2,hidden=32,heads=4,vocab=64,seq=8",
    "llama": "llama:layers=2,hidden=32,heads=8,kv_heads=4,ffn=64,vocab=64,seq=8",
    "odd gpt": "gpt:layers=2,hidden=48,heads=6,vocab=67,seq=7",
    "deep gpt": "gpt:layers=4,hidden=16,heads=4,vocab=32,seq=8",
    "deep llama": "llama:layers=4,hidden=16,heads=4,kv_heads=2,ffn=32,vocab=32,seq=8",
}


class MixedBlock(nn.Module):
    """Causal attention, then the two experts of each token with the highest scores: a stack of gated feed-forwards.

    Every expert has room for all tokens, so that none is dropped.
    """

    def __init__(self, width: int, heads: int, experts: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.score = nn.Linear(width, width, bias=False), nn.Linear(width, experts, bias=False)
        self.norm, self.again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.gate, self.up = (nn.Parameter(torch.empty(experts, width, inner)) for _ in range(2))
        self.down, self.bias = nn.Parameter(torch.empty(experts, inner, width)), nn.Parameter(torch.empty(experts, 1))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (lin(normed).unflatten(2, (self.heads, -1)).transpose(1, 2) for lin in self.qkv)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mixture(self.again(x))

    def mixture(self, x: Tensor) -> Tensor:
        scores = self.score(x).softmax(-1)
        chosen = nn.functional.one_hot(scores.topk(2).indices, scores.shape[-1]).sum(2).to(x.dtype)
        weights = scores * chosen / (scores * chosen).sum(-1, keepdim=True)
        place = ((chosen.cumsum(1) - 1) * chosen).long()
        sent = chosen.unsqueeze(-1) * nn.functional.one_hot(place, x.shape[1]).to(x.dtype)
        inside = torch.einsum("btd,btec->becd", x, sent)
        gated = torch.einsum("becd,edf->becf", inside, self.gate)
        made = nn.functional.silu(gated) * torch.einsum("becd,edf->becf", inside, self.up)
        made = torch.einsum("becf,efd->becd", made, self.down) + self.bias[:, None]
        return torch.einsum("becd,btec->btd", made, sent * weights.unsqueeze(-1))


class Mixture(nn.Module):
    """Two blocks of attention and experts between an embedding and a head."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.blocks = nn.ModuleList(MixedBlock(16, 4, experts, 24) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _mixture(experts: int) -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.zeros(2, 12, dtype=torch.long)
    return Mixture(experts), {"ids": ids, "labels": ids.clone()}


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


class Gated(nn.Module):
    """A block that leaves out the places of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        change: Tensor = self.down(torch.tanh(self.up(x)))
        return x + change.masked_fill(mask.unsqueeze(-1), 0.0)


class Skips(nn.Module):
    """Blocks that read a mask and integers made in front of the first, and skips from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.again = nn.Embedding(32, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Gated() for _ in range(4))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask, doubled = ids == 0, ids * 2
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x * first + self.again(doubled))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _skips() -> tuple[nn.Module, dict[str, Any]]:
    return Skips(), {"ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, 8, dtype=torch.long)}


class ConvNet(nn.Module):
    """Convolutions, norms of one kind (`batch`, `group`, `none`), both poolings and a classifier."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        norms: dict[str, Callable[[int], nn.Module]] = {
            "batch": nn.BatchNorm2d,
            "group": lambda n: nn.GroupNorm(2, n),
            "none": lambda _: nn.Identity(),
        }
        self.features = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), norms[norm](8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2, bias=False), norms[norm](16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.classify = nn.Linear(16, 8)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.classify(self.features(image).flatten(1)), labels)


def _conv_net(norm: str) -> tuple[nn.Module, dict[str, Any]]:
    image = torch.zeros(4, 4, 8, 8)
    return ConvNet(norm), {"image": image, "labels": torch.zeros(4, dtype=torch.long)}


def _bert(name: str, layers: int = 2, attention: str = "sdpa") -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation=attention,  # type: ignore[call-arg]
    )  # fmt: skip
    config.num_labels = 4
    ids, ones = torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)
    labels = ids if name == "BertForMaskedLM" else torch.zeros(2, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": ones, "token_type_ids": ids.clone(), "labels": labels.clone()}
    return getattr(transformers, name)(config), inputs


def _vit(layers: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64, image_size=16,
        patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 4
    images = torch.zeros(2, 3, 16, 16)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.zeros(2, dtype=torch.long),
    }


class NextToken(nn.Module):
    """A language model with its loss in the dtype of its logits; transformers takes it in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def eager_gpt() -> tuple[nn.Module, dict[str, Any]]:
    """Four blocks of attention written out, with dropout, on a sequence that is long for their width."""
    return _eager("gpt", layers=4, hidden=64, length=64)


def _eager(kind: str, layers: int = 2, hidden: int = 32, length: int = 8) -> tuple[nn.Module, dict[str, Any]]:
    """Attention written out: products, mask and softmax are ops of their own. The embedding of GPT-2 is tied."""
    import transformers

    ids = torch.zeros(2, length, dtype=torch.long)
    tokens: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    tokens["attn_implementation"] = "eager"
    model: nn.Module
    if kind == "gpt":
        gpt = transformers.GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=4, n_positions=length, activation_function="gelu_pytorch_tanh",
            attn_pdrop=0.1, resid_pdrop=0.0, embd_pdrop=0.0, **tokens,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(gpt)
    else:
        llama = transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=2 * hidden, max_position_embeddings=length, **tokens,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(llama)
    return NextToken(model), {"input_ids": ids, "labels": ids.clone()}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "skips": _skips,
    "cnn": lambda: _conv_net("batch"),
    "cnn with groups": lambda: _conv_net("group"),
    "bert": lambda: _bert("BertForMaskedLM"),
    "bert classifier": lambda: _bert("BertForSequenceClassification"),
    "vit": _vit,
}
"""Small models by name."""
FURTHER: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "gpt eager": lambda: _eager("gpt"),
    "mixture": lambda: _mixture(4),
    "llama eager": lambda: _eager("llama"),
    "bert eager": lambda: _bert("BertForMaskedLM", 2, "eager"),
    "deep bert": lambda: _bert("BertForMaskedLM", 4, "eager"),
    "deep vit": lambda: _vit(4),
}
"""Attention written out, enough blocks for four stages, and experts."""


def real(model: nn.Module) -> nn.Module:
    """`model` with memory; tied parameters, which `to_empty` parts, tied again."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    model.to_empty(device="cpu")
    for name, tied in names.items():
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, model.get_parameter(tied))
    return model


@cache
def example(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A real model in float64 and example inputs: the same on every process."""
    if name == "mlp":
        model: nn.Module = Mlp()
        inputs = {"x": torch.zeros(2, 16), "labels": torch.tensor([0, -100])}
    elif name in {**MODELS, **FURTHER}:
        model, inputs = {**MODELS, **FURTHER}[name]()
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    else:
        loaded = load_model(SPECS[name])
        model, inputs = real(loaded.model), dict(loaded.inputs)
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
