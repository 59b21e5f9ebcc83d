"""The operator `autopar::relayout` on real processes: dtypes, strides, checkpoints, generated code, dispatch modes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autopar.graph import BROADCAST, PARTIAL, REPLICATE, Extent, Layout, TensorSpec, layout_text
from autopar.shard import torch_private
from autopar.shard.collectives import TextMove, relayout
from autopar.shard.cuts import Spot, encode_moves
from autopar.shard.program import Move
from autopar.shard.relayout import gradient_layout, held_layout, plan_moves
from tests.pool import Pool
from tests.shard.interpreter import Mesh

SHAPE, UNEVEN = (8, 4, 4), (9, 7, 5)
PLACEMENTS = (0, 1, 2, REPLICATE, PARTIAL, BROADCAST)


def encoded(mesh: Mesh, source: Layout, target: Layout, shape: tuple[int, ...] = SHAPE) -> tuple[list[str], list[str]]:
    moves = plan_moves(source, target)
    starts = (moves.forward, held_layout(source)), (moves.backward, gradient_layout(target))
    value, name = tensor(shape), mesh.names.__getitem__
    return tuple(encode_moves(m, start, value, 1, mesh.spot, name) for m, start in starts)  # type: ignore[return-value]


def tensor(shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(tuple(Extent(0, n) for n in shape), "float64")


def random_pairs(axes: int, count: int) -> list[tuple[Layout, Layout]]:
    """Random layouts of a value of three dims; a fixed seed, as all ranks must draw the same."""
    rng = random.Random(0)

    def layout() -> Layout:
        return tuple(rng.choice(PLACEMENTS) for _ in range(axes))

    return [(layout(), layout()) for _ in range(count)]


def wrong_changes(sizes: tuple[int, ...], dtype_name: str, strided: bool, shape: tuple[int, ...]) -> list[str]:
    """Changes of layout whose value or gradient comes out wrong."""
    mesh, dtype, wrong = Mesh(sizes), getattr(torch, dtype_name), []
    whole, gradient = (torch.randint(-4, 5, shape).to(dtype) * 4 for _ in range(2))
    for source, target in random_pairs(len(sizes), 60):
        x = mesh.shard(whole, held_layout(source))
        given = mesh.shard(gradient, gradient_layout(target))
        if strided:
            x, given = (t.mT.contiguous().mT for t in (x, given))
        x.requires_grad_()
        y = relayout(x, *encoded(mesh, source, target, shape))
        torch.autograd.backward(y, given)
        right = mesh.whole(y.detach(), held_layout(target)).equal(whole)
        assert x.grad is not None
        if not right or not mesh.whole(x.grad, gradient_layout(source)).equal(gradient):
            wrong.append(f"{layout_text(source)} -> {layout_text(target)}")
    return wrong


@pytest.mark.parametrize(
    ("sizes", "dtype", "strided", "shape"),
    [
        ((4,), "float64", True, SHAPE),
        ((2, 2), "float64", False, SHAPE),
        ((2, 2), "float32", True, SHAPE),
        ((2, 2), "bfloat16", False, SHAPE),
        ((4,), "float64", True, UNEVEN),
        ((2, 2), "float64", False, UNEVEN),
        ((2, 2), "float64", False, (1, 2, 3)),
    ],
)
def test_layout_changes(pool: Pool, sizes: tuple[int, ...], dtype: str, strided: bool, shape: tuple[int, ...]) -> None:
    """Value and gradient are right, bit for bit (small integers), for random layouts, dtypes and strides.

    Dims that don't divide give unequal shards, and too short ones shards of nothing.
    """
    assert pool.run(4, wrong_changes, sizes, dtype, strided, shape) == [[]] * 4


class Counter(TorchDispatchMode):
    """Counts calls of the operator."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.autopar.relayout.default
        return func(*args, **(kwargs or {}))


def column_row(mesh: Mesh) -> fx.GraphModule:
    """A column-parallel and a row-parallel product as generated code."""
    enter, leave = encoded(mesh, (REPLICATE,), (BROADCAST,)), encoded(mesh, (PARTIAL,), (REPLICATE,))
    graph = fx.Graph()
    x, up, down = (graph.placeholder(n) for n in ("x", "up", "down"))
    entered = graph.call_function(relayout, (x, *enter))
    hidden = graph.call_function(torch.relu, (graph.call_function(torch.matmul, (entered, up)),))
    graph.output(graph.call_function(relayout, (graph.call_function(torch.matmul, (hidden, down)), *leave)))
    return fx.GraphModule(nn.Module(), graph)


def in_checkpoint() -> tuple[float, int, int]:
    """Largest gradient difference with recomputation, and calls of the operator without and with it."""
    mesh = Mesh((4,))
    code = column_row(mesh)
    values = [torch.randn(shape, dtype=torch.float64) for shape in ((3, 8), (8, 8), (8, 8))]
    local = [values[0], mesh.shard(values[1], (1,)), mesh.shard(values[2], (0,))]
    grads, counts = [], []
    for run in (code, lambda *a: checkpoint(code, *a, use_reentrant=False)):
        leaves = [t.clone().requires_grad_() for t in local]
        counter = Counter()  # type: ignore[no-untyped-call]
        with counter:
            torch.autograd.backward(run(*leaves).square().sum())  # type: ignore[no-untyped-call]
        grads.append([t.grad for t in leaves if t.grad is not None])
        counts.append(counter.count)
    truth = [t.clone().requires_grad_() for t in values]
    x, up, down = torch.autograd.grad((torch.relu(truth[0] @ truth[1]) @ truth[2]).square().sum(), truth)
    wanted = [x, mesh.shard(up, (1,)), mesh.shard(down, (0,))]
    worst = max(float((g - w).abs().max()) for found in grads for g, w in zip(found, wanted, strict=True))
    return worst, counts[0], counts[1]


def test_checkpoint_and_generated_code(pool: Pool) -> None:
    """Generated code runs; one collective forward, one backward; recomputation stops before a last one."""
    for worst, plain, recomputed in pool.run(4, in_checkpoint):
        assert worst < 1e-10
        assert (plain, recomputed) == (2, 2)


def test_shapes_without_processes() -> None:
    """On meta tensors the operator has the right shapes, with no process group at all."""
    x = torch.empty(SHAPE, device="meta")

    def shape(*moves: Move) -> tuple[int, ...]:
        lies = tuple(m.dim if m.kind in ("all_gather", "all_to_all") else REPLICATE for m in moves[:1] * 2)
        whole = tensor(tuple(n * (2 if d in lies else 1) for d, n in enumerate(SHAPE)))
        return tuple(relayout(x, encode_moves(moves, lies, whole, 1, Spot((2, 2)), lambda _: "g"), ()).shape)

    assert shape(Move("all_gather", (0,), 1)) == (8, 8, 4)
    assert shape(Move("slice", (0, 1), 0)) == (2, 4, 4)
    assert shape(Move("all_to_all", (1,), 0, 2)) == (16, 4, 2)
    assert shape(Move("all_reduce", (0,)), Move("reduce_scatter", (1,), 2)) == (8, 4, 2)


def test_nothing_to_do_copies_nothing() -> None:
    """Without moves the tensor itself comes back; with gradient moves alone a view of it."""
    x = torch.ones(3, requires_grad=True)
    assert relayout(x, (), ()) is x
    assert relayout(x, (), ("divide -1 -1 2 g",)).data_ptr() == x.data_ptr()
    (gradient,) = torch.autograd.grad(relayout(x, (), ("divide -1 -1 2 g",)).sum(), x)
    assert gradient.tolist() == [0.5] * 3


def test_text_of_moves() -> None:
    """The text of a move reads back, with the lengths of unequal parts; group names may contain anything."""

    def read(shape: tuple[int, ...]) -> TextMove:
        moves = (Move("all_to_all", (0, 1), 2, 0),)
        (text,) = encode_moves(moves, (2, 2), tensor(shape), 1, Spot((2, 3)), lambda axes: f"a b {axes}")
        return TextMove.parse(text)

    assert read((6, 1, 12)) == TextMove("all_to_all", 2, 0, 6, "a b (0, 1)")
    assert read((6, 1, 8)) == TextMove("all_to_all", 2, 0, 6, "a b (0, 1)", (2, 2, 0, 2, 2, 0))
    assert read((7, 1, 8)) == TextMove("all_to_all", 2, 0, 6, "a b (0, 1)", (2, 2, 0, 2, 2, 0), (2, 2, 0, 1, 1, 1))


def group_by_name(names: tuple[str, ...]) -> list[bool]:
    """Whether groups resolve by name to themselves, and with the right place."""
    mesh = Mesh((2, 2))
    return [torch_private.place_in(mesh.names[0,]) == mesh.place[0], torch_private.place_in("") == 0, *map(bool, names)]


def test_private_names_exist(pool: Pool) -> None:
    """The private names of torch that are used exist and do what is relied on."""
    assert pool.run(4, group_by_name, ("x",)) == [[True] * 3] * 4
