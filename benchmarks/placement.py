"""Placements of a pipeline's stages on geo-distributed devices beside published ones: seconds of a step's traffic.

    python -m benchmarks.placement FOLDER    # with dtfm_cases.npz and seed_numbers.json

Clusters, formulas and costs are those of Yuan et al., "Decentralized training of foundation models in heterogeneous
environments", 2022: 64 devices in 1 to 8 regions, 8 stages of 8 replicas of a model of 1.3 billion parameters.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from autopar.placement.local import place
from autopar.placement.problem import problem_of_links

STAGES = 8
SUM_BYTES = 1.3e9 * 4 * 3 / 24
"""Gradients of a stage's 3 layers of 24, in fp32."""
HOP_BYTES = 2024 * 2048 * 2 * 61.035 / 2**30 * 1e9
"""A step's activations between two stages, as the publication counts them (its 61.04 is 61.035 rounded)."""


def main() -> None:
    """Print for each case what is published, what is found, what no placement can beat, and the seconds it took."""
    folder = Path(sys.argv[1])
    numbers = json.loads((folder / "seed_numbers.json").read_text())["dtfm_cost_s"]
    cases = np.load(folder / "dtfm_cases.npz")
    print(f"{'case':<6}{'regions':>8}{'published':>11}{'found':>9}{'sums':>8}{'hops':>8}{'bound':>8}{'search':>9}")
    for case, *_, published in numbers["rows"]:
        began = time.process_time()
        problem = problem_of_links(
            cases[f"case{case}_delay_ms"] / 1e3, cases[f"case{case}_bandwidth_gbps"] / 8 * 1e9,
            STAGES, SUM_BYTES, HOP_BYTES,
        )  # fmt: skip
        found = place(problem)
        regions = len(set(cases[f"case{case}_region"].tolist()))
        figures = (published, found.cost_s, found.sum_s, sum(found.hops_s), found.lower_bound_s)
        widths = (11, 9, 8, 8, 8)
        shown = "".join(f"{x:>{width}.3f}" for x, width in zip(figures, widths, strict=True))
        print(f"{case:<6}{regions:>8}{shown}{time.process_time() - began:>7.2f} s")


if __name__ == "__main__":
    main()
