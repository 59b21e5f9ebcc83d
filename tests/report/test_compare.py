"""What `diff` says of two plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan import StagePlan
from autopar.report.compare import diff, diff_data, reason
from tests.report.test_explain import GIB, MESH, record, strategy


def test_equal_plans_choose_the_same() -> None:
    """A plan does not differ from itself."""
    text = diff(record(), record())
    assert "The plans choose the same." in text
    assert "equally fast" in text
    assert "->" not in text


def test_what_differs_is_said_in_80_columns() -> None:
    """Microbatches, strategies by layer, kinds of seconds and of bytes that differ are named, others aren't."""
    whole = strategy((0, 0), ("b", "b"), 3)
    stage = StagePlan(0, tuple(range(8)), MESH, (whole, record().stages[0].strategies[0]), (1, 0, 0, 0, 0, 1))
    other = record(
        stages=(stage,),
        num_microbatches=8,
        step_time_s=0.4,
        time_by_kind_s={"compute": 0.35, "communication": 0.02, "optimizer": 0.03},
        memory_by_category={"parameters": 4 * GIB, "activations": 27 * GIB, "reserve": 3 * GIB},
        peak_memory_bytes=34 * GIB,
    )
    text = diff(record(), other)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for said in (
        "microbatches 4 of 16 sequences -> 8 of 16 sequences",
        "h.0 to h.3 (4 layers): batch 4 ways, tensor 2 ways, ZeRO-1, full recomputation -> batch 8 ways, ZeRO-3",
        "the second is 25 % faster",
        "communication 100 ms 20 ms -80 ms",
        "The first takes 100 ms more: 80 ms of communication and 20 ms of optimizer.",
        "parameters 10 GiB 4 GiB -6 GiB",
    ):
        assert said in words
    assert "wte" not in text
    assert "dtype" not in text


def test_data_has_pairs_by_kind() -> None:
    """As data the difference has first and second of every kind; what is absent counts 0."""
    other = record(time_by_kind_s={"compute": 0.35, "bubble": 0.15})
    data = diff_data(record(), other)
    assert data["time_by_kind_s"] == {
        "compute": (0.35, 0.35), "communication": (0.1, 0), "optimizer": (0.05, 0), "bubble": (0, 0.15),
    }  # fmt: skip
    assert data["asked"] == {}
    assert data["layers"] == []


@pytest.mark.parametrize(
    ("kinds", "total_s", "said"),
    [
        ({"compute": 0.35, "communication": 0.1, "optimizer": 0.05}, 0.5, "as fast"),
        ({"compute": 0.33, "communication": 0.15, "optimizer": 0.05}, 0.53,
         "30 ms more: 50 ms of communication, less 20 ms of compute"),
    ],
)  # fmt: skip
def test_reason_names_the_largest_kinds(kinds: dict[str, float], total_s: float, said: str) -> None:
    """Why a plan is slower: what it spends more on, and what it saves."""
    assert reason(replace(record(), time_by_kind_s=kinds, step_time_s=total_s), record()) == said


def test_other_model() -> None:
    """Plans of unlike models differ in all layers, and are still compared."""
    assert "not the same model" in diff(record(), record(layer_names=("a", "b", "c", "d", "e", "x")))
