"""What is asked of a plan by constraints, it does."""

from __future__ import annotations

import pytest

from autopar.errors import ConfigError, InfeasibleError
from autopar.formulate.config import ManualConfig
from autopar.graph import REPLICATE
from autopar.plan import PlanRecord
from autopar.shard.program import Program
from tests.formulate.cases import planner
from tests.formulate.plans import matrix_ways, plan_of, programs_of, strategies_of

LITTLE = 200 << 20
"""A limit at which the plan of a GPT without constraints needs ZeRO or tensor parallelism."""


def constrained(model: str, *constraints: str, limit_bytes: int | None = None) -> PlanRecord:
    """The plan of a model on two devices under constraints."""
    return plan_of(model, "2xa100-80gb", limit_bytes, *constraints)


def block_programs(*constraints: str, limit_bytes: int | None = None) -> list[Program]:
    """Programs of the blocks of a GPT under constraints."""
    return programs_of(constrained("gpt", *constraints, limit_bytes=limit_bytes), "gpt")[1:-1]


@pytest.mark.parametrize("constraint", ["tp=2", "zero=3", "recompute=full", "microbatch_size=1", "exclude=tp"])
def test_a_pin_costs_time(constraint: str) -> None:
    """No constrained plan is faster than the one without constraints."""
    assert constrained("mlp", constraint).step_time_s >= constrained("mlp").step_time_s * (1 - 1e-9)


@pytest.mark.parametrize("degree", [1, 2])
def test_tensor_degree(degree: int) -> None:
    """`tp=` splits every block's matrices so many ways, whatever the memory."""
    assert [matrix_ways(p, "_proj") for p in block_programs(f"tp={degree}")] == [{degree}] * 4


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_level(zero: int) -> None:
    """`zero=` holds in every layer."""
    assert {s.zero for s in strategies_of(constrained("mlp", f"zero={zero}"))} == {zero}


@pytest.mark.parametrize("how", ["none", "full"])
def test_recomputation(how: str) -> None:
    """`recompute=` holds in every layer."""
    assert {s.recompute for s in strategies_of(constrained("mlp", f"recompute={how}"))} == {how}


@pytest.mark.parametrize("size", [1, 64, 128])
@pytest.mark.parametrize("further", [(), ("tp=1",), ("tp=2",), ("exclude=tp",)])
def test_microbatch_size(size: int, further: tuple[str, ...]) -> None:
    """`microbatch_size=` is what each data rank runs at once, alone and with a tensor degree."""
    assert constrained("mlp", f"microbatch_size={size}", *further).microbatch_size == size


@pytest.mark.parametrize("further", [(), ("tp=1",), ("tp=2",)])
def test_microbatch_size_on_two_axes(further: tuple[str, ...]) -> None:
    """Over four devices, too, each data rank runs `microbatch_size` samples at once."""
    assert plan_of("mlp", "4xa100-80gb", None, "microbatch_size=8", *further).microbatch_size == 8


def test_sequence_without_a_tensor_degree() -> None:
    """`sp=1` alone: blocks on eight devices hand on parts of a sample's sequence, which without it is whole."""

    def cuts(*constraints: str) -> set[int]:
        stage = planner("gpt", "8xa100-80gb", 1, None, ("exclude=pp", *constraints)).plan().stages[0]
        return {placement for i in stage.assignment[1:-1] for placement in stage.strategies[i].exit}

    assert cuts() == {REPLICATE}
    assert cuts("sp=1") == {1}


def test_exclusions() -> None:
    """What is excluded is in no layer, under a limit at which it would be."""
    assert {s.zero for s in strategies_of(constrained("gpt", "exclude=zero", limit_bytes=LITTLE))} == {0}
    kept = constrained("gpt", "exclude=recompute", "exclude=sp", limit_bytes=LITTLE)
    assert {s.recompute for s in strategies_of(kept)} == {"none"}
    assert all(1 not in s.entry + s.exit for s in strategies_of(kept))
    assert [matrix_ways(p, "_proj") for p in block_programs("exclude=tp", limit_bytes=LITTLE)] == [{1}] * 4


def test_modules_are_replicated_by_pattern() -> None:
    """`PATTERN:replicate` leaves the matrices of the modules it matches whole, and splits others as before."""
    kept = block_programs("tp=2", "*.mlp:replicate")
    assert [matrix_ways(p, "mlp") for p in block_programs("tp=2")] == [{2}] * 4
    assert [matrix_ways(p, "mlp") for p in kept] == [{1}] * 4
    assert [matrix_ways(p, "attn") for p in kept] == [{2}] * 4


def test_patterns_know_equal_blocks_apart() -> None:
    """A pattern that names one block leaves the others as they are; one that names nothing is refused."""
    kept = block_programs("tp=2", "blocks.1.mlp:replicate")
    assert [matrix_ways(p, "mlp") for p in kept] == [{2}, {1}, {2}, {2}]
    with pytest.raises(ConfigError, match="mpl"):
        planner("gpt", constraints=("*.mpl:replicate",)).plan()


def test_module_degree_by_pattern() -> None:
    """`PATTERN:tp=N` splits the matrices of the modules it matches N ways."""
    assert [matrix_ways(p, "mlp") for p in block_programs("*.mlp:tp=2")] == [{2}] * 4


def test_contradiction_is_said() -> None:
    """Constraints that no mesh can meet are named."""
    with pytest.raises(InfeasibleError, match="tp=3"):
        planner("gpt", constraints=("tp=3",)).plan()


def test_pinned_layouts_at_cuts() -> None:
    """Under `tp=2,sp=0` no value is split between blocks; under `sp=1` the sequence is."""
    whole, split = (strategies_of(constrained("gpt", "tp=2", f"sp={n}"))[1:-1] for n in (0, 1))
    assert {s.entry for s in whole} == {(REPLICATE,)}
    assert {s.entry for s in split} == {(1,)}


def piped(*constraints: str) -> PlanRecord:
    """The plan of a GPT on two devices under constraints, pipelines among them."""
    return planner("gpt", constraints=constraints).plan()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"])
def test_schedule(schedule: str) -> None:
    """`schedule=` asks for a pipeline under it, which no hand-written one beats."""
    found = piped(f"schedule={schedule}", "microbatch_size=1")
    assert (found.schedule, found.pp_degree) == (schedule, 2)
    assert found.lower_bound_s is not None
    chunks = 2 if schedule == "interleaved" else 1
    by_hand = planner("gpt").estimate(ManualConfig(pp=2, schedule=schedule, virtual_stages=chunks))
    assert found.lower_bound_s <= found.step_time_s <= by_hand.step_time_s * (1 + 1e-9)


def test_virtual_stages() -> None:
    """`virtual_stages=` is how many stages each group has; schedules of pipelines are none for one stage."""
    assert len(piped("virtual_stages=2").stages) == 4
    assert len(piped("virtual_stages=1", "pp=2").stages) == 2
    for pinned in ("schedule=zb", "virtual_stages=2"):
        with pytest.raises(InfeasibleError, match=pinned):
            piped(pinned, "pp=1")
