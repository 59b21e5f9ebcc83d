"""Timing what planning asks for, and the collectives of real jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar import profiling
from autopar.errors import ProfileError
from autopar.formulate.profiling import KINDS, SIZES_BYTES, job_collectives, profile_job
from autopar.graph import CollectiveKey, Operand, OpKey
from autopar.measure.hiding import overlap_keys
from autopar.measure.local import local_cluster
from autopar.measure.lots import LOT, expected_s, in_lots
from autopar.measure.profile import Profile, Sample, Timing
from autopar.measure.session import measuring
from autopar.measure.store import Store
from autopar.ranks import on_rank_0
from tests.pool import Pool

CPU = torch.device("cpu")
SIZES = (4096, 65536)


def profiled(folder: str) -> tuple[list[str], Profile]:
    """The job's collectives timed twice with one store: what was said, and the second profile."""
    said: list[str] = []

    def work() -> Profile:
        with measuring(CPU) as session:
            store = Store(Path(folder, "timings.sqlite"))
            profile_job(session, store, said.append, local_cluster(CPU), SIZES)
            return profile_job(session, store, said.append, local_cluster(CPU), SIZES)

    return said, on_rank_0(work)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_groups_of_a_job(ranks: int) -> None:
    """Groups are all (ranks, stride) whose copies tile the job exactly; each has every kind and size."""

    def tiles(n: int, stride: int) -> bool:
        starts = [r for r in range(ranks) if r // stride % n == 0]
        groups = [{s + i * stride for i in range(n)} for s in starts]
        return sorted(r for g in groups for r in g) == list(range(ranks))

    wanted = {(n, s) for n in range(2, ranks + 1) for s in range(1, ranks + 1) if tiles(n, s)}
    found = job_collectives(ranks, SIZES_BYTES["cpu"])
    assert {(key.ranks, key.stride) for key in found} == wanted
    assert len(found) == len(set(found)) == len(wanted) * len(KINDS) * 8
    assert {key.bytes for key in found} <= {4096 * 4**i for i in range(8)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_of_real_jobs(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """On real processes every collective is timed; a second run times nothing and knows the same."""
    said, profile = pool.run(ranks, profiled, str(tmp_path))[0]
    keys = [*job_collectives(ranks, SIZES), *overlap_keys(ranks)]
    count = len(keys)
    assert said[0].startswith(f"0 operators and {count} collectives to time, about ")
    assert said[1].startswith("0 operators and 0 collectives to time")
    assert set(profile.timings) == set(keys)
    assert [t.failed for t in profile.timings.values() if t.failed] == []
    assert profile.environment.busy_ranks == ranks


def test_one_process_has_no_collectives() -> None:
    """Without a job there is nothing to time, and that is no error."""
    assert profiling.profile_collectives().timings == {}


def product(n: int) -> OpKey:
    """The key of a product of n by n."""
    return OpKey("aten.mm.default", (Operand((n, n), "float32", False),) * 2)


def interrupted(after: int) -> Callable[[Sequence[OpKey]], dict[OpKey, Timing]]:
    """A timer that is interrupted after so many lots."""
    lots = iter(range(after))

    def time(keys: Sequence[OpKey]) -> dict[OpKey, Timing]:
        if next(lots, None) is None:
            raise KeyboardInterrupt
        return {key: Timing(Sample((1.0,))) for key in keys}

    return time


def test_an_interrupted_run_keeps_what_was_done() -> None:
    """Timings are handed over lot by lot: those before an interruption are there."""
    keys, kept = [product(n) for n in range(1, 3 * LOT)], dict[OpKey, Timing]()

    def run() -> None:
        for timings in in_lots(interrupted(2), keys, "timing"):
            kept.update(timings)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert list(kept) == keys[: 2 * LOT]


def test_expected_seconds_grow_with_keys_and_size() -> None:
    """Quick keys take a fixed time each, slow ones their repeats."""
    assert expected_s([]) == 0
    assert expected_s([1e-6] * 10) == pytest.approx(10 * expected_s([1e-6]))
    assert expected_s([1.0]) > 3


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of a small model, taken on this machine for a cluster of processors."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    measure([]).save(path)
    return path


def model() -> torch.nn.Module:
    """Two products and what is between them."""
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def measure(said: list[str], add_to: Path | None = None) -> Profile:
    """The profile that planning the model asks for."""
    return profiling.profile(
        model(), (torch.randn(2, 16),), cluster="2xxeon-8480", global_batch=4, dtype="fp32", device="cpu",
        say=said.append, add_to=add_to,
    )  # fmt: skip


def planned(cluster: str, profile: Path) -> autopar.Plan:
    """The model's plan by a profile."""
    return autopar.plan(
        model(), (torch.randn(2, 16),), cluster=cluster, global_batch=4, dtype="fp32", profile=profile
    )  # fmt: skip


def test_a_second_run_times_nothing(taken: Path) -> None:
    """What is timed already is not timed again, and is in the result all the same."""
    said: list[str] = []
    assert set(measure(said).timings) == set(Profile.load(taken).timings)
    assert said[0].startswith("0 operators")


def test_what_failed_is_tried_again(taken: Path) -> None:
    """A failure that is kept, as of memory that others held, doesn't keep a later run from timing the operator."""
    known = Profile.load(taken)
    key = next(key for key in known.timings if isinstance(key, OpKey))
    Store().add(known.environment, {key: Timing(failed="out of memory")})
    said: list[str] = []
    assert measure(said).timings[key].failed == ""
    assert said[0].startswith("1 operators")


def test_a_profile_plans_for_a_cluster_of_its_backend(taken: Path) -> None:
    """Elsewhere the file prices the operators it has; devices of another backend are refused, naming both."""
    plan = planned("2xxeon-8480", taken)
    assert plan.cost_sources.get("roofline", 0) < 1
    with pytest.raises(ProfileError, match=r"backend 'cpu'.*is of 'cuda'"):
        planned("2xa100-80gb", taken)


def test_profiles_of_unlike_environments_are_not_mixed(taken: Path, tmp_path: Path) -> None:
    """Adding to a file of another environment is refused before anything is timed, naming what differs."""
    known = Profile.load(taken)
    other, said = tmp_path / "other.json", list[str]()
    key = CollectiveKey("all_reduce", 4096, 2, 1)
    Profile(known.environment, {key: Timing(Sample((1.0,)))}).save(other)
    assert key in measure(said, add_to=other).timings
    Profile(replace(known.environment, busy_ranks=4), {}).save(other)
    said.clear()
    with pytest.raises(ProfileError, match="busy_ranks = 4 there, 1 here"):
        measure(said, add_to=other)
    assert said == []
