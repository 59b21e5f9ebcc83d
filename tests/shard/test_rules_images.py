"""Rules of convolutions, pooling, padding, resizing and recurrent layers, run sharded against whole."""

from __future__ import annotations

import pytest

from tests.shard.trying import Call, assert_sharded_equals_whole, named, reals

MESHES = ((2,), (3,), (2, 2))


def _states(size: int, hidden: int, gates: int) -> list[object]:
    """Weights of a recurrent layer of one direction."""
    return [reals(gates * hidden, size), reals(gates * hidden, hidden), reals(gates * hidden), reals(gates * hidden)]


def _layer(name: str, gates: int, batch_first: bool) -> Call:
    """A recurrent layer of four sequences."""
    state = reals(1, 4, 2)
    states = [state, state.clone()] if name == "lstm" else state
    given = (reals(*((4, 5) if batch_first else (5, 4)), 3), states, _states(3, 2, gates))
    return f"{name}.input", (*given, True, 1, 0.0, True, False, batch_first), {}, "b"


CALLS: list[Call] = [
    ("conv1d", (reals(4, 6, 9), reals(8, 6, 3), reals(8), [2]), {}, "b i o"),
    ("conv2d", (reals(4, 6, 5, 5), reals(8, 6, 3, 3), reals(8)), {}, "b i o"),
    ("conv2d", (reals(4, 6, 5, 5), reals(8, 3, 3, 3), reals(8), [1, 1], [0, 0], [1, 1], 2), {}, "b"),
    ("conv2d.padding", (reals(4, 6, 5, 5), reals(8, 6, 3, 3), None, [1, 1], "same"), {}, "b i o"),
    ("conv3d", (reals(4, 5, 3, 3, 3), reals(5, 5, 2, 2, 2), reals(5)), {}, "b i o"),
    ("conv_transpose1d", (reals(4, 5, 5), reals(5, 5, 3), reals(5), [2]), {}, "b i o"),
    ("conv_transpose2d.input", (reals(4, 6, 5, 5), reals(6, 8, 3, 3), reals(8), [2, 2]), {}, "b i o"),
    ("conv_transpose3d.input", (reals(4, 5, 2, 2, 2), reals(5, 5, 2, 2, 2), reals(5)), {}, "b i o"),
    *((f"max_pool{n}d", (reals(4, 6, *[4] * n), [2] * n), {}, "d0 d1") for n in (1, 2, 3)),
    *((f"max_pool{n}d_with_indices", (reals(4, 6, *[4] * n), [2] * n), {}, "d0 d1") for n in (1, 2, 3)),
    *((f"avg_pool{n}d", (reals(4, 6, *[4] * n), [2] * n), {}, "d0 d1") for n in (1, 2, 3)),
    *((f"adaptive_max_pool{n}d", (reals(4, 6, *[4] * n), [2] * n), {}, "d0 d1") for n in (1, 2, 3)),
    *((f"adaptive_avg_pool{n}d", (reals(4, 6, *[4] * n), [1] * n), {}, "d0 d1") for n in (1, 2, 3)),
    *((f"upsample_nearest{n}d.vec", (reals(4, 6, *[2] * n), [4] * n, None), {}, "d0 d1") for n in (1, 2, 3)),
    *((f"_upsample_nearest_exact{n}d.vec", (reals(4, 6, *[2] * n), [4] * n, None), {}, "d0 d1") for n in (1, 2, 3)),
    *((f"_upsample_{way}2d_aa.vec", (reals(4, 6, 4, 4), [3, 3], False, None), {}, "d0 d1")
      for way in ("bilinear", "bicubic")),
    ("upsample_linear1d.vec", (reals(4, 6, 3), [6], False, None), {}, "d0 d1"),
    ("upsample_bilinear2d.vec", (reals(4, 6, 3, 3), [6, 5], True, None), {}, "d0 d1"),
    ("upsample_bicubic2d.vec", (reals(4, 6, 3, 3), [6, 5], False, None), {}, "d0 d1"),
    ("upsample_trilinear3d.vec", (reals(4, 6, 2, 2, 2), [3, 4, 4], False, None), {}, "d0 d1"),
    *((f"{way}_pad{n}d", (reals(4, 6, *[3] * n), [1, 2] * n), {}, "d0 d1")
      for way in ("reflection", "replication") for n in (1, 2, 3)),
    ("pixel_shuffle", (reals(5, 5, 4, 2, 2), 2), {}, "d0 d1"),
    ("pixel_unshuffle", (reals(5, 5, 2, 2, 2), 2), {}, "d0 d1"),
    ("channel_shuffle", (reals(4, 6, 2, 2), 3), {}, "d0"),
    ("im2col", (reals(4, 3, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]), {}, "b"),
    ("col2im", (reals(5, 12, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), {}, "b"),
    ("grid_sampler", (reals(4, 6, 3, 3), reals(4, 2, 2, 2).tanh(), 0, 0, False), {}, "b c"),
    ("group_norm", (reals(4, 6, 2, 2), 2, reals(6), reals(6)), {}, "b"),
    ("instance_norm", (reals(5, 5, 9), reals(5), reals(5), None, None, True, 0.1, 1e-5, False), {}, "b c"),
    *(_layer(name, gates, first) for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
      for first in (False, True)),
    ("lstm_cell", (reals(6, 3), [reals(6, 2)] * 2, *_states(3, 2, 4)), {}, "b"),
    *((f"{name}_cell", (reals(6, 3), reals(6, 2), *_states(3, 2, gates)), {}, "b")
      for name, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=named(CALLS))
def test_sharded_equals_whole(call: Call) -> None:
    """The expected factors are on offer, and results and gradients are the same under every one of them."""
    assert_sharded_equals_whole(call, MESHES)
