"""What the rules say: notation, layouts of the design's table, legal assignments, kernels, registration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar.errors import ConfigError
from autopar.graph import Extent, LayerClass, Op, Ref, TensorSpec, layout_text
from autopar.shard.notation import parse
from autopar.shard.program import Call, Program
from autopar.shard.rules import OpRule, assignments, inner_collectives, layouts_of, register, rule_for
from autopar.shard.table import RULES

B = Extent(1)
Shape = tuple[Extent | int, ...]


def _spec(*shape: Extent | int, dtype: str = "float32", requires_grad: bool = True) -> TensorSpec:
    return TensorSpec(tuple(Extent(0, n) if isinstance(n, int) else n for n in shape), dtype, requires_grad)


def _layer(target: str, operands: list[TensorSpec], result: TensorSpec, *more: object) -> tuple[Op, LayerClass]:
    names = tuple(f"x{i}" for i in range(len(operands)))
    op = Op("op", target, (*map(Ref, names), *more), (), ("y",), (None,))  # type: ignore[arg-type]
    return op, LayerClass(names, (), (), (op,), ("y",), dict(zip(names, operands, strict=True)) | {"y": result})


def _rule(op: Op, layer: LayerClass) -> OpRule:
    rule = rule_for(op, layer)
    assert rule is not None
    return rule


def _layouts(op: Op, layer: LayerClass, *factors: str) -> list[str]:
    operands, results = layouts_of(_rule(op, layer), op, layer, factors)
    return [layout_text(layout) for layout in (*operands, *results)]


LINEAR = _layer("aten.linear.default", [_spec(B, 8, 32), _spec(12, 32), _spec(12)], _spec(B, 8, 12))


@pytest.mark.parametrize(
    ("factors", "layouts"),
    [
        (("",), ["R", "R", "R", "R"]),
        (("d0",), ["S0", "B", "B", "S0"]),
        (("n",), ["B", "S0", "S0", "S2"]),
        (("k",), ["S2", "S1", "P", "P"]),
        (("d0", "n"), ["S0 B", "B S0", "B S0", "S0 S2"]),
        (("n", "k"), ["B S2", "S0 S1", "S0 P", "S2 P"]),
        (("n", "n"), ["B B", "S0 S0", "S0 S0", "S2 S2"]),
    ],
)
def test_layouts_of_linear(factors: tuple[str, ...], layouts: list[str]) -> None:
    """Data, column and row parallelism and their products, the bias of a row-parallel layer being a share of a sum."""
    assert _layouts(*LINEAR, *factors) == layouts


def test_operands_without_gradient_are_replicated_not_broadcast() -> None:
    """Where no gradient flows there is none to sum, so R stands for B."""
    frozen = _layer("aten.mm.default", [_spec(B, 8), _spec(8, 4, requires_grad=False)], _spec(B, 4))
    assert _layouts(*frozen, "m") == ["S0", "R", "S0"]


def test_repeated_operand_is_listed_twice() -> None:
    """`x * x` has two operands, as `Op.operands` says."""
    op = Op("op", "aten.mul.Tensor", (Ref("x"), Ref("x")), (), ("y",), (None,))
    layer = LayerClass(("x",), (), (), (op,), ("y",), {"x": _spec(B, 4), "y": _spec(B, 4)})
    assert _layouts(op, layer, "d0") == ["S0", "S0", "S0"]


def test_broadcast_dim_is_not_split() -> None:
    """A dim of length 1 beside a longer one makes its operand broadcast on the axis that splits the longer."""
    layer = _layer("aten.add.Tensor", [_spec(B, 6, 8), _spec(6, 1)], _spec(B, 6, 8))
    assert _layouts(*layer, "d2") == ["S2", "B", "S2"]
    assert _layouts(*layer, "d1") == ["S1", "S0", "S1"]


def test_expand_splits_what_only_the_result_has() -> None:
    """A repeated dim may be split though the operand has it not: the operand is broadcast."""
    layer = _layer("aten.expand.default", [_spec(B, 1, 8)], _spec(B, 4, 8), (B, 4, 8))
    assert _layouts(*layer, "d1") == ["B", "S1"]


def test_partial_sums_pass_linear_ops_only() -> None:
    """A scaled sum is the sum of the scaled; a shifted or squared one is not, and a narrower one loses digits."""
    linear = _layer("aten.mul.Tensor", [_spec(B, 4)], _spec(B, 4), 2.0)
    assert _layouts(*linear, "+") == ["P", "P"]
    two = _layer("aten.add.Tensor", [_spec(B, 4), _spec(4)], _spec(B, 4))
    assert _layouts(*two, "+") == ["P", "P", "P"]
    for target, operands, result, more in (
        ("aten.add.Tensor", [_spec(B, 4)], _spec(B, 4), (1.0,)),
        ("aten.mul.Tensor", [_spec(B, 4), _spec(4)], _spec(B, 4), ()),
        ("aten.pow.Tensor_Scalar", [_spec(B, 4)], _spec(B, 4), (2,)),
        ("aten.to.dtype", [_spec(B, 4)], _spec(B, 4, dtype="bfloat16"), ()),
    ):
        assert "+" not in {f.name for f in _rule(*_layer(target, operands, result, *more)).factors}


def test_grouped_heads_count_what_both_share() -> None:
    """With 12 query heads on 4 key heads an axis can deal out 4 groups, not 12."""
    q, kv = _spec(B, 12, 8, 4), _spec(B, 4, 8, 4)
    op, layer = _layer("aten.scaled_dot_product_attention.default", [q, kv, kv], q, None, 0.0, True)
    rule = _rule(op, layer)
    assert {f.name: f.extent for f in rule.factors} == {"d0": B, "d1": Extent(0, 4), "q": Extent(0, 8)}
    assert ("d1", "d1") in assignments(rule, op, layer, (2, 2), 1)
    assert ("d1", "d1") not in assignments(rule, op, layer, (2, 3), 6)


def test_assignments_leave_no_rank_out() -> None:
    """Every choice that divides or has one for each rank is there, '' first: counted by hand for a batch of 2."""
    op, layer = _layer("aten.mm.default", [_spec(B, 6), _spec(6, 3)], _spec(B, 3))
    assert assignments(_rule(op, layer), op, layer, (2, 3), 2) == (
        ("", ""), ("", "k"), ("", "n"), ("m", ""), ("m", "k"), ("m", "n"), ("k", ""), ("k", "k"), ("k", "n"),
        ("n", ""), ("n", "k"),
    )  # fmt: skip


def test_bools_are_never_summed() -> None:
    """A rule that would leave a bool result partial doesn't offer that factor."""
    op, layer = _layer(
        "aten.mm.default", [_spec(4, 6, dtype="bool"), _spec(6, 2, dtype="bool")], _spec(4, 2, dtype="bool")
    )
    assert ("k",) not in assignments(_rule(op, layer), op, layer, (2,), 1)


def test_kernels() -> None:
    """Splits that need more than the op on shards name the kernel that runs them, and only those splits."""
    table = [_spec(10, 8), _spec(B, 6, dtype="int64", requires_grad=False)]
    embedding = _layer("aten.embedding.default", table, _spec(B, 6, 8))
    assert _layouts(*embedding, "v") == ["S0", "R", "P"]
    rule = _rule(*embedding)
    assert [rule.kernel(f) for f in (("v",), ("d0", "v"), ("d", ""))] == ["embedding_rows", "embedding_rows", ""]

    mean = _rule(*_layer("aten.mean.dim", [_spec(B, 6)], _spec(B, 1), (-1,), True))
    assert (mean.kernel(("d1",)), mean.kernel(("d0",))) == ("mean", "")

    dropout = _rule(*_layer("aten.dropout.default", [_spec(B, 6)], _spec(B, 6), 0.1, True))
    assert dropout.kernel(()) == dropout.kernel(("",)) == dropout.kernel(("d0",)) == "dropout"

    loss = _rule(*_layer("aten.mse_loss.default", [_spec(B, 6), _spec(B, 6)], _spec()))
    assert loss.kernel(("d0", "")) == "mean_loss"


LOSS = _layer(
    "aten.cross_entropy_loss.default",
    [_spec(Extent(6), 10), _spec(Extent(6), dtype="int64", requires_grad=False)],
    _spec(),
)


def test_cross_entropy_layouts() -> None:
    """Split rows leave a partial loss; split classes give the whole loss on every rank."""
    assert _layouts(*LOSS, "n", "v") == ["S0 S1", "S0 R", "P R"]
    assert _rule(*LOSS).kernel(("", "v")) == "cross_entropy"


def test_cross_entropy_communication() -> None:
    """Over classes one number a local row travels, then two, over rows one count: 12 rows a rank here."""
    op, layer = LOSS
    operands, results = layouts_of(_rule(op, layer), op, layer, ("n", "v"))
    layouts = dict(zip(("x0", "x1", "y"), (*operands, *results), strict=True))
    call = Call(op, op.operands, operands, results, ("n", "v"), "cross_entropy")
    program = Program((2, 5), (call,), layer.inputs, (), (), layer.outputs, layouts, layer.values)
    largest, sums = ("all_reduce", (1,), (12,), "float32"), ("all_reduce", (1,), (2, 12), "float32")
    assert inner_collectives(call, program, 4) == (largest, sums, ("all_reduce", (0,), (), "int64"))


@pytest.mark.parametrize(
    ("target", "operands", "more"),
    [
        ("aten.cross_entropy_loss.default", [_spec(B, 10), _spec(B, 10)], ()),
        ("aten.conv2d.default", [_spec(4, 8, 8), _spec(4, 4, 3, 3)], (None, 1, 1)),
        ("aten.instance_norm.default", [_spec(B, 4, 8), *[_spec(4)] * 2], (None, None, Ref("x1"), Ref("x2"), False)),
        ("aten._weight_norm.default", [_spec(6, 4), _spec()], (-1,)),
        ("other.unknown.default", [_spec(B, 10)], ()),
    ],
)
def test_no_rule(target: str, operands: list[TensorSpec], more: tuple[object, ...]) -> None:
    """Unknown ops, and options whose split would be wrong, have no rule and stay replicated."""
    assert rule_for(*_layer(target, operands, operands[0], *more)) is None


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("m k, k n", "exactly one '->'"),
        ("m m -> m", "'m' stands twice"),
        ("m-k -> m", "'m-k' is no dim"),
        ("m -> m | m kernel", "note 'm kernel'"),
    ],
)
def test_faulty_lines_are_refused(line: str, fault: str) -> None:
    """The message shows the line and what is wrong in it."""
    with pytest.raises(ConfigError, match=fault):
        parse(line)


def test_all_lines_of_the_registry_parse() -> None:
    """Every line written down is well formed."""
    for line in RULES.values():
        if isinstance(line, str):
            parse(line)


@pytest.fixture
def registry() -> Iterator[None]:
    """Leaves the registry as it was."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)
    register("aten.mm", str(before["aten.mm"]))


@pytest.mark.usefixtures("registry")
def test_register() -> None:
    """A registered line serves at once, also for an op that was looked up before."""
    op, layer = _layer("mylib.op.default", [_spec(B, 4)], _spec(B, 4))
    assert rule_for(op, layer) is None
    register("mylib::op", "b _ -> b _")
    assert {f.name for f in _rule(op, layer).factors} == {"b"}
    with pytest.raises(ConfigError, match="names no operator"):
        register("mylib", "b -> b")
