"""Ways in which users write models: each traces to a graph that computes what the module computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.graph import OpGraph
from autopar.trace import trace
from tests.trace.interpreter import largest_difference

WIDTH, TOKENS = 8, 6


class Model(nn.Module):
    """Two linear layers with `what` between them; the mean square is the loss."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.what(torch.tanh(self.first(x)))).pow(2).mean()  # type: ignore[no-any-return]


def write_to_slices(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    out[..., : WIDTH // 2] = x[..., WIDTH // 2 :]
    out[..., WIDTH // 2 :] = x[..., : WIDTH // 2] * 2
    out[:, 0] = 1.0
    return out


def write_through_views(x: Tensor) -> Tensor:
    out = x.clone()
    turned, row = out.transpose(1, 2), out[:, 2]
    turned[:, 1:3].mul_(3.0)
    row.narrow(-1, 1, 3).add_(1.0)
    out.view(-1, TOKENS * WIDTH)[:, 5].zero_()
    return out + turned.transpose(1, 2) * row.unsqueeze(1)


def write_to_a_view_made_contiguous(x: Tensor) -> Tensor:
    out = (x * 2).transpose(1, 2).contiguous()
    out[:, 0] += 1.0
    return out.transpose(1, 2)


def numbers(x: Tensor) -> Tensor:
    scale = torch.tensor([[1.0, 2.0], [3.0, 0.5]], dtype=x.dtype, device=x.device)
    return x[:, [-1], :] * scale.flatten().repeat(2) + x[:, [1, 1, 0]].sum(1, keepdim=True)


def numbers_as_limits(x: Tensor) -> Tensor:
    span = torch.tensor(min(x.shape[1], 4))
    places = torch.clamp(torch.arange(TOKENS) - 2 + span, 0, span + 1)  # type: ignore[call-overload]  # torch takes it
    return x[:, places] + x[:, TOKENS - span : TOKENS].sum(1, keepdim=True)


def ask_what_is_known(x: Tensor) -> Tensor:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril()
    if bool((mask.sum(-1) == torch.arange(1, TOKENS + 1, device=x.device)).all()):
        return x.cumsum(1) / mask.sum(-1).unsqueeze(-1)
    return x


def pick_a_position(x: Tensor) -> Tensor:
    last = x[..., 0].argmax(-1)
    return x[torch.arange(x.shape[0], device=x.device), last] + x[torch.arange(x.shape[0], device=x.device), -1 - last]


def in_own_dtype(x: Tensor) -> Tensor:
    with torch.autocast(device_type=x.device.type, enabled=False):
        return x * torch.tensor([0.5, 2.0]).to(x).repeat(WIDTH // 2)


def join_to_nothing(x: Tensor) -> Tensor:
    kept = torch.tensor([], dtype=x.dtype, device=x.device)
    return torch.cat((kept, x), dim=1)


def turn_complex_pairs(x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(TOKENS, device=x.device), 0.5 ** torch.arange(WIDTH // 2, device=x.device))
    turns = torch.polar(torch.ones_like(angles, dtype=x.dtype), angles.to(x.dtype))
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(2)


def assert_by_value(x: Tensor) -> Tensor:
    torch._check((x.abs().sum() >= 0).item())
    return x * 2


def length_as_a_number(x: Tensor) -> Tensor:
    return x.clamp(max=len(x) - 1) * len(x) + torch.ones(len(x), 1, 1, dtype=x.dtype, device=x.device)


WAYS = [
    write_to_slices,
    write_through_views,
    write_to_a_view_made_contiguous,
    numbers,
    numbers_as_limits,
    ask_what_is_known,
    pick_a_position,
    in_own_dtype,
    join_to_nothing,
    turn_complex_pairs,
    assert_by_value,
]


def _traced(model: nn.Module) -> tuple[OpGraph, float]:
    """The graph of a trace at batch 2, and how far it is from the model at batch 5."""
    torch.manual_seed(0)
    model = model.double()
    graph = trace(model, (torch.zeros(2, TOKENS, WIDTH, dtype=torch.float64),))
    x = torch.randn(5, TOKENS, WIDTH, dtype=torch.float64)
    return graph, largest_difference(graph, model, {"x": x}, model(x), 5)


@pytest.mark.parametrize("way", WAYS)
def test_graph_equals_module(way: Callable[[Tensor], Tensor]) -> None:
    """Loss and gradients are the module's, and samples are known to stay apart."""
    graph, difference = _traced(Model(way))
    assert difference < 1e-12
    assert graph.separable, graph.why_not_separable


def test_batch_as_a_plain_number() -> None:
    """`len(x)` can't be a symbol: the graph of any batch comes from those of two, and is right at a third."""
    graph, difference = _traced(Model(length_as_a_number))
    assert difference < 1e-12
    assert not graph.assumptions
    assert not graph.separable  # x is scaled by the number of samples


class Settings(dict[str, int]):
    """A dictionary that can't be copied."""

    copy = None  # type: ignore[assignment]


class Table(nn.Module):
    """Makes a table when it is first asked for, and keeps it."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        if "table" not in dict(self.named_buffers()):
            self.register_buffer("table", torch.arange(1.0, WIDTH + 1, device=x.device), persistent=False)
        return x * self.table


def test_a_buffer_that_forward_makes() -> None:
    """What forward leaves on a module while it is looked at is gone when it is traced: tables are made anew."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), Table()) for _ in range(2)))
    graph, difference = _traced(Model(blocks))
    assert difference < 1e-12
    assert not graph.buffers
    assert not graph.assumptions


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_is_left_to_the_plan() -> None:
    """A region that would cast is traced as if it weren't there, which is said."""

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return x @ x.transpose(1, 2) @ x

    graph, difference = _traced(Model(cast))
    assert difference < 1e-12
    assert any("autocast" in note for note in graph.assumptions)


class SequenceFirst(nn.Module):
    """Attention of torch between transposes: inside it merges the samples behind the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        turned = x.transpose(0, 1)
        mixed, _ = self.attention(turned, turned, turned, need_weights=False)
        return mixed.transpose(0, 1).pow(2).mean()  # type: ignore[no-any-return]


def test_rows_merged_behind_the_tokens() -> None:
    """Products of (tokens * samples) rows are made before the merge, so that the batch stays a dim."""
    graph, difference = _traced(SequenceFirst())
    assert difference < 1e-12
    assert graph.separable
    linear = [op for c in graph.classes for op in c.ops if op.target == "aten.linear.default"]
    assert all(graph.classes[0].values[op.operands[0]].shape[1].per_sample == 1 for op in linear)


def test_a_write_that_may_not_be_seen_is_refused() -> None:
    """A reshape may copy or not: what is written to it is refused if the original is read later."""

    def write(x: Tensor) -> Tensor:
        turned = x.transpose(1, 2)
        turned.reshape(-1, TOKENS * WIDTH).mul_(2.0)
        return F.relu(turned).transpose(1, 2)

    with pytest.raises(TraceError, match="may or may not share"):
        _traced(Model(write))
