"""On a real device: operators timed, plans run, predicted against measured. Skips itself where there is none.

pytest tests/gpu -s          # prints the tables; AUTOPAR_REPORTS=FOLDER writes them, too
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch

import autopar
from autopar import profiling
from autopar.accelerator import is_host, runtime
from autopar.emit.peak import measured_peak_tensor_bytes
from autopar.ranks import local_device
from autopar.trace.models.spec import load_model

MODEL = "gpt:layers=4,hidden=512,heads=8,vocab=8192"
TOKENS, GLOBAL_BATCH, ROUNDS, POINTS = 256, 16, 5, 200
CONFIGS = (
    "microbatch_size=16", "microbatch_size=4", "microbatch_size=16,recompute=full",
    "microbatch_size=16,offload=activations", "microbatch_size=4,offload=optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One plan, predicted and measured."""

    config: str
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int
    loss: float


def planning(dtype: str) -> dict[str, Any]:
    """Arguments of planning the model for this machine."""
    loaded = load_model(MODEL, seq_len=TOKENS)
    return {
        "model": loaded.model, "example_inputs": loaded.inputs, "cluster": "local", "global_batch": GLOBAL_BATCH,
        "dtype": dtype,
    }  # fmt: skip


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked for."""
    if not is_host(device):
        torch.cuda.synchronize(device)


def row_of(config: str, dtype: str, device: torch.device) -> Row:
    """Plan, run a few steps, measure the last ones."""
    given = planning(dtype)
    plan = autopar.plan(**given, config=autopar.ManualConfig.parse(config))
    torch.manual_seed(0)
    parallel = autopar.optimize(given["model"], given["example_inputs"], plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.0)
    text = torch.randint(8192, (GLOBAL_BATCH, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    losses, seconds = [], []

    def step() -> None:
        losses.append(float(parallel.train_step(input_ids=text, labels=text)))
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak_bytes = measured_peak_tensor_bytes(step, device)
    for _ in range(ROUNDS):
        wait(device)
        began = time.perf_counter()
        step()
        wait(device)
        seconds.append(time.perf_counter() - began)
    return Row(config, plan.step_time_s, median(seconds), plan.peak_tensor_bytes, peak_bytes, losses[-1])


def table(rows: list[Row]) -> str:
    """Predicted and measured, a plan a line."""
    lines = [f"{'plan':36}{'ms pred.':>10}{'ms meas.':>10}{'MiB pred.':>11}{'MiB meas.':>11}"]
    for r in rows:
        times = f"{r.predicted_s * 1e3:10.2f}{r.measured_s * 1e3:10.2f}"
        lines.append(f"{r.config:36}{times}{r.predicted_bytes / 2**20:11.1f}{r.measured_bytes / 2**20:11.1f}")
    return "\n".join(lines)


@pytest.mark.gpu
@pytest.mark.skipif(not runtime().is_available(), reason="no device that torch can use")
def test_predicted_against_measured(figures: Callable[[str, str], None]) -> None:
    """About 200 points are timed for planning; plans compute one loss, their peaks are as predicted to 15 %."""
    device = local_device()
    profile = profiling.profile(**planning("bf16"))
    failed = [timing.failed for timing in profile.timings.values() if timing.failed]
    rows = [row_of(config, "bf16", device) for config in CONFIGS]
    figures(f"Predicted and measured, {len(profile.timings)} timings", table(rows))
    assert len(profile.timings) <= 2 * POINTS
    assert failed == []
    assert [r.loss for r in rows] == pytest.approx([rows[0].loss] * len(rows), rel=1e-2)
    for r in rows:
        assert r.predicted_bytes == pytest.approx(r.measured_bytes, rel=0.15), r.config
