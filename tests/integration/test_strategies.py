"""Well-known ways of splitting come out of the search where they are the cheapest, and compute what one device does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest

from autopar.graph import BROADCAST, OpGraph
from autopar.plan import PlanRecord
from autopar.report.explain import explain
from autopar.shard.inner import inner_collectives
from autopar.shard.program import Call, Program
from autopar.verify import verify
from tests.integration.strategies import FAST_MEMORY, SLOW_MEMORY, example, moved, planned, programs, traced
from tests.pool import Pool

Programs = dict[str, Program]


def split(program: Program, operator: str) -> list[tuple[str, ...]]:
    """Factors that the mesh axes split in each call of an operator."""
    calls = [step for step in program.steps if isinstance(step, Call)]
    return [call.factors for call in calls if call.op.target.split(".")[1] == operator]


def tensor(layers: Programs) -> None:
    """Columns, then rows: two sums of batch x sequence x width forward and two backward, and nothing else."""
    block, size = layers["blocks.0"], 8 * 48
    assert moved(block, 1) == Counter({("all_reduce", size): 2})
    assert moved(block, 1, forward=False) == Counter({("all_reduce", size): 2})
    assert split(block, "linear") == [("n",)] * 3 + [("k",), ("n",), ("k",)]


def sequence(layers: Programs) -> None:
    """As `tensor`, with the sequence split between blocks: two gathers and two reduce-scatters each way."""
    block, size = layers["blocks.1"], 32 * 48
    assert block.layouts[block.inputs[0]] == block.layouts[block.outputs[0]] == (1,)
    for forward in (True, False):
        assert moved(block, 1, forward) == Counter({("all_gather", size): 2, ("reduce_scatter", size): 2})
    assert split(block, "linear") == [("n",)] * 3 + [("k",), ("n",), ("k",)]


def vocabulary(layers: Programs) -> None:
    """Rows of the table and classes of the loss: what moves is as long as the tokens, never as the vocabulary."""
    embed, head, tokens = layers["embed"], layers["head"], 8
    assert all("v" in factors for factors in (*split(embed, "embedding"), *split(head, "cross_entropy_loss")))
    assert max(size for _, size in [*moved(embed, 1), *moved(head, 1)]) <= tokens * 16
    (loss,) = (s for s in head.steps if isinstance(s, Call) and s.kernel == "cross_entropy")
    assert [prod(shape) for _, _, shape, _ in inner_collectives(loss, head, 1)] == [tokens, 2 * tokens]


def square(layers: Programs) -> None:
    """Both dims of every inner weight: sums over one axis, gathers over the other."""
    inner = [layers[f"layers.{i}"] for i in (1, 2, 3)]
    assert all({*factors} == {"n", "k"} for program in inner for factors in split(program, "linear"))


def experts(layers: Programs) -> None:
    """Samples outside, experts inside: tokens go there and back by all-to-all."""
    program = next(p for p in layers.values() if split(p, "einsum"))
    assert split(program, "einsum") == [("b",), ("e",), ("e",), ("b",)]
    assert moved(program, 4) == Counter({("all_to_all", 4 * 2 * 64 * 16): 2})


def replicas(layers: Programs) -> None:
    """Experts inside one axis, each beside a copy of itself for other samples: its gradient is the sum of both."""
    program = next(p for p in layers.values() if split(p, "einsum"))
    assert split(program, "einsum") == [("b", "e")] * 3 + [("b", "b")]
    assert program.layouts["up"] == (BROADCAST, 0)
    assert moved(program, 4)["all_to_all", 4 * 2 * 64 * 16] == 1


def split_experts(layers: Programs) -> None:
    """Samples, experts, and the inner width of each expert: an axis each, of three."""
    program = next(p for p in layers.values() if split(p, "einsum"))
    assert [set(factors) for factors in split(program, "einsum")[1:3]] == [{"b", "e", "f"}] * 2
    assert program.layouts["up"] == (BROADCAST, 2, 0)


def ulysses(layers: Programs) -> None:
    """The sequence outside attention, heads inside: four all-to-alls."""
    assert moved(layers["blocks.1"], 1) == Counter({("all_to_all", 256 * 16): 4})


def context(layers: Programs) -> None:
    """The sequence everywhere: keys and values are gathered, queries are not."""
    block = layers["blocks.1"]
    assert split(block, "scaled_dot_product_attention") == [("q",)]
    assert moved(block, 1) == Counter({("all_gather", 256 * 16): 2})


def context_and_heads(layers: Programs) -> None:
    """Samples, queries and heads, an axis each; the feed-forward pair in columns and rows beside samples and tokens."""
    for block in (layers["blocks.0"], layers["blocks.1"]):
        assert split(block, "scaled_dot_product_attention") == [("d0", "q", "d1")]
        assert split(block, "linear")[-2:] == [("d0", "d1", "n"), ("d0", "d1", "k")]
        assert moved(block, 2)["all_gather", 2 * 128 * 16] >= 2  # keys and values over the axis of queries


def data_and_square(layers: Programs) -> None:
    """Beside samples both dims of weights: of those that are as many rows as columns apart, on an axis each."""
    for block in (layers["blocks.0"], layers["blocks.1"]):
        factors = split(block, "linear")
        assert all(own[0] == "d0" and set(own[1:]) <= {"n", "k"} for own in factors)
        assert sum(set(own) == {"d0", "n", "k"} for own in factors) >= 4


def data(layers: Programs) -> None:
    """Samples, and nothing that they make, moves."""
    for name, program in layers.items():
        assert sum(moved(program, 4096).values()) == (name == "mse_loss")
    assert [split(p, "linear") for p in layers.values()] == [[("d0",)]] * 4 + [[]]


@dataclass(frozen=True)
class Case:
    """A model on some devices with a batch, and what must be seen in its plan."""

    seen: Callable[[Programs], None]
    model: str
    devices: int
    batch: int
    limit_bytes: int | None = None
    memory_bytes_per_s: float = FAST_MEMORY


SLOW = pytest.mark.slow
CASES: Sequence[Any] = (
    Case(tensor, "wide", 2, 1),
    Case(sequence, "wide, longer", 2, 1, memory_bytes_per_s=SLOW_MEMORY),
    pytest.param(Case(vocabulary, "words", 4, 1, 500_000), marks=SLOW),
    Case(square, "square", 4, 4),
    pytest.param(Case(square, "square", 9, 9), marks=SLOW),
    Case(experts, "experts", 4, 4),
    Case(replicas, "two experts", 4, 4),
    pytest.param(Case(split_experts, "two experts", 8, 2), marks=SLOW),
    pytest.param(Case(context_and_heads, "long, two heads", 8, 2), marks=SLOW),
    pytest.param(Case(data_and_square, "two heads", 8, 2), marks=SLOW),
    Case(ulysses, "long", 4, 1),
    Case(context, "long, one head", 4, 1),
    pytest.param(Case(data, "square", 4, 4096), marks=SLOW),
)


def check(record: PlanRecord, graph: OpGraph, name: str) -> dict[str, Any]:
    """On a rank: verify the plan."""
    return verify(record, *example(name), graph=graph, steps=1).to_json()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.seen.__name__}-{case.devices}")
def test_strategy_is_found_and_exact(pool: Pool, case: Case) -> None:
    """The search finds it where what is sent decides; loss and gradients on real processes are those of one device."""
    record = planned(
        case.model, case.devices, case.batch, limit_bytes=case.limit_bytes, memory_bytes_per_s=case.memory_bytes_per_s
    )
    print(explain(record))
    case.seen(dict(programs(record, case.model)))
    report = pool.run(case.devices, check, record, traced(case.model), case.model)[0]
    assert not report["missing_gradients"]
    assert report["largest"] < 1e-9, report
