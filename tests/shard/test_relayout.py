"""Paths between layouts, run on simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.graph import BROADCAST, PARTIAL, REPLICATE, Layout, layout_text, parse_layout
from autopar.shard.program import Move
from autopar.shard.relayout import LOCAL_MOVES, after, find_path, gradient_layout, held_layout, plan_moves
from tests.examples import examples
from tests.shard.simulated import Shards, distribute, mistakes, run_move

PLACEMENTS = st.sampled_from([0, 1, 2, REPLICATE, PARTIAL, BROADCAST])


@st.composite
def changes(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Layout]:
    """A mesh and two layouts on it."""
    axes = draw(st.integers(1, 4))
    sizes = tuple(draw(st.sampled_from([2, 2, 3])) for _ in range(axes))
    first, second = (tuple(draw(PLACEMENTS) for _ in range(axes)) for _ in range(2))
    return sizes, first, second


def moved(moves: tuple[Move, ...], shards: Shards, sizes: tuple[int, ...]) -> Shards:
    for move in moves:
        shards = run_move(move, shards, sizes)
    return shards


@examples(400)
@given(changes(), st.tuples(*[st.integers(1, 24)] * 3), st.integers(0, 1 << 30))
def test_moves_are_right_on_simulated_ranks(
    change: tuple[tuple[int, ...], Layout, Layout], lengths: tuple[int, ...], seed: int
) -> None:
    """Forward moves give the target layout of the value, backward moves the source's gradient layout.

    Dims of any length: what doesn't divide lies in unequal parts, some of them empty.
    """
    sizes, source, target = change
    moves = plan_moves(source, target)
    rng = np.random.default_rng(seed)
    whole = rng.integers(-9, 9, lengths).astype(float)
    start = distribute(whole, held_layout(source), sizes, rng)
    assert not mistakes(moved(moves.forward, start, sizes), whole, held_layout(target), sizes)
    gradient = distribute(whole, gradient_layout(target), sizes, rng)
    assert not mistakes(moved(moves.backward, gradient, sizes), whole, gradient_layout(source), sizes)


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        ("R", "B", "", "all_reduce"),
        ("B", "R", "", "divide"),
        ("S0", "R", "all_gather", "slice"),
        ("S0", "B", "all_gather", "reduce_scatter"),
        ("P", "R", "all_reduce", ""),
        ("P", "B", "all_reduce", "all_reduce"),
        ("P", "S1", "reduce_scatter", "all_gather"),
        ("R", "S1", "slice", "all_gather"),
        ("B", "S1", "slice", "pad"),
        ("R", "P", "divide", ""),
        ("B", "P", "divide", "divide"),
        ("S0", "P", "pad", "slice"),
        ("S0", "S1", "all_to_all", "all_to_all"),
        ("P P", "R R", "all_reduce", ""),
        ("S0 S0", "R R", "all_gather", "slice"),
        ("S0 S0", "B B", "all_gather", "reduce_scatter"),
        ("S0 S0", "S1 S1", "all_to_all", "all_to_all"),
        ("P P", "S1 S1", "reduce_scatter", "all_gather"),
        ("S0 R", "R S0", "all_gather slice", "all_gather slice"),
        ("S0 S0", "R S0", "all_gather slice", "all_gather slice"),
        ("S0 P", "S0 R", "all_reduce", ""),
        ("P S0", "S0 R", "all_reduce all_gather slice", "all_gather slice"),
    ],
)
def test_table(source: str, target: str, forward: str, backward: str) -> None:
    """Each row of the table in docs/design.md, and axes that move alike in one collective."""
    moves = plan_moves(parse_layout(source), parse_layout(target))
    assert " ".join(m.kind for m in moves.forward) == forward
    assert " ".join(m.kind for m in moves.backward) == backward


def test_order_of_nested_splits() -> None:
    """An outer axis can't simply be sliced where an inner one splits the dim already."""
    assert find_path((REPLICATE, 0), (0, 0)) == (Move("all_gather", (1,), 0), Move("slice", (0, 1), 0))
    assert find_path((0, REPLICATE), (0, 0)) == (Move("slice", (1,), 0),)


def traffic(layout: Layout, move: Move) -> float:
    """Bytes a rank sends on axes of 2 ranks, the whole tensor being 1; an all-reduce sends everything twice."""
    if move.kind in LOCAL_MOVES:
        return 0.0
    full = max(0.5 ** sum(p >= 0 for p in lies) for lies in (layout, after(layout, move)))
    return (1 - 0.5 ** len(move.axes)) * full * (2 if move.kind == "all_reduce" else 1)


def legal_moves(layout: Layout, target: Layout) -> Iterator[Move]:
    """All elementary moves of axes that lie alike, no axis going to a dim that is not its target's."""
    axes = range(len(layout))
    for group in (c for n in axes for c in combinations(axes, n + 1) if len({layout[a] for a in c}) == 1):
        here = layout[group[0]]
        if here >= 0 and tuple(a for a in axes if layout[a] == here)[-len(group) :] != group:
            continue  # not the innermost
        yield from {REPLICATE: [Move("divide", group)], PARTIAL: [Move("all_reduce", group)]}.get(
            here, [Move("all_gather", group, here)]
        )
        for dim in {target[a] for a in group} - {here, REPLICATE, PARTIAL}:
            if {target[a] for a in group} == {dim} and not any(layout[a] == dim and a > group[0] for a in axes):
                kind = {REPLICATE: "slice", PARTIAL: "reduce_scatter"}.get(here)
                yield Move(kind, group, dim) if kind else Move("all_to_all", group, here, dim)  # type: ignore[arg-type]


def least_traffic(source: Layout, target: Layout) -> float:
    """Of all paths of legal moves, the least bytes (Bellman-Ford over layouts)."""
    best, changed = {source: 0.0}, True
    while changed:
        changed = False
        for layout, sent in list(best.items()):
            for move in legal_moves(layout, target):
                then, total = after(layout, move), sent + traffic(layout, move)
                if total < best.get(then, float("inf")) - 1e-12:
                    best[then], changed = total, True
    return best[target]


def test_paths_send_the_least_bytes_on_two_axes() -> None:
    """On two axes every path to a split or whole layout sends as little as the best that exhaustive search finds."""
    for source in product((0, 1, REPLICATE, PARTIAL), repeat=2):
        for target in product((0, 1, REPLICATE), repeat=2):
            layout, sent = source, 0.0
            for move in find_path(source, target):
                sent += traffic(layout, move)
                layout = after(layout, move)
            assert sent <= least_traffic(source, target) + 1e-9, (source, target)


@examples(300)
@given(changes())
def test_paths_are_short_and_deterministic(change: tuple[tuple[int, ...], Layout, Layout]) -> None:
    """No more than two moves an axis, none at all between equal layouts, and text round-trips."""
    _, source, target = change
    assert parse_layout(layout_text(source)) == source
    path = find_path(held_layout(source), gradient_layout(target))
    assert len(path) <= 2 * len(source)
    assert find_path(held_layout(source), held_layout(source)) == ()
