"""`python -m benchmarks`: all benchmarks, one after the other."""

from __future__ import annotations

from benchmarks import local_steps, search_time

for benchmark in (search_time, local_steps):
    print(f"# {benchmark.__name__}", flush=True)
    benchmark.main()
    print(flush=True)
