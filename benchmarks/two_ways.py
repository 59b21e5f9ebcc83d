"""Steps and bytes of one plan, as autopar prices what it runs and as another framework's step is predicted.

    python -m benchmarks.two_ways

Both ask the same device models. Ours sums the operators that are run; the other (`autopar/transformer`) is calibrated
on published steps and assumes its framework's kernels. Where they lie apart that is for one of these reasons, or one is
wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from autopar.api import estimate
from autopar.formulate.config import ManualConfig
from autopar.plan import PlanRecord
from autopar.trace import load_model

LLAMA_7B = "llama:layers=32,hidden=4096,heads=32,vocab=32000,ffn=11008,seq=4096"
LLAMA_13B = "llama:layers=40,hidden=5120,heads=40,vocab=32000,ffn=13824,seq=4096"
GPT_7B = "gpt:layers=32,hidden=4096,heads=32,vocab=51200,seq=2048"


@dataclass(frozen=True)
class Case:
    """A model, where it runs, how, and the framework whose step it is compared with."""

    spec: str
    cluster: str
    global_batch: int
    config: str
    framework: str


CASES = (
    Case(LLAMA_7B, "8xa100-80gb", 16, "dp=8,microbatch_size=1,zero=3", "fsdp"),
    Case(LLAMA_7B, "8xh100-80gb", 16, "dp=8,microbatch_size=2,zero=3", "fsdp"),
    Case(LLAMA_7B, "8x8xh100-80gb", 128, "dp=64,microbatch_size=2,zero=3", "fsdp"),
    Case(LLAMA_7B, "8xh100-80gb", 16, "dp=4,tp=2,microbatch_size=1,zero=1", "megatron"),
    Case(LLAMA_13B, "8x8xh100-80gb", 128, "dp=8,tp=8,sp=1,microbatch_size=2,zero=1", "megatron"),
    Case(GPT_7B, "8x8xa100-80gb", 256, "dp=8,tp=8,microbatch_size=4,zero=1", "megatron"),
    Case(GPT_7B, "8x8xa100-80gb", 256, "dp=8,tp=2,pp=4,microbatch_size=1,zero=1", "megatron"),
)


def priced(case: Case, framework: str) -> PlanRecord:
    """The estimate of a case under a framework's conventions."""
    loaded = load_model(case.spec)
    config = ManualConfig.parse(f"{case.config},framework={framework}")
    inputs = cast("dict[str, Tensor]", loaded.inputs)
    return estimate(
        loaded.model, inputs, cluster=case.cluster, global_batch=case.global_batch, config=config
    ).record  # fmt: skip


def main() -> None:
    """Print a line a case: seconds and tensor bytes of both, and ours over the other's; and milliseconds by kind."""
    titles = ("model", "cluster", "plan", "other", "s", "ours", "", "GB", "ours", "")
    print("{:6} {:14} {:44} {:9} {:>6} {:>6} {:>5}  {:>5} {:>5} {:>5}".format(*titles))
    for case in CASES:
        ours, other = priced(case, "autopar"), priced(case, case.framework)
        seconds, held = ours.step_time_s, ours.peak_tensor_bytes / 1e9
        there, bytes_there = other.step_time_s, other.peak_tensor_bytes / 1e9
        print(
            f"{case.spec.partition(':')[0]:6} {case.cluster:14} {case.config:44} {case.framework:9} {there:6.3f} "
            f"{seconds:6.3f} {seconds / there:5.2f}  {bytes_there:5.1f} {held:5.1f} {held / bytes_there:5.2f}"
        )
        kinds = (("work", ("compute", "recompute")), ("sent", ("communication",)), ("optimizer", ("optimizer",)))
        shown = (f"{name} {_ms(other, parts):.0f} and {_ms(ours, parts):.0f} ms" for name, parts in kinds)
        print(f"{'':22}{', '.join(shown)}")


def _ms(record: PlanRecord, kinds: Sequence[str]) -> float:
    return 1e3 * sum(record.time_by_kind_s.get(kind, 0.0) for kind in kinds)


if __name__ == "__main__":
    main()
