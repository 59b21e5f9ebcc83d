"""`python -m benchmarks`: all benchmarks, one after the other."""

from __future__ import annotations

from benchmarks import byte_limits, emission, emit, local_steps, planners, search_time, simulation, three_axes, two_ways

for benchmark in (
    search_time, simulation, three_axes, planners, two_ways, local_steps, emit, emission, byte_limits,
):  # fmt: skip
    print(f"# {benchmark.__name__}", flush=True)
    benchmark.main()
    print(flush=True)
