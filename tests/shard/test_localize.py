"""Local calls: sizes, keys and what kernels are told."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.graph import REPLICATE, Extent, LayerClass, Operand, Ref, TensorSpec
from autopar.plan import LayerStrategy
from autopar.shard.cuts import Recut, recuts
from autopar.shard.localize import CallInfo, LocalCall, Share, call_info, local_call, op_key
from autopar.shard.lower import lower
from autopar.shard.program import Call, Program
from tests.shard.interpreter import make_op
from tests.shard.transformer import B, spec


def single(target: str, *args: object, factors: tuple[str, ...], result: TensorSpec, **specs: TensorSpec) -> Program:
    """One op on its operands, over axes of 2 ranks."""
    op = make_op("y", target, *args)
    values = specs | {"y": result}
    layer = LayerClass(tuple(specs), (), (), (op,), ("y",), values)
    whole = (REPLICATE,) * len(factors)
    strategy = LayerStrategy(whole, whole, {"y": factors}, {})
    return lower(layer, strategy, (2,) * len(factors), values["x"], result, main_input="", main_output="")


def the_call(program: Program) -> Call:
    return next(s for s in program.steps if isinstance(s, Call))


def localised(program: Program, batch: int) -> LocalCall:
    return local_call(the_call(program), program, batch)


@pytest.mark.parametrize(
    ("target", "args", "local_args", "factors"),
    [
        ("aten.view.default", ((B, 4, 2, 4),), ((3, 4, 2, 4),), ("d0",)),
        ("aten.view.default", ((B, 4, 2, 4),), ((6, 4, 1, 4),), ("d2",)),
        ("aten.reshape.default", ((B, 4, 2, 4),), ((3, 4, 2, 4),), ("d0",)),
        ("aten.unflatten.int", (2, (2, 4)), (2, (1, 4)), ("d2",)),
        ("aten.unflatten.int", (-1, (2, 4)), (-1, (1, 4)), ("d2",)),
    ],
)
def test_sizes_are_those_of_the_shard(
    target: str, args: tuple[object, ...], local_args: tuple[object, ...], factors: tuple[str, ...]
) -> None:
    """At 6 samples and two ranks, the sizes a view is given are those of its local result; views become reshapes."""
    program = single(target, "x", *args, factors=factors, result=spec(B, 4, 2, 4), x=spec(B, 4, 8))
    found = localised(program, 6)
    assert found.args == (Ref(the_call(program).operands[0]), *local_args)
    assert found.target == target.replace("view", "reshape")


def test_other_extents_are_those_of_the_whole_microbatch() -> None:
    """A number that depends on the batch but is no size of a shard is evaluated at the global microbatch."""
    program = single("aten.mul.Tensor", "x", Extent(2, 1), factors=("d0",), result=spec(B, 4), x=spec(B, 4))
    assert localised(program, 6).args[1] == 13


def test_key_has_local_operands_and_the_names_read() -> None:
    """An op key holds every operand's local shape, dtype and want of a gradient, in place."""
    program = single(
        "aten.linear.default", "x", "w", factors=("d0", "n"), result=spec(B, 4, 6), x=spec(B, 4, 8), w=spec(6, 8)
    )
    key = op_key(the_call(program), program, 4)
    assert key.args == (Operand((2, 4, 8), "float64", True), Operand((3, 8), "float64", True))


def test_uneven_shards_have_sizes_of_their_own() -> None:
    """Of 5 samples over 2 x 2 ranks: 2, 1, 1 and 1; flattened rows are cut between samples, heads whole."""
    program = single("aten.view.default", "x", (Extent(4), 8), factors=("d0", "d0"), result=spec(Extent(4), 8),
                     x=spec(B, 4, 8))  # fmt: skip
    found = [local_call(the_call(program), program, 5, place).args[1] for place in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert found == [(8, 8), (4, 8), (4, 8), (4, 8)]
    program = single("aten.view.default", "x", (B, 3, 4), factors=("d1",), result=spec(B, 3, 4), x=spec(B, 12))
    assert [local_call(the_call(program), program, 5, (i,)).args[1] for i in (0, 1)] == [(5, 2, 4), (5, 1, 4)]
    assert recuts(the_call(program), program, 5) == [Recut(0, 1, (0,), (6, 6), (8, 4))]


def test_too_few_samples_are_refused() -> None:
    """Rows of one sample on two ranks can't be views of samples that only one of them has."""
    program = single("aten.view.default", "x", (Extent(4), 8), factors=("d0",), result=spec(Extent(4), 8),
                     x=spec(B, 4, 8))  # fmt: skip
    with pytest.raises(PlanError, match=r"y .aten.view.default.: 1 samples can't be dealt over 2 ranks"):
        recuts(the_call(program), program, 1)


def test_call_info_is_plain_and_names_only_groups_in_use() -> None:
    """A kernel learns its shares; groups are asked for only where it communicates or needs its place."""
    asked = []

    def name(axes: tuple[int, ...]) -> str:
        asked.append(axes)
        return f"g{axes}"

    rows, labels = spec(Extent(4), 8), spec(Extent(4), dtype="int64", grad=False)
    program = single(
        "aten.cross_entropy_loss.default", "x", "t", factors=("n", "v", "v"), result=spec(), x=rows, t=labels
    )
    info = call_info(the_call(program), program, 2, name)
    assert info == CallInfo(
        "aten.cross_entropy_loss.default",
        Share(4, "g(1, 2)", 0, 2),
        "g(0,)",
        2.0,
        (8, 8),
        (Share(2, "", 0, 4), Share(4, "", 0, 2)),
        0,
        2,
        "y",
    )
    assert asked == [(1, 2), (0,)]
    program = single("aten.mean.dim", "x", (1,), factors=("d1",), result=spec(B), x=spec(B, 4))
    assert call_info(the_call(program), program, 2, name).multiple == 2
    assert len(asked) == 2
