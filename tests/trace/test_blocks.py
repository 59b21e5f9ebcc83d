"""Which blocks are captured once: those that compute the same thing, whatever their attributes say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
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


class _Numbered(_Block):
    """Computes with its number, in ways that don't show in what `forward` names."""

    def __init__(self, index: int, scale: float, read: Callable[[_Numbered], int]) -> None:
        super().__init__(index, scale)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.read(self))


@pytest.mark.parametrize(
    "read",
    [lambda m: m.index, lambda m: vars(m)["index"], lambda m: getattr(m, "index", 0), lambda m: m.linear.number],
    ids=["attribute", "all of them", "with a default", "of a submodule"],
)
def test_an_index_that_is_read_is_a_difference(read: Callable[[_Numbered], int]) -> None:
    """Blocks that compute with an attribute in which they differ are of classes of their own, however they read it."""
    blocks = [_Numbered(i // 2, 0.5, read) for i in range(4)]
    for block in blocks:
        block.linear.number = block.index  # type: ignore[assignment]
    first, second, third, fourth = _classes(_traced(*blocks))
    assert first == second != third == fourth


class _Told(_Chain):
    """Tells each block something right before it runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            block.scale = 0.5 + i % 2  # type: ignore[assignment]
            x = block(x)
        return x.pow(2).mean()


def test_what_a_block_is_told_in_time() -> None:
    """An attribute that the parent sets before each call makes blocks differ as one that is set beforehand."""
    model = _Told(*(_Block(i, 0.0) for i in range(4))).double()
    graph = trace(model, (torch.zeros(2, WIDTH, dtype=torch.float64),))
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    assert largest_difference(graph, model, {"x": x}, model(x), 3) < 1e-12
    assert len(set(_classes(graph))) == 2


_ASIDE: list[Tensor] = []


class _Leaving(_Block):
    """Puts a term of the loss where `leave` says."""

    aside: ClassVar[list[Tensor]] = []

    def __init__(self, leave: Callable[[nn.Module, Any, Tensor], object]) -> None:
        super().__init__(0, 0.5)
        self.leave = leave

    def forward(self, x: Tensor, found: Any = None) -> Tensor:
        self.leave(self, found, self.linear(x).pow(2).mean())
        return super().forward(x)


class _Collecting(_Chain):
    def forward(self, x: Tensor) -> Tensor:
        terms: list[Tensor] = []
        _ASIDE.clear()
        _Leaving.aside.clear()
        for block in self.blocks:
            x = block(x, terms if self.own is None else self.own(terms))
        terms += [term for block in self.blocks if isinstance(term := getattr(block, "term", None), Tensor)]
        terms += [*_ASIDE, *_Leaving.aside]
        return x.pow(2).mean() + torch.stack(terms).sum()

    own: Callable[[list[Tensor]], object] | None = None


@pytest.mark.parametrize(
    ("leave", "own"),
    [
        (lambda block, _, term: setattr(block, "term", term), None),
        (lambda _, found, term: found.append(term), None),
        (lambda _, found, term: found.terms.append(term), lambda terms: SimpleNamespace(terms=terms)),
        (lambda block, _, term: type(block).aside.append(term), None),
        (lambda _block, _, term: _ASIDE.append(term), None),
    ],
    ids=["on the module", "in a list", "in an object", "on the class", "in the file"],
)
def test_what_blocks_leave_elsewhere(
    leave: Callable[[nn.Module, Any, Tensor], object], own: Callable[[list[Tensor]], object] | None
) -> None:
    """Terms of a loss that blocks put aside, as experts do, count once for each block."""
    torch.manual_seed(0)
    model = _Collecting(*(_Leaving(leave) for _ in range(3))).double()
    model.own = own
    graph = trace(model, (torch.zeros(2, WIDTH, dtype=torch.float64),))
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    assert largest_difference(graph, model, {"x": x}, model(x), 3) < 1e-12


class _Counting(_Block):
    """Every other call counts twice, by a number on the class."""

    calls: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        _Counting.calls += 1
        return super().forward(x) * (1 + _Counting.calls % 2)


class _FromTheStart(_Chain):
    def forward(self, x: Tensor) -> Tensor:
        _Counting.calls = 0
        return super().forward(x)


def test_a_number_on_the_class() -> None:
    """Blocks that go by what earlier ones left on their class do other things where it says so."""
    torch.manual_seed(0)
    model = _FromTheStart(*(_Counting(i, 0.5) for i in range(4))).double()
    graph = trace(model, (torch.zeros(2, WIDTH, dtype=torch.float64),))
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    assert largest_difference(graph, model, {"x": x}, model(x), 3) < 1e-12


class Crossed(nn.Module):
    """Two lists of equal blocks, of which the second one runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early = (
            nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for late, early in zip(self.late, self.early, strict=True):
            x = late(early(x)) + x
        return x.pow(2).mean()


def test_blocks_in_another_order_than_they_are_kept() -> None:
    """Of equal blocks the first to run is traced, wherever it stands; loss and gradients are the module's."""
    model = Crossed().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    graph = trace(model, (x,))
    assert largest_difference(graph, model, {"x": x}, model(x), 3) < 1e-12
