"""What `explain` says of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan import (
    POLICIES,
    CarriedCosts,
    Fingerprint,
    LayerCost,
    LayerStrategy,
    MeshAxis,
    PlanRecord,
    Request,
    StagePlan,
)
from autopar.report.explain import explain
from autopar.report.strategy import strategy_words
from autopar.report.units import count_text, gib_text, seconds_text

GIB = 1 << 30
MESH = (MeshAxis("d0", 4, 2), MeshAxis("d1", 2, 1))


def strategy(entry: tuple[int, ...], factors: tuple[str, ...], zero: int = 0, recompute: str = "none") -> LayerStrategy:
    """A layer of one op."""
    return LayerStrategy(entry, entry, {"linear": factors}, {}, zero, recompute)


def record(**changes: object) -> PlanRecord:
    """A plan of six layers on eight devices."""
    strategies = (strategy((0, -1), ("b", "")), strategy((0, -1), ("b", "n"), 1, "full"))
    base = PlanRecord(
        request=Request("gpt2", "8xa100-80gb", "a100-80gb", 8, 64, "bf16", POLICIES["bf16"], "adamw", seq_len=1024),
        fingerprint=Fingerprint("g", "p", "d"),
        stages=(StagePlan(0, tuple(range(8)), MESH, strategies, (0, 1, 1, 1, 1, 0)),),
        num_microbatches=4,
        microbatch_size=4,
        global_microbatch=16,
        pp_degree=1,
        schedule="none",
        step_time_s=0.5,
        tokens_per_s=131072.0,
        tokens_per_s_per_device=16384.0,
        tflops_per_device=123.4,
        mfu=0.4,
        peak_memory_bytes=40 * GIB,
        peak_tensor_bytes=37 * GIB,
        memory_by_category={"parameters": 10 * GIB, "activations": 27 * GIB, "reserve": 3 * GIB, "gradients": 0},
        feasible=True,
        runnable=True,
        exact=True,
        masks=True,
        exposed_comm_s=0.1,
        bubble_s=0.0,
        lower_bound_s=0.49,
        gap=0.02,
        cost_sources={"roofline": 0.25, "measured": 0.75},
        assumptions=("the loss is the mean over tokens",),
        trace_s=1.5,
        search_s=0.25,
        num_params=124_439_808,
        energy_j=None,
        input_s=None,
        placement=tuple(range(8)),
        layer_names=("wte", "h.0", "h.1", "h.2", "h.3", "head"),
        time_by_kind_s={"compute": 0.35, "communication": 0.1, "optimizer": 0.05},
        autopar_version="0.1.0",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_everything_is_said_in_80_columns() -> None:
    """A plan's question, choice, time, memory, bound, sources and assumptions are all there, within 80 columns."""
    text = explain(record())
    for words in (
        "gpt2, 124 million parameters",
        "64 sequences of 1024 tokens, bf16, adamw",
        "batch 4 ways, tensor 2 ways, ZeRO-1, full recomputation (4 of 6 layers, another",
        "4 of 16 sequences (4 a data replica)",
        "Stage 0: 8 devices 0-7, mesh d0=4 x d1=2",
        "h.0 to h.3 (4 layers): batch 4 ways, tensor 2 ways",
        "500 ms a step",
        "optimizer           50 ms    10 %",
        "131,072 a second",
        "40 % of the device's peak",
        "activations        27 GiB    68 %",
        "51 % of the device's 79.1 GiB usable",
        "within 2.0 %",
        "75 % measured, 25 % roofline",
        "the loss is the mean over tokens",
    ):
        assert words in text or words in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "gradients" not in text


def test_limits_and_verdicts() -> None:
    """An explicit limit is compared with tensor bytes; an estimate that doesn't fit or can't run says so first."""
    request = replace(record().request, memory_limit_bytes=36 * GIB, constraints=("pp=1",), config="dp=4,tp=2")
    text = explain(record(request=request, lower_bound_s=None, gap=None, feasible=False, runnable=False, exact=False))
    assert text.startswith("estimate by autopar 0.1.0\nNOT FEASIBLE")
    assert "predicted only" in text
    assert "not exact" in text
    assert "37 GiB of tensors of the 36 GiB allowed (103 %)" in text
    assert "dp=4,tp=2" in text


def test_alternatives_say_why_they_lose() -> None:
    """Each alternative shows how much slower it is and what it does."""
    text = explain(record(alternatives=(record(step_time_s=0.6, num_microbatches=8),)))
    assert "2. 600 ms (+20.0%), 40 GiB: 8 microbatches, batch 4 ways" in text


@pytest.mark.parametrize(
    ("entry", "factors", "words"),
    [
        ((0, 0), ("b", "b"), "batch 8 ways"),
        ((0, -1), ("b", "n"), "batch 4 ways, tensor 2 ways"),
        ((0, 1), ("b", "n"), "batch 4 ways, tensor+sequence 2 ways"),
        ((0, 1), ("b", ""), "batch 4 ways, sequence 2 ways"),
        ((-1, -1), ("n", "k"), "tensor 8 ways"),
        ((0, -1), ("b", ""), "batch 4 ways, 2 doing the same"),
    ],
)
def test_words_follow_from_layouts(entry: tuple[int, ...], factors: tuple[str, ...], words: str) -> None:
    """What an axis is called follows from what it splits at the entry and inside the layer."""
    assert strategy_words(strategy(entry, factors), MESH) == words


def test_units() -> None:
    """Numbers keep three digits and take the unit that fits."""
    assert [seconds_text(x) for x in (0, 1234.5, 1.234, 0.01234, 5e-6)] == [
        "0 s",
        "1,234 s",
        "1.23 s",
        "12.3 ms",
        "5 us",
    ]
    assert [gib_text(x) for x in (12, 3 << 20, 5 << 29, 2000 << 30)] == ["12 B", "3 MiB", "2.5 GiB", "2,000 GiB"]
    assert [count_text(x) for x in (512, 124_439_808, 70_553_706_496)] == ["512", "124 million", "70.6 billion"]


def test_groups_of_a_pipeline_have_their_own_figures() -> None:
    """Of a pipeline every group of devices has its share of work and its bytes; groups alike share a line."""
    half = record().stages[0].strategies[0]
    stages = tuple(StagePlan(2 * i, (2 * i, 2 * i + 1), MESH, (half,), (0, 0)) for i in range(3))
    passes = {"forward": 0.01, "backward": 0.02, "recompute": 0.0}
    costs = tuple(LayerCost(i, 0, 2, passes, {"optimizer": 0.005}, {}) for i in range(3))
    memory = tuple({"parameters": n * GIB, "activations": 2 * GIB, "reserve": GIB} for n in (4, 4, 5))
    text = explain(
        record(
            stages=stages, pp_degree=3, schedule="1f1b", bubble_s=0.25,
            costs=CarriedCosts(costs, shared_s=(0.0, 0.0, 0.05), group_memory=memory),
        )
    )  # fmt: skip
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "devices 6, 2 idle, 3 stages (1f1b)" in rows
    assert "0-1 50 % 50 % 4 GiB 0 B 0 B 2 GiB 0 B 1 GiB" in rows
    assert "2 60 % 40 % 5 GiB 0 B 0 B 2 GiB 0 B 1 GiB" in rows
    assert max(map(len, text.splitlines())) <= 80
