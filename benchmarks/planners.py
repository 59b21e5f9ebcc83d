"""The plans of simple planners beside ours, all in one cost model: `estimate` says what each plan takes.

    python -m benchmarks.planners [PROBLEM...]

- *grid*: the best of all uniform hand-written plans (pp, tp, dp, microbatch, ZeRO, recomputation), as tuners of vendors
  try them.
- *by layer*: for each pipeline and number of microbatches, even stages, in each of which a dynamic programme over
  layers and memory in steps of 1 MB gives every block a degree, ZeRO level and recomputation (as Miao et al.,
  "Galvatron", 2022).
- *two levels*: for each pipeline and number of microbatches, the time of each range of blocks as a stage is the least
  under its memory, and a dynamic programme cuts the model so that the stages' times and (microbatches - 1) times the
  longest are least (as Zheng et al., "Alpa", 2022).

These two know blocks as they cost in uniform plans; what they choose is estimated as a whole. Last, the gain of each
part of ours: how much slower the plan is without it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from math import inf

from autopar.cluster import load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.errors import AutoparError, ConfigError
from autopar.formulate.config import ManualConfig
from autopar.formulate.pipelines.stages import block_indices
from autopar.formulate.planner import Planner
from autopar.plan import POLICIES, LayerCost, PlanRecord, Request
from autopar.trace import load_model, trace
from benchmarks.block_choice import Choice, Stages, even, sizes

GPT, LLAMA = (
    "gpt:layers={},hidden=2048,heads=16,vocab=51200",
    "llama:layers={},hidden=4096,heads=32,ffn=11008,vocab=32000",
)
PROBLEMS = {
    "gpt-1.3b, 8 A100 of 40 GB": (GPT.format(24), 2048, "8xa100-40gb", 64),
    "gpt-1.3b, 8 RTX 4090": (GPT.format(24), 2048, "2x4xrtx4090-24gb", 64),
    "gpt-1.3b, 4 A10": (GPT.format(24), 1024, "4xa10-24gb", 32),
    "llama-7b, 8 A100 of 40 GB": (LLAMA.format(32), 2048, "8xa100-40gb", 64),
    "llama-7b, 4 A100 on PCIe": (LLAMA.format(32), 2048, "4xa100-80gb-pcie", 32),
    "llama-7b, 4 H100": (LLAMA.format(32), 4096, "4xh100-80gb", 32),
}
ZEROS, RECOMPUTES, MICROBATCHES = (0, 1, 3), ("none", "full"), (1, 2, 4)
PARTS = {
    "pipelines": "exclude=pp", "tensor splits": "exclude=tp", "recomputation": "exclude=recompute", "ZeRO": "zero=0",
}  # fmt: skip
NEAR = 1 + 1e-9
"""What counts as no slower: sums in another order differ."""


@dataclass
class Problem:
    """A planning problem, with what uniform plans of it come to."""

    planner: Planner
    known: dict[str, PlanRecord] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        return self.planner.cluster.devices

    @property
    def batch(self) -> int:
        """Sequences a step."""
        return self.planner.request.global_batch

    def estimate(self, config: ManualConfig) -> PlanRecord | None:
        """What a plan comes to; None where it can't be laid out."""
        text = str(config)
        if text not in self.known:
            try:
                self.known[text] = self.planner.estimate(config)
            except ConfigError:
                return None
        return self.known[text]

    def seconds(self, config: ManualConfig | None) -> float:
        """Seconds of a plan that fits; inf for others."""
        found = self.estimate(config) if config else None
        return found.step_time_s if found and found.feasible else inf


def problem(spec: str, seq_len: int, cluster: str, batch: int) -> Problem:
    """Trace the model and prepare to price it."""
    loaded, where, policy = load_model(spec, seq_len=seq_len), load_cluster(cluster), POLICIES["bf16"]
    request = Request(spec, where.name, where.device.name, where.devices, batch, "bf16", policy, "adamw")
    graph = trace(loaded.model, loaded.inputs, compute_dtype=policy.compute)
    return Problem(Planner(graph, where, RooflinePricer(where), request))


# --- the planners ---------------------------------------------------------------------------------------------------


def uniform(found: Problem, pp: int, count: int) -> Iterator[ManualConfig]:
    """Uniform plans of a pipeline and number of microbatches."""
    stage = found.devices // pp
    for tp, zero, recompute in product(_divisors(stage), ZEROS, RECOMPUTES):
        dp = stage // tp
        size, rest = divmod(found.batch, count * dp)
        if tp <= found.planner.cluster.devices_per_node and size and not rest and (dp > 1 or not zero):
            sp = int(tp > 1)
            yield ManualConfig(pp=pp, tp=tp, dp=dp, sp=sp, zero=zero, recompute=recompute, microbatch_size=size)


def pipelines(found: Problem) -> Iterator[tuple[int, int]]:
    """Stages, and the numbers of microbatches with the small sizes of a tuner's grid for some split of the batch."""
    for pp in _divisors(found.devices):
        counts = {
            found.batch // (dp * size)
            for dp in _divisors(found.devices // pp) for size in MICROBATCHES if found.batch % (dp * size) == 0
        }  # fmt: skip
        yield from ((pp, count) for count in sorted(counts) if count >= pp)


def by_grid(found: Problem) -> float:
    """Seconds of the best uniform plan."""
    return min(found.seconds(config) for pp, count in pipelines(found) for config in uniform(found, pp, count))


def by_layer(found: Problem) -> float:
    """Seconds of the best plan whose layers are chosen stage by stage, stages even."""
    return min((_mixed(found, pp, count, False) for pp, count in pipelines(found)), default=inf)


def by_two_levels(found: Problem) -> float:
    """Seconds of the best plan whose cuts and layers are chosen on two levels."""
    return min((_mixed(found, pp, count, True) for pp, count in pipelines(found)), default=inf)


def _mixed(found: Problem, pp: int, count: int, free_cuts: bool) -> float:
    """Seconds of the plan that dynamic programmes over blocks choose; with more left for the rest if it doesn't fit."""
    configs = [config for config in uniform(found, pp, count) if found.estimate(config)]
    choices = [_choice(found, found.known[str(config)]) for config in configs]
    for rest in sorted(
        {min((c.rest_bytes for c in choices), default=0), max((c.rest_bytes for c in choices), default=0)}
    ):
        blocks = len(block_indices(found.planner.graph))
        stages = Stages(choices, blocks, pp, count, found.planner.limit_bytes - rest)
        cuts = (stages.cuts() if free_cuts else even(blocks, pp)) if choices and blocks >= pp else None
        picks = [stages.picks(s, n) for s, n in enumerate(sizes(cuts))] if cuts else [None]
        if cuts and all(p is not None for p in picks):
            seconds = found.seconds(_written(configs, [i for own in picks for i in own or ()], cuts))
            if seconds < inf:
                return seconds
    return inf


def _written(configs: list[ManualConfig], chosen: list[int], cuts: list[int]) -> ManualConfig:
    """The configuration in which each block has the keys of its uniform plan."""
    parts, first = [], 0
    for choice, members in groupby(chosen):
        last, one = first + len(list(members)) - 1, configs[choice]
        parts.append(f"{first}-{last}:tp={one.tp}+sp={one.sp}+zero={one.zero}+recompute={one.recompute}")
        first = last + 1
    stages = "/".join(map(str, sizes(cuts))) if len(cuts) > 2 else ""
    base = configs[max(set(chosen), key=chosen.count)]
    return replace(base, layers=";".join(parts) if len(parts) > 1 else "", stage_layers=stages)


def _choice(found: Problem, record: PlanRecord) -> Choice:
    """A block, and what is beside blocks, as a uniform plan has them."""
    places, index = set(block_indices(found.planner.graph)), 0
    blocks: list[LayerCost] = []
    front = back = 0.0
    for cost in record.costs.layers:
        micro_s = sum(cost.pass_s.values())
        if index in places:
            blocks.append(cost)
        elif index < min(places):
            front += micro_s * cost.count
        else:
            back += micro_s * cost.count
        index += cost.count
    one = blocks[-1]
    held = sum(one.memory[key] for key in ("parameters", "optimizer", "gradients"))
    first = sum(cost.count for cost in blocks if cost.stage == 0)
    in_flight = min(record.num_microbatches, record.pp_degree)
    rest = record.peak_tensor_bytes - first * (held + in_flight * one.memory["saved"])
    return Choice(
        sum(one.pass_s.values()), sum(one.step_s.values()), held, one.memory["saved"], front, back, max(0, rest)
    )


# --- beside ours ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Print for each problem what the planners' plans take, ours, and what ours takes without each of its parts."""
    names = sys.argv[1:] or list(PROBLEMS)
    titles = ("grid", "by layer", "two levels", "ours", "gain", "plans", "CPU s", "ours")
    print(f"{'problem':<28}" + "".join(f"{t:>{w}}" for t, w in zip(titles, (9, 10, 12, 9, 7, 7, 8, 7), strict=True)))
    for name in names:
        found, began = problem(*PROBLEMS[name]), time.process_time()
        others = [planner(found) for planner in (by_grid, by_layer, by_two_levels)]
        took, began = time.process_time() - began, time.process_time()
        ours = _planned(found, ())
        mine = time.process_time() - began
        worse = "" if ours <= min(others) * NEAR else "  WORSE"
        shown = "".join(f"{x:>{w}.3f}" for x, w in zip((*others, ours), (9, 10, 12, 9), strict=True))
        print(
            f"{name:<28}{shown}{min(others) / ours - 1:>7.1%}{len(found.known):>7}{took:>8.1f}{mine:>7.1f}{worse}",
            flush=True,
        )
        without = {part: _planned(found, (constraint,)) / ours - 1 for part, constraint in PARTS.items()}
        told = ", ".join(f"{part} {'needed' if loss == inf else f'{loss:.1%}'}" for part, loss in without.items())
        print(f"    slower without {told}; one strategy for all blocks {others[0] / ours - 1:.1%}", flush=True)


def _planned(found: Problem, constraints: tuple[str, ...]) -> float:
    """Seconds of our plan; inf where there is none."""
    request = replace(found.planner.request, constraints=constraints)
    try:
        return replace(found.planner, request=request).plan().step_time_s
    except AutoparError:
        return inf


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


if __name__ == "__main__":
    main()
