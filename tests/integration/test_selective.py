"""Some ops run again in the backward pass: exact, with the masks they had, and at the price of what runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.emit.build import emit
from autopar.emit.example import random_batch
from autopar.shard.lower import lower_layer
from autopar.shard.program import Call
from autopar.shard.saved import run_again
from autopar.trace.inputs import bind
from tests.integration.models import example, traced
from tests.integration.test_exact import check, planned
from tests.pool import Pool

CONFIGS = {
    "dp": "dp=4,microbatch_size=2",
    "tp+sp": "tp=4,sp=1,microbatch_size=8",
    "zero3": "dp=4,zero=3,microbatch_size=2",
}
TOLERANCES = {"gpt eager": 1e-9, "llama eager": 1e-4, "bert eager": 1e-9, "gpt": 1e-9, "llama": 1e-9, "vit": 1e-9}
"""Largest difference by model; the norms of transformers' Llama compute in float32 whatever the dtype."""
QUICK = {"selective": ("gpt eager",), "light": ("gpt eager", "llama", "vit")}
CASES = [
    pytest.param(name, config, kind, marks=() if name in QUICK[kind] else pytest.mark.slow)
    for name in TOLERANCES
    for config in CONFIGS
    for kind in QUICK
]


@pytest.mark.parametrize(("name", "config", "kind"), CASES)
def test_plan_is_exact(pool: Pool, name: str, config: str, kind: str) -> None:
    """Loss, gradients and parameters after three AdamW steps are those of one device that recomputes nothing and, of
    `gpt eager`, drops the same attention weights."""
    record = planned(traced(name), f"{CONFIGS[config]},recompute={kind}")
    assert {s.recompute for s in record.stages[0].strategies} == {"none", kind}
    report = pool.run(4, check, record, traced(name), name)[0]
    assert ("drops out" in report["reference"]) == (name == "gpt eager")
    assert not report["missing_gradients"]
    assert report["largest"] < TOLERANCES[name], report


class Calls(TorchDispatchMode):
    """Counts calls by the name of the operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_step(name: str, recompute: str) -> tuple[Counter[str], Counter[str]]:
    """Operators called in a step on one device, and the ops that its plan says run again."""
    graph, (model, inputs) = traced(name), example(name)
    record = planned(graph, f"microbatch_size=16,recompute={recompute}", devices=1)
    pm = emit(record, graph, model, device="cpu")
    rows = random_batch(graph, bind(model, inputs).tensors, 16, 0, torch.device("cpu"))
    with Calls() as calls:
        pm.train_step(**dict(zip(graph.inputs, rows, strict=True)))
    stage, again = record.stages[0], Counter[str]()
    sizes = tuple(axis.size for axis in stage.mesh)
    for index, place in enumerate(stage.assignment):
        program = lower_layer(graph, index, stage.strategies[place], sizes)
        steps = [
            program.steps[i] for region in program.regions for i in run_again(region, program.steps, program.light)
        ]
        again.update(step.op.target.split(".")[1] for step in steps if isinstance(step, Call))
    return calls.seen, again


@pytest.mark.parametrize(
    ("recompute", "matmul", "softmax", "linear"), [("none", 0, 0, 0), ("selective", 2, 2, 0), ("full", 4, 2, 12)]
)
def test_what_runs_again_is_what_is_priced(recompute: str, matmul: int, softmax: int, linear: int) -> None:
    """Of the cores of two blocks the products of queries and keys and the softmax run again; the other products save
    nothing of their own, and torch stops before them. So it does, of whole blocks, before their last linear layers."""
    plain, _ = calls_of_a_step("llama eager", "none")
    found, priced = calls_of_a_step("llama eager", recompute)
    rerun = tuple(found[name] - plain[name] for name in ("bmm", "_softmax", "mm"))
    assert rerun == (matmul, softmax, linear)
    assert rerun == tuple(priced[name] for name in ("matmul", "softmax", "linear"))


def test_light_ops_run_again_once() -> None:
    """Though several products want its result, each norm of a block, and the activation, run again once."""
    plain, _ = calls_of_a_step("llama", "none")
    found, priced = calls_of_a_step("llama", "light")
    for called, name in (("rsqrt", "rms_norm"), ("silu", "silu"), ("mm", "linear")):
        assert found[called] - plain[called] == priced[name]
    assert priced["silu"] == 2
    assert not priced["linear"]
