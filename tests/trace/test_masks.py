"""Attention masks are recognised by value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph import Op
from autopar.trace import trace
from autopar.trace.known import constants, rows
from tests.trace.interpreter import run_graph

SEQ = 6


class _Attention(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x).unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask(x), dropout_p=0.0).sum()


def _square(x: Tensor) -> Tensor:
    return torch.ones(SEQ, SEQ, dtype=torch.bool, device=x.device)


def _causal(x: Tensor) -> Tensor:
    return _square(x).tril()


def _additive(x: Tensor) -> Tensor:
    return torch.zeros(SEQ, SEQ, device=x.device).masked_fill(~_causal(x), float("-inf"))


def _per_sample(x: Tensor) -> Tensor:
    at = torch.arange(SEQ, device=x.device)
    return (at.unsqueeze(1) >= at).expand(x.shape[0], 1, SEQ, SEQ)


def _window(x: Tensor) -> Tensor:
    return _causal(x) & ~_square(x).tril(-3)


def _from_data(x: Tensor) -> Tensor:
    return _causal(x) & (x[:, :, 0] < 100.0).unsqueeze(1).unsqueeze(1)


def _attention(mask: Callable[[Tensor], Tensor]) -> tuple[Op, int]:
    graph = trace(_Attention(mask), (torch.zeros(2, SEQ, 4),))
    ops = [op for c in graph.classes for op in c.ops]
    return next(op for op in ops if "attention" in op.target), len(ops)


@pytest.mark.parametrize("mask", [_causal, _additive, _per_sample])
def test_causal_masks_become_a_flag(mask: Callable[[Tensor], Tensor]) -> None:
    """A lower triangle, however it is made, becomes is_causal and its makers disappear."""
    op, count = _attention(mask)
    assert op.args[3:6] == (None, 0.0, True)
    assert count == 4


def test_full_mask_is_dropped() -> None:
    """A mask that lets everything through is left out."""
    assert _attention(_square)[0].args[3:6] == (None, 0.0, False)


@pytest.mark.parametrize("mask", [_window, _from_data])
def test_other_masks_stay(mask: Callable[[Tensor], Tensor]) -> None:
    """A sliding window, or a mask that depends on data, stays an operand."""
    op, _ = _attention(mask)
    assert len(op.operands) == 4


def _numbered(x: Tensor) -> Tensor:
    sample = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1, 1)
    return _window(x) & (sample >= 0)


def test_masks_that_number_samples_are_made_once() -> None:
    """A window built by numbering samples that are all alike is made for one sample: no sample knows its number."""
    model = _Attention(_numbered)
    graph = trace(model, (torch.zeros(2, SEQ, 4),))
    assert graph.separable, graph.why_not_separable
    masks = [c.values[op.operands[3]] for c in graph.classes for op in c.ops if "attention" in op.target]
    assert [m.shape_at(5) for m in masks] == [(5, 1, SEQ, SEQ)]
    x = torch.randn(5, SEQ, 4)
    torch.testing.assert_close(run_graph(graph, model, {"x": x}, 5)[graph.loss or ""], model(x))


def test_names_stay_unique() -> None:
    """Two constants made for one sample from shared steps don't share names."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            sample = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1)
            first, second = (sample >= 0).expand(-1, SEQ, 4), (sample < 10**9).expand(-1, SEQ, 4)
            total: Tensor = (self.linear(x) * first + x * second).sum()
            return total

    graph = trace(Two(), (torch.zeros(2, SEQ, 4),))
    assert graph.separable, graph.why_not_separable
    for kind in graph.classes:
        made = [r for op in kind.ops for r in op.results]
        assert len(made) == len(set(made))


def _long_causal(x: Tensor) -> Tensor:
    at = torch.arange(LONG, device=x.device)
    return (at.view(1, 1, -1, 1) >= at.view(1, 1, 1, -1)).expand(x.shape[0], 1, LONG, LONG) & (at >= 0)


def _long_square(x: Tensor) -> Tensor:
    return torch.ones(LONG, LONG, dtype=torch.bool, device=x.device)


LONG = 300
LONG_MASKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "causal": (_long_causal, "causal"),
    "triangle": (lambda x: _long_square(x).tril(), "causal"),
    "additive": (lambda x: torch.full((LONG, LONG), float("-inf"), device=x.device).triu(1), "causal"),
    "all": (_long_square, "all"),
    "window": (lambda x: _long_square(x).tril() & ~_long_square(x).tril(-298), ""),
    "odd row": (lambda x: _long_causal(x) & ~_long_square(x).tril(-LONG + 1), ""),
    "from data": (lambda x: _long_causal(x) & (x[:, :1, 0] < 100.0).unsqueeze(1).unsqueeze(1), ""),
    "not by rows": (lambda x: _long_square(x).tril().flip(0).flip(0), ""),
}


@pytest.mark.parametrize("name", LONG_MASKS)
def test_masks_too_large_to_compute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known by a sample of their rows, first and last among them, or left as they are."""
    for module in (constants, rows):
        monkeypatch.setattr(module, "MAX_ELEMENTS", LONG * LONG - 1)
    mask, kind = LONG_MASKS[name]
    model = _Attention(mask)
    graph = trace(model, (torch.zeros(2, LONG, 4),))
    op = next(op for c in graph.classes for op in c.ops if "attention" in op.target)
    assert (len(op.operands) == 3) == bool(kind)
    assert not kind or op.args[5] is (kind == "causal")


def test_indexing_by_all_positions_is_a_view() -> None:
    """A padding mask read position by position is a view; read in another order it stays an index."""

    def padding(order: Callable[[Tensor], Tensor]) -> nn.Module:
        class Padded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x: Tensor, keep: Tensor) -> Tensor:
                samples = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1, 1)
                mask = keep[samples, order(torch.arange(SEQ, device=x.device)).view(1, 1, 1, -1)]
                q = self.linear(x).unsqueeze(1)
                return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum()

        return Padded()

    for order, kept in ((lambda at: at, 0), (lambda at: SEQ - 1 - at, 1)):
        model = padding(order)
        inputs = {"x": torch.randn(5, SEQ, 4), "keep": torch.rand(5, SEQ) > 0.3}
        graph = trace(model, inputs)
        assert graph.separable == (not kept)
        assert sum("index" in op.target for c in graph.classes for op in c.ops) == kept
        torch.testing.assert_close(run_graph(graph, model, inputs, 5)[graph.loss or ""], model(**inputs))
