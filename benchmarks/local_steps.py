"""Predicted against measured on this machine: step time and peak tensor bytes of several plans of two models.

    python -m benchmarks.local_steps [--ranks 4 | --exhaustive] [--models gpt,llama]

Processes of one thread. Steps of all plans of a model are interleaved, so that what else the machine does hits all
alike; each figure is a median. Prints error of the step time, Kendall's tau over pairs more than 5 % apart, how near
the plan the search chose is to the fastest measured, and the error of the peak. With more processes than cores only
tau means something, and nothing is searched. `--exhaustive`: every plan of a grid, to say how near the fastest of
all the search's pick is.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import combinations
from statistics import median
from typing import Any

from benchmarks import ranks

ROUNDS, GLOBAL_BATCH, TOKENS, VOCABULARY = 12, 16, 128, 2048
MODELS = {
    "gpt": f"gpt:layers=4,hidden=256,heads=8,vocab={VOCABULARY}",
    "llama": f"llama:layers=4,hidden=256,heads=8,kv_heads=4,ffn=704,vocab={VOCABULARY}",
}
CHOSEN, CHOSEN_OF_ONE_STAGE = "chosen by the search", "chosen among plans of one stage"
CONFIGS = {
    2: (
        "dp=2,microbatch_size=8",
        "dp=2,microbatch_size=2",
        "dp=2,microbatch_size=4,zero=1",
        "dp=2,microbatch_size=4,zero=2",
        "dp=2,microbatch_size=8,zero=3",
        "tp=2,microbatch_size=16",
        "tp=2,microbatch_size=4,sp=1",
        "dp=2,microbatch_size=4,recompute=full",
        "pp=2,microbatch_size=2",
        "pp=2,microbatch_size=4,schedule=gpipe",
        "pp=2,microbatch_size=2,schedule=interleaved,virtual_stages=2",
        "pp=2,microbatch_size=2,recompute=full",
    ),
    4: (
        "dp=4,microbatch_size=4",
        "dp=4,microbatch_size=1",
        "dp=4,microbatch_size=4,zero=1",
        "dp=4,microbatch_size=4,zero=3",
        "tp=2,dp=2,microbatch_size=8",
        "tp=4,microbatch_size=16",
        "tp=4,microbatch_size=4,sp=1",
        "tp=2,dp=2,zero=3,microbatch_size=4",
        "pp=2,dp=2,microbatch_size=2",
        "pp=2,tp=2,microbatch_size=4",
        "pp=4,microbatch_size=2",
        "pp=2,dp=2,microbatch_size=2,recompute=full",
    ),
}
"""Plans of a job of so many processes."""
SIZES = (2, 4, 8)
EXHAUSTIVE = (
    *(f"dp=2,microbatch_size={n},zero={zero}" for n in SIZES for zero in (0, 1, 2, 3)),
    *(f"dp=2,microbatch_size={n},recompute=full" for n in SIZES),
    *(f"tp=2,microbatch_size={2 * n},sp={sp}" for n in SIZES for sp in (0, 1)),
    *(f"pp=2,microbatch_size={n},schedule={schedule}" for n in (1, *SIZES) for schedule in ("1f1b", "gpipe")),
    *(f"pp=2,microbatch_size={n},recompute=full" for n in SIZES),
    *(f"pp=2,microbatch_size={n},schedule=interleaved,virtual_stages=2" for n in (1, *SIZES)),
)
"""All plans of a grid for two processes."""


def measure() -> None:
    """On each rank: plan, run all plans of each model in turns, time them."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks.answer({name: measure_model(name) for name in os.environ["AUTOPAR_BENCHMARK_MODELS"].split(",")})
    dist.destroy_process_group()


def measure_model(model: str) -> list[dict[str, Any]]:
    """One row a plan."""
    import torch
    import torch.distributed as dist

    import autopar
    from autopar.emit.peak import live_tensor_bytes, measured_peak_tensor_bytes
    from autopar.trace import load_model

    loaded = load_model(MODELS[model], seq_len=TOKENS)
    keywords: dict[str, Any] = {"cluster": "local", "global_batch": GLOBAL_BATCH, "dtype": "fp32"}
    plans: dict[str, autopar.Plan] = {}
    if dist.get_world_size() <= (os.cpu_count() or 1):
        plans[CHOSEN] = autopar.plan(loaded.model, loaded.inputs, **keywords)
        plans[CHOSEN_OF_ONE_STAGE] = autopar.plan(loaded.model, loaded.inputs, constraints=["exclude=pp"], **keywords)
    for config in EXHAUSTIVE if os.environ.get("AUTOPAR_BENCHMARK_EXHAUSTIVE") else CONFIGS[dist.get_world_size()]:
        plans[config] = autopar.plan(loaded.model, loaded.inputs, config=autopar.ManualConfig.parse(config), **keywords)
    text = torch.randint(VOCABULARY, (GLOBAL_BATCH, TOKENS))
    times: dict[str, list[float]] = {name: [] for name in plans}
    peaks: dict[str, int] = {}
    modules = {}
    for name, plan in plans.items():
        held = live_tensor_bytes("cpu")
        parallel = autopar.optimize(loaded.model, loaded.inputs, plan)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4, foreach=True)
        rows = GLOBAL_BATCH // parallel.data_parallel_size
        mine = text[parallel.data_parallel_rank * rows : (parallel.data_parallel_rank + 1) * rows]

        def step(parallel: Any = parallel, optimizer: Any = optimizer, mine: torch.Tensor = mine) -> None:
            parallel.train_step(input_ids=mine, labels=mine)
            optimizer.step()
            optimizer.zero_grad()

        step()
        peak = torch.tensor(measured_peak_tensor_bytes(step, "cpu") - held)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        peaks[name] = int(peak)
        modules[name] = step
    for _ in range(ROUNDS):
        for name, step in modules.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(time.perf_counter() - began)
    return [
        {
            "plan": name,
            "stages": len(plan.stages),
            "predicted_s": plan.step_time_s,
            "measured_s": median(times[name]),
            "predicted_bytes": plan.peak_tensor_bytes,
            "measured_bytes": peaks[name],
            "kinds": plan.time_by_kind_s,
            "sources": plan.cost_sources,
        }
        for name, plan in plans.items()
    ]


def kendall_tau(pairs: list[tuple[float, float]], apart: float = 0.05) -> float:
    """Kendall's tau of (predicted, measured) over pairs whose measured values are more than `apart` apart."""
    signs = [
        (a[0] - b[0]) * (a[1] - b[1]) > 0
        for a, b in combinations(pairs, 2)
        if abs(a[1] - b[1]) > apart * max(a[1], b[1])
    ]
    return (2 * sum(signs) - len(signs)) / len(signs) if signs else 1.0


def main() -> None:
    """Print a table and a summary for each model."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=CONFIGS, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--exhaustive", action="store_true")
    asked = parser.parse_args()
    os.environ["AUTOPAR_BENCHMARK_EXHAUSTIVE"] = "1" if asked.exhaustive else ""
    os.environ["AUTOPAR_BENCHMARK_MODELS"] = asked.models
    answers = ranks.launch("benchmarks.local_steps", asked.ranks)
    for model, rows in answers.items():
        print(f"{MODELS[model]}, batch {GLOBAL_BATCH} x {TOKENS} tokens, {asked.ranks} processes")
        report(rows)
    if len(answers) > 1:
        errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for rows in answers.values() for row in rows]
        print(f"step time, all models: median error {median(errors):.1%}")


def report(found: list[dict[str, Any]]) -> None:
    """Print the plans of one model, and what they come to."""
    print(f"{'plan':61s}{'predicted':>10s}{'measured':>10s}{'error':>7s}{'MiB pred.':>11s}{'meas.':>8s}{'error':>7s}")
    time_errors, byte_errors = [], []
    for row in found:
        time_errors.append(row["predicted_s"] / row["measured_s"] - 1)
        byte_errors.append(row["predicted_bytes"] / row["measured_bytes"] - 1)
        print(
            f"{row['plan']:61s}{row['predicted_s']:10.4f}{row['measured_s']:10.4f}{time_errors[-1]:7.0%}"
            f"{row['predicted_bytes'] / 2**20:11.1f}{row['measured_bytes'] / 2**20:8.1f}{byte_errors[-1]:7.0%}"
        )
    print(f"step time: median error {median(map(abs, time_errors)):.1%}")
    for what, name, rows in (
        ("all plans", CHOSEN, found),
        ("plans of one stage", CHOSEN_OF_ONE_STAGE, [row for row in found if row["stages"] == 1]),
    ):
        tau = kendall_tau([(row["predicted_s"], row["measured_s"]) for row in rows])
        print(f"{what}: Kendall tau {tau:.2f}")
        fastest = min(row["measured_s"] for row in rows)
        for chosen in [row["measured_s"] for row in found if row["plan"] == name]:
            print(f"{what}: chosen plan {chosen / fastest - 1:.1%} above the fastest measured")
    print(f"peak bytes: median error {median(map(abs, byte_errors)):.1%}, largest {max(map(abs, byte_errors)):.1%}")


if __name__ == "__main__":
    measure() if ranks.inside() else main()
