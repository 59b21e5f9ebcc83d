"""Models that do something unusual, for tests on real processes; parameters are random, biases too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph import OpGraph
from autopar.trace.capture import trace

WIDTH = 16


class Vae(nn.Module):
    """A variational autoencoder whose loss is a sum over samples; its noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        rebuilt = self.decoder(mean + noise * (0.5 * log_variance).exp())
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return F.binary_cross_entropy_with_logits(rebuilt, x.sigmoid(), reduction="sum") + divergence


class Regression(nn.Module):
    """A mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


class Scaled(nn.Module):
    """Tensors kept as plain attributes, one of them by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale = torch.linspace(0.5, 1.5, 32, dtype=torch.float64)
        self.first.scale = self.scale
        self.shift = torch.full((WIDTH,), 0.25, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) * self.first.scale)
        out: Tensor = self.second(hidden * self.scale) + self.shift
        return out.pow(2).mean()


class Mixer(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Repeated(nn.Module):
    """One block applied three times: its weights are shared by all three places."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x.pow(2).mean()


class Twice(nn.Module):
    """One embedding for two inputs, and once more as the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.mixer = Mixer()

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mixed = self.mixer(self.table(source) - self.table(target).mean(dim=1, keepdim=True))
        return F.cross_entropy((mixed @ self.table.weight.T).flatten(0, 1), labels.flatten())


class KeywordsOnly(nn.Module):
    """Inputs by keyword only, nested ones and constants among them; a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 4)

    def forward(self, *, batch: dict[str, Tensor], power: int = 1, label: str = "y") -> dict[str, Any]:
        out = self.net(batch["x"]) ** power
        return {"scores": [out, out.mean(dim=-1)], "loss": F.mse_loss(out, batch[label])}


@dataclass
class Output:
    """What `Dataclass` returns."""

    scores: Tensor
    loss: Tensor | None = None


class Dataclass(nn.Module):
    """A dataclass of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Output:
        out = self.net(x)
        return Output(out, F.l1_loss(out, y))


class Experts(nn.Module):
    """Each expert picks the tokens that go to it: sizes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(tokens).softmax(dim=-1).topk(2)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, place].unsqueeze(1))
        return out.view_as(x)


class Wavering(nn.Module):
    """Branches on the mean of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.relu() if y.mean() > 0 else y.tanh()


class Odd(nn.Module):
    """Mixers around a submodule that can't be traced."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.odd, self.second = Mixer(), kind(), Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.odd(self.first(x))).pow(2).mean()  # type: ignore[no-any-return]


class Reversed(torch.autograd.Function):
    """What it is given; the gradient turned round and doubled."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return -2 * gradient


class Turning(nn.Module):
    """Turns the gradient round, and makes it three times as large by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        if y.requires_grad:
            y.register_hook(lambda gradient: 3 * gradient)
        return Reversed.apply(y)  # type: ignore[no-any-return,no-untyped-call]


class Places(nn.Module):
    """Weights made from positions alone, which a layer without samples makes, and values repeated for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 64))
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(64.0, device=x.device, dtype=x.dtype)
        weights = self.table(places.unsqueeze(1) / 64)
        once = weights[:1].repeat(len(x), 1).reshape(-1, 8, 8).transpose(1, 2)
        twice = weights[:2].repeat(x.shape[0], 1).reshape(-1, 2, 8, 8).sum(1)
        hidden = self.second(torch.tanh(self.first(x))).reshape(-1, 8, 8) + once + twice
        loss: Tensor = (hidden.flatten(1) @ weights).pow(2).mean()
        return loss


class Token(nn.Module):
    """A parameter that is repeated for each sample in front of the blocks, and read behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, WIDTH))
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1)
        for block in self.blocks:
            x = block(x)
        return self.head(x * token).pow(2).mean()  # type: ignore[no-any-return]


class OneBatch(nn.Module):
    """Groups the samples of its batch by a number that a trace can't follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.chunk(-(-len(x) // 6))
        return torch.cat([self.second(torch.tanh(self.first(g - g.mean(0)))) for g in groups]).pow(2).mean()


def _x(width: int = WIDTH) -> Tensor:
    return torch.zeros(2, width)


def _ids() -> Tensor:
    return torch.zeros(2, 4, dtype=torch.long)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "vae": (Vae, {"x": _x(), "noise": _x(4)}),
    "regression": (Regression, {"x": _x(), "y": _x(4)}),
    "plain attributes": (Scaled, {"x": _x()}),
    "block three times": (Repeated, {"x": _x()}),
    "embedding twice": (Twice, {"source": _ids(), "target": _ids(), "labels": _ids()}),
    "keywords only": (KeywordsOnly, {"batch": {"x": _x(), "y": _x(4)}, "power": 2}),
    "experts": (lambda: Odd(Experts), {"x": torch.zeros(2, 4, WIDTH)}),
    "own gradients": (lambda: Odd(Turning), {"x": torch.zeros(2, 4, WIDTH)}),
    "weights of places": (Places, {"x": _x()}),
    "token": (Token, {"x": _x()}),
    "one batch": (OneBatch, {"x": torch.zeros(16, WIDTH)}),
    "dataclass": (Dataclass, {"x": _x(), "y": _x(4)}),
}


@cache
def example(name: str) -> tuple[nn.Module, dict[str, Any], OpGraph]:
    """A model in float64, its example inputs and its trace: the same on every process."""
    kind, inputs = CASES[name]
    model, generator = kind().double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model, inputs, trace(model, inputs, compute_dtype="float64")
