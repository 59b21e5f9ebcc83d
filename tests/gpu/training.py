"""A one-stage plan trained on a device: its step as it is beside it compiled, and what a profiler sees of its layers.

Sizes and device are arguments, so that the same code runs on a small model without an accelerator.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.accelerator import is_host
from autopar.trace.models.spec import load_model


@dataclass(frozen=True)
class Size:
    """A model by its specification, tokens a sequence, sequences a step, words, and how it computes."""

    model: str
    tokens: int
    batch: int
    vocabulary: int
    dtype: str


FULL = Size("gpt:layers=4,hidden=512,heads=8,vocab=8192", 256, 16, 8192, "bf16")
TINY = Size("gpt:layers=2,hidden=32,heads=2,vocab=64", 16, 4, 64, "fp64")


@dataclass(frozen=True)
class Steps:
    """Loss of the first step, and the median seconds of those after the first two."""

    loss: float
    seconds_s: float


class Trained:
    """A plan of one microbatch on one device, with an optimizer that changes nothing, so that every step is alike."""

    def __init__(self, size: Size, device: torch.device) -> None:
        loaded = load_model(size.model, seq_len=size.tokens)
        inputs: Any = loaded.inputs
        self.plan = autopar.plan(
            loaded.model, inputs, cluster="local", global_batch=size.batch, dtype=size.dtype,
            config=autopar.ManualConfig(microbatch_size=size.batch),
        )  # fmt: skip
        torch.manual_seed(0)
        self.module = autopar.optimize(loaded.model, inputs, self.plan)
        self.device = device
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.0)
        generator = torch.Generator().manual_seed(1)
        self._text = torch.randint(size.vocabulary, (size.batch, size.tokens), generator=generator).to(device)

    def step(self) -> float:
        """The loss of a step, which the device has done by then."""
        loss = float(self.module.train_step(input_ids=self._text, labels=self._text))
        self._optimizer.step()
        self._optimizer.zero_grad()
        if not is_host(self.device):
            torch.cuda.synchronize(self.device)
        return loss

    def steps(self, rounds: int) -> Steps:
        """Two steps to warm up, then `rounds` timed ones."""
        loss, _ = self.step(), self.step()
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - began)
        return Steps(loss, median(seconds))


def as_it_is_and_compiled(size: Size, device: torch.device, rounds: int, **options: Any) -> tuple[Steps, Steps]:
    """Steps of one plan before and after its layers are compiled with `options` of `torch.compile`."""
    trained = Trained(size, device)
    plain = trained.steps(rounds)
    trained.module.compile(**options)
    return plain, trained.steps(rounds)


def layers_seen(size: Size, device: torch.device) -> tuple[tuple[str, ...], dict[str, float]]:
    """The plan's layers, and for each name that a profiler has in a step the milliseconds on the device inside it.

    Without an accelerator they are those of the host.
    """
    trained = Trained(size, device)
    trained.step()
    host = is_host(device)
    activities = [ProfilerActivity.CPU] if host else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled:
        trained.step()
    events = profiled.key_averages()
    return trained.plan.layer_names, {
        event.key: (event.cpu_time_total if host else event.device_time_total) / 1e3 for event in events
    }
