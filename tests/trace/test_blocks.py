"""Which blocks are captured once: those that compute the same thing, whatever their attributes say."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.graph import OpGraph
from autopar.trace import trace
from tests.trace.interpreter import largest_difference

WIDTH = 4


class _Block(nn.Module):
    def __init__(self, index: int, scale: float) -> None:
        super().__init__()
        self.index, self.scale, self.linear = index, scale, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


class _InPlace(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.scale * self.linear.weight.sum()
        return x * 2


class _Shared(_Block):
    """Reads a module that belongs to all blocks."""

    def __init__(self, index: int, scale: float, shared: nn.Module) -> None:
        super().__init__(index, scale)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.shared(x))


class _Chain(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        total = x * 1.5
        for block in self.blocks:
            y = block(x)
            total = total + x
            x = y
        return (x + total).pow(2).mean()


def _traced(*blocks: nn.Module) -> OpGraph:
    """The graph of a chain, proven equal to the chain."""
    torch.manual_seed(0)
    model = _Chain(*blocks).double()
    graph = trace(model, (torch.zeros(2, WIDTH, dtype=torch.float64),))
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    assert largest_difference(graph, model, {"x": x}, model(x), 3) < 1e-12
    return graph


def _classes(graph: OpGraph) -> list[int]:
    return [x.class_index for x in graph.layers if x.name.startswith("blocks.")]


def test_an_index_that_changes_nothing_is_no_difference() -> None:
    """Blocks that differ in an attribute which their computation does not use are one class."""
    assert len(set(_classes(_traced(*(_Block(i, 0.5) for i in range(4)))))) == 1


def test_a_constant_that_matters_is_a_difference() -> None:
    """Blocks that differ in a constant they compute with are of different classes, in the order they stand."""
    first, second, third, fourth = _classes(_traced(*(_Block(i, 0.5 + i % 2) for i in range(4))))
    assert first == third != second == fourth


def test_changing_an_argument_in_place() -> None:
    """Blocks that change their argument are traced each in full: readers outside see the change."""
    graph = _traced(*(_InPlace(i, 0.5) for i in range(3)))
    assert sum(len(kind.ops) for kind in graph.classes) > 3 * 4


def test_a_module_shared_by_all_blocks() -> None:
    """A module that all blocks call keeps its parameters, which every block's layer lists."""
    shared = nn.Linear(WIDTH, WIDTH)
    graph = _traced(*(_Shared(i, 0.5, shared) for i in range(3)))
    blocks = [x for x in graph.layers if x.name.startswith("blocks.")]
    assert len({x.class_index for x in blocks}) == 1
    assert all("blocks.0.shared.weight" in x.params for x in blocks)
