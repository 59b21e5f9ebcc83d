"""Operators of this machine: profiled at some shapes, predicted at others that were not timed.

    python -m benchmarks.local_ops [--device cpu|cuda] [--points 200] [--ranks 2]

Shapes are those of layers at random widths, lengths and batches. Three quarters of them are the profile, the last
quarter is priced by it and compared with its own timings; collectives are timed at powers of 4 and priced between. On
the host with several processes (gloo), on cuda with one. Prints errors of each kind, and how long it took.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch

from autopar.cost.measured import MeasuredPricer
from autopar.cost.roofline import RooflinePricer
from autopar.graph import CollectiveKey, Operand, OpKey
from autopar.measure.keys import Key
from autopar.measure.local import local_cluster
from autopar.measure.profile import Profile, Timing
from autopar.measure.session import Session, lead, measuring, serve
from autopar.ranks import device_named, join_job
from benchmarks import ranks

HELD_OUT = 4
"""Of so many shapes one is not part of the profile."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LADDER_BYTES = tuple(4096 * 4**i for i in range(7))


def shapes(points: int, device: torch.device) -> dict[str, list[OpKey]]:
    """Distinct calls by kind: half of them products, the others attention and norms; small ones on the host."""
    host, draw = device.type == "cpu", random.Random(0)
    dtype, widths, tokens = ("float32", (2, 16), (6, 11)) if host else ("bfloat16", (8, 128), (9, 14))

    def width() -> int:
        return 64 * round(2 ** draw.uniform(*(w.bit_length() - 1 for w in widths)))

    def operand(*shape: int) -> Operand:
        return Operand(shape, dtype, True)

    found: dict[str, list[OpKey]] = defaultdict(list)
    for i in range(points):
        rows, k, n = round(2 ** draw.uniform(*tokens)), width(), width()
        if i % 4 < 2:
            key = OpKey("aten.linear.default", (operand(rows, k), operand(n, k)))
            found["products"].append(key)
        elif i % 4 == 2:
            heads, dim = draw.choice((2, 4, 8, 16)), draw.choice((32, 64, 128))
            length = round(2 ** draw.uniform(tokens[0], tokens[1] - 1))
            q = operand(max(1, 2 ** (tokens[1] + 1) // length // 4), heads, length, dim)
            found["attention"].append(OpKey("aten.scaled_dot_product_attention.default", (q, q, q, None, 0.0, True)))
        else:
            args = (operand(rows, k), (k,), operand(k), operand(k))
            found["norms"].append(OpKey("aten.layer_norm.default", args))
    return found


def moves(count: int) -> tuple[list[CollectiveKey], list[CollectiveKey]]:
    """Collectives over `count` ranks: the ladder that is profiled, and sizes between its rungs."""
    between = [size * 2 for size in LADDER_BYTES[:-1]]
    return (
        [CollectiveKey(kind, size, count) for kind in KINDS for size in LADDER_BYTES],
        [CollectiveKey(kind, size, count) for kind in KINDS for size in between],
    )


def errors(points: int, device: torch.device, session: Session) -> dict[str, Any]:
    """Errors of held-out timings by kind and pass; `seconds` spent, `failed` calls."""
    began = time.perf_counter()
    by_kind = shapes(points, device)
    keys = [key for members in by_kind.values() for key in members]
    ladder, between = moves(session.environment.busy_ranks)
    known: dict[Key, Timing] = dict(session.ops(keys).items())
    known.update(session.collectives([*ladder, *between]).items())
    seconds = time.perf_counter() - began
    held = {key for members in by_kind.values() for key in members[HELD_OUT - 1 :: HELD_OUT]} | set(between)
    profile = Profile(session.environment, {key: timing for key, timing in known.items() if key not in held})
    pricer = MeasuredPricer(profile, RooflinePricer(local_cluster(device, session.environment.busy_ranks)))
    found = {
        f"{kind} {name}": [abs(predicted / timed - 1) for predicted, timed in pairs]
        for kind, members in by_kind.items()
        for name, pairs in _pairs([key for key in members if key in held], known, pricer).items()
    }
    if between and known.keys() & set(between):
        priced = pricer.collectives(between).seconds.tolist()
        found["collectives"] = [abs(p / known[k].forward_s - 1) for k, p in zip(between, priced, strict=True)]
    return {"errors": found, "seconds": seconds, "failed": [t.failed for t in known.values() if t.failed]}


def _pairs(
    keys: Sequence[OpKey], known: Mapping[Key, Timing], pricer: MeasuredPricer
) -> dict[str, list[tuple[float, float]]]:
    """Predicted and measured seconds of each pass."""
    ran = [key for key in keys if not known[key].failed]
    times = pricer.ops(ran)
    measured = [(known[key].forward_s, known[key].backward_s) for key in ran]
    return {
        "forward": list(zip(times.forward_s.tolist(), [f for f, _ in measured], strict=True)),
        "backward": list(zip(times.backward_s.tolist(), [b for _, b in measured], strict=True)),
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The table."""
    yield f"{'held out':24s}{'calls':>7s}{'median':>9s}{'mean':>9s}"
    for kind, apes in found["errors"].items():
        yield f"{kind:24s}{len(apes):7d}{median(apes):9.1%}{fmean(apes):9.1%}"
    yield f"timed in {found['seconds']:.0f} s; {len(found['failed'])} calls failed"


def measure(points: int, device: torch.device) -> dict[str, Any]:
    """On every rank: time and compare; the answer is the first rank's."""

    def work() -> dict[str, Any]:
        with measuring(device) as session:
            return errors(points, device, session)

    if not ranks.inside():
        return work()
    return lead(work, device) if os.environ["RANK"] == "0" else serve(device)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    os.environ["AUTOPAR_BENCHMARK_POINTS"] = str(asked.points)
    alone = asked.device == "cuda" or asked.ranks == 1
    found = (
        measure(asked.points, device_named(asked.device))
        if alone
        else ranks.launch("benchmarks.local_ops", asked.ranks)
    )
    print("\n".join(lines(found)))


if __name__ == "__main__":
    if ranks.inside():
        join_job()
        ranks.answer(measure(int(os.environ["AUTOPAR_BENCHMARK_POINTS"]), device_named("cpu")))
    else:
        main()
