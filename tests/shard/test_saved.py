"""What calls keep for backward, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.graph import Extent, Saved, TensorSpec
from autopar.shard.program import Call
from autopar.shard.saved import inner_saved_bytes, saved_names
from tests.shard.test_localize import single
from tests.shard.transformer import B, spec


def kept(target: str, *args: object, inner: TensorSpec, **given: Any) -> tuple[int, bool]:
    """Bytes kept at 2 samples by an op whose ATen form keeps `inner`, and whether its operands are kept."""
    program = single(target, *args, **given)
    (call,) = (s for s in program.steps if isinstance(s, Call))
    call = replace(call, op=replace(call.op, saved=Saved((), (inner,))))
    return inner_saved_bytes(call, program, 2), saved_names(call) == call.operands


@pytest.mark.parametrize(
    ("factors", "expected"),
    [(("n", "n"), (8 // 4 * 16 * 8, False)), (("n", "v"), (4 * 8, True)), (("v", "v"), (8 * 8, True))],
)
def test_cross_entropy(factors: tuple[str, ...], expected: tuple[int, bool]) -> None:
    """8 rows of 16 classes in fp64. Rows split: a share of the log-softmax; classes split: one number a local row."""
    rows, labels = spec(Extent(4), 16), spec(Extent(4), dtype="int64", grad=False)
    target = "aten.cross_entropy_loss.default"
    assert kept(target, "x", "t", inner=rows, factors=factors, result=spec(), x=rows, t=labels) == expected


def test_dropout_keeps_one_byte_an_element() -> None:
    """The mask of the local shard, whatever ATen's own dropout keeps."""
    x = spec(B, 6)
    found, _ = kept("aten.dropout.default", "x", 0.5, True, inner=x, factors=("d0",), result=x, x=x)
    assert found == 1 * 6
