"""Submodules that can't be taken apart become one operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.graph import Extent, Op, OpGraph, TensorSpec
from autopar.trace import trace
from autopar.trace.opaque.operator import OPAQUE, form_of
from autopar.trace.opaque.trial import learn
from tests.integration.unusual import Experts, Wavering


def _opaque(graph: OpGraph) -> list[Op]:
    return [op for layer in graph.classes for op in layer.ops if op.target == OPAQUE]


class Wrapped(nn.Module):
    """Three blocks with a submodule of the given kind in each."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), kind()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(x + block(x))
        return x.mean()


def test_experts_that_pick_their_tokens() -> None:
    """Samples stay apart in them, so the batch can be split; equal ones are one class; work is that of a sample."""
    graph = trace(Wrapped(Experts), (torch.zeros(2, 4, 16),))
    op = _opaque(graph)[0]
    form = form_of(str(op.args[1]))
    assert graph.separable
    assert form.apart
    assert len({o.args[1] for o in _opaque(graph)}) == 1
    assert op.module == "blocks.0.1"
    # One sample of 4 tokens: each through 2 of the experts (16 x 16, multiply and add), and the gate (16 x 4).
    assert form.flops == pytest.approx(4 * (2 * 16 * 16 * 2 + 16 * 4 * 2))
    assert op.saved.extra[0].shape == (Extent(form.saved_bytes),)


class Once(nn.Module):
    """Experts that stand in no repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(16, 16), Experts()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(self.first(x)).mean()
        return y


@pytest.mark.parametrize("batch", [3, 4, 8])
def test_the_examples_batch_says_nothing_of_other_sizes(batch: int) -> None:
    """A width that the batch of the example inputs divides is no multiple of the batch."""
    graph = trace(Once(), (torch.zeros(batch, 4, 16),))
    (shape,) = [c.values[op.results[0]].shape for c in graph.classes for op in c.ops if op.target == OPAQUE]
    assert shape == (Extent(1), Extent(0, 4), Extent(0, 16))


def test_a_branch_on_a_mean() -> None:
    """All samples decide: the module is one operator that nothing splits, and the note names module and line."""
    graph = trace(Wrapped(Wavering), (torch.zeros(2, 4, 16),))
    op = _opaque(graph)[0]
    assert not form_of(str(op.args[1])).apart
    assert not graph.separable
    (note,) = graph.assumptions
    assert "blocks.0.1" in note
    assert "unusual.py:" in note


class Shared(nn.Module):
    """A branch on a value between uses of one module, which torch then reaches through proxies."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = Wavering(), nn.Linear(16, 16)
        self.same = self.linear

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.same(self.inner(self.linear(x))).mean()
        return y


def test_a_branch_in_a_model_that_shares_modules() -> None:
    """The module is found, and tried, although modules are proxies while they are traced."""
    graph = trace(Shared(), (torch.zeros(2, 4, 16),))
    assert [op.module for op in _opaque(graph)] == ["inner"]


class ChangesItsData(nn.Module):
    """Clamps its weight behind the back of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-4.0, 4.0)
        y: Tensor = self.linear(x)
        return y


def test_a_module_that_writes_to_data() -> None:
    """A tensor that torch can't follow is named by its module, which becomes one operator."""
    graph = trace(Wrapped(ChangesItsData), (torch.zeros(2, 4, 16),))
    assert {op.module.rpartition(".")[2] for op in _opaque(graph)} == {"1"}


class Converting(nn.Module):
    """Converts a module of its own in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.linear.to(torch.float32)
        y: Tensor = self.linear(x)
        return y


def test_a_module_that_converts_another() -> None:
    """It is the one that becomes an operator, not all of the class of what it converts."""
    graph = trace(Wrapped(Converting), (torch.zeros(2, 4, 16),))
    assert {op.module.rpartition(".")[2] for op in _opaque(graph)} == {"1"}


class Whole(nn.Module):
    """A model whose own forward branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).sum()
        return y if y > 0 else -y


def test_a_model_that_is_nothing_but_a_branch() -> None:
    """There is nothing to plan: the error names the line."""
    with pytest.raises(TraceError, match=r"test_opaque\.py:\d+: can't be traced"):
        trace(Whole(), (torch.zeros(2, 4),))


class Storehouse(nn.Module):
    """Sixteen large matrices, of which each sample's first value picks one; refuses to hold them all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 2048, 2080, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.untyped_storage().nbytes() > self.weight.nbytes / 8:
            raise MemoryError("all matrices are held")
        differ = self.weight[0, 0, :16] != self.weight[1, 0, :16]
        rows = [row @ self.weight[int(row[0] > 0) if bool(differ.all()) else 9] for row in x]
        return torch.stack(rows)


def test_large_matrices_are_not_all_held() -> None:
    """What is tried of many matrices takes the memory of some, their values differ, and work is that of those used."""
    spec = TensorSpec((Extent(1), Extent(0, 2048)), "float32", True)
    found = learn(Storehouse(), lambda module, tensors: module(*tensors), (spec,), "float32")
    assert found.apart
    assert found.flops == 2 * 2048 * 2080
    assert found.results[0].shape == (Extent(1), Extent(0, 2080))


class Between(nn.Module):
    """A submodule of the given kind, which takes values and whole numbers, between linear layers."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), kind(), nn.Linear(4, 1)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x), numbers)).mean()  # type: ignore[no-any-return]


class Neighbours(nn.Module):
    """Adds to each node those that edges lead from, leaving out edges from a node to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        edges = edges[:, edges[0] != edges[1]]
        found: Tensor = self.linear(x.index_add(0, edges[1], x[edges[0]]))
        return found


def test_nodes_that_meet_through_numbers_of_other_nodes() -> None:
    """Numbers that are tried show it: alone a node has no neighbours, so that nothing may split the nodes."""
    graph = trace(Between(Neighbours), (torch.zeros(6, 4), torch.zeros(2, 9, dtype=torch.int64)))
    assert not graph.separable
    assert not form_of(str(_opaque(graph)[0].args[1])).apart


class SortedSequences(nn.Module):
    """A recurrent layer over sequences of falling lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def test_lengths_in_falling_order() -> None:
    """Whole numbers that a module takes in falling order only are tried so: samples are seen to stay apart."""
    graph = trace(Between(SortedSequences), (torch.zeros(6, 5, 4), torch.ones(6, dtype=torch.int64)))
    assert form_of(str(_opaque(graph)[0].args[1])).apart
