"""CPU time of simulating one step on large schedules, and of predicting rows as `autopar validate` does.

python -m benchmarks.simulation

Schedules are laid out once a shape; a search asks for many steps of each. Asked for are 5 ms a step of 64 stages and
512 microbatches, and 180 s for 1,000 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from time import process_time

from autopar.cost.orders import Shape
from autopar.cost.schedule import simulate
from autopar.rows import Table
from autopar.validation.steps import predict_steps

SHAPES = (Shape("1f1b", 64, 1, 512), Shape("gpipe", 64, 1, 512), Shape("interleaved", 32, 2, 512),
          Shape("zb", 64, 1, 512), Shape("zbv", 32, 2, 512), Shape("dualpipev", 32, 2, 512))  # fmt: skip
REPEATS, ROWS = 7, 1000
LOW_S, LOW_ROWS_S = 0.005, 180.0


def step_s(shape: Shape) -> tuple[float, float]:
    """CPU seconds of the first step of a shape, and the least of the next."""
    uneven = [1.0 + 0.01 * (s % 7) for s in range(shape.stages)]
    taken = []
    for _ in range(REPEATS):
        began = process_time()
        simulate(shape, uneven, [2 * s for s in uneven], [0.05] * (shape.stages - 1), [0.0] * shape.stages, uneven)
        taken.append(process_time() - began)
    return taken[0], min(taken[1:])


def rows() -> Iterator[dict[str, str]]:
    """Runs of Llama 3 8B and 70B that differ in all that a plan may."""
    models = {"llama 3 8b": ("32", "8"), "llama 3 70b": ("80", "64")}
    plans = product(models, ("64", "128", "256", "512"), "1248", "1248", ("1", "2"), ("none", "full"), ("0", "1", "3"))
    for model, gpus, tp, pp, size, again, zero in plans:
        layers, least = models[model]
        yield {
            "row_id": f"{model} {gpus} {tp} {pp} {size} {again} {zero}", "model_name": model, "layers": layers,
            "hidden": "8192" if least == "64" else "4096", "seq_len": "8192", "gpu": "H100-80GB-SXM", "gpus": gpus,
            "tp": tp, "pp": pp, "micro_batch": size, "global_batch_seqs": "1024", "recompute": again,
            "zero_stage": zero, "framework": "Megatron-LM", "dtype": "bf16",
        }  # fmt: skip


def main() -> None:
    """Print milliseconds a step by schedule, and seconds of 1,000 rows."""
    print(f"{'schedule':12} {'stages':>6} {'microbatches':>12} {'first':>9} {'later':>9}   below {1e3 * LOW_S:.0f} ms")
    for shape in SHAPES:
        first, later = step_s(shape)
        print(
            f"{shape.schedule:12} {shape.stages:6} {shape.num_microbatches:12} {1e3 * first:6.1f} ms {1e3 * later:6.1f}"
            f" ms   {'yes' if later < LOW_S else 'no'}"
        )
    asked = list(islice(rows(), ROWS))
    began = process_time()
    found = predict_steps([Table(Path("rows.csv"), "training", asked)])
    taken = process_time() - began
    done = sum(row.skipped_reason is None for row in found)
    print(f"{len(asked)} rows, {done} predicted: {taken:.1f} s; below {LOW_ROWS_S:.0f} s: {taken < LOW_ROWS_S}")


if __name__ == "__main__":
    main()
