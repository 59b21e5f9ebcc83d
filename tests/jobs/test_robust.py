"""Random job and cluster files: those in order get a plan or a proven no, the others every mistake named."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.choices import DTYPES, OBJECTIVES, OPTIMIZERS
from autopar.errors import ConfigError, InfeasibleError
from autopar.jobs.points import Point, read_jobs
from autopar.jobs.work import solve
from tests.examples import examples

Data = dict[str, dict[str, Any]]
DEVICES = ("a100-80gb", "h100", "t4-16gb", "mi300x-192gb", "v100-32gb", "xeon-8480")
CONSTRAINTS = ("exclude=recompute", "exclude=pp", "exclude=tp", "zero=1", "dp=2", "tp=2", "pp=2", "microbatch_size=1",
               "devices=2", "sp=1", "recompute=full", "*.mlp*:replicate", "blocks.0:tp=2")  # fmt: skip
MISTAKES: tuple[tuple[str, str, Any, str], ...] = (
    ("model", "spec", "gpt5", "model.spec"),
    ("model", "spec", "gpt:layers=2,hidden=9,heads=2,vocab=8", "hidden=9"),
    ("model", "spec", "llama:layers=x,heads=2,vocab=8", "hidden missing"),
    ("model", "spec", 7, "model.spec"),
    ("model", "colour", 1, "model.colour: unknown field"),
    ("training", "global_batch", 0, "training.global_batch"),
    ("training", "global_batch", "many", "training.global_batch"),
    ("training", "seq_len", -1, "training.seq_len"),
    ("training", "dtype", "int3", "training.dtype"),
    ("training", "optimizer", "adamax2", "training.optimizer"),
    ("training", "memory_limit", "much", "training.memory_limit"),
    ("constraints", "list", ["exclude=everything"], "constraints.list"),
    ("profile", "file", "absent.json", "profile.file"),
    ("search", "objective", "beauty", "search.objective"),
    ("search", "top", 0, "search.top"),
    ("search", "seed", 0.5, "search.seed"),
    ("search", "time_limit_s", -2.0, "search.time_limit_s"),
    ("cluster", "file", "absent.toml", "cluster.file"),
    ("cluster", "name", "8xa1000", "cluster.name"),
)
"""Table, field, value, and the words that the message must have."""
CLUSTER_MISTAKES: tuple[tuple[str, Any, str], ...] = (
    ("device", "a1000", "'a1000' is not known"),
    ("nodes", 0, "nodes"),
    ("devices_per_node", "8", "devices_per_node"),
    ("price_per_hour", -1.0, "price_per_hour"),
    ("inter", {"name": "x", "gb_per_s": 0.0, "efficiency": 2.0, "latency_us": 1.0}, "inter.efficiency"),
    ("name", None, "name: is missing"),
)


@st.composite
def clusters(draw: st.DrawFn, nodes: int = 3, a_node: int = 4) -> dict[str, Any]:
    """A cluster file in order, of so many nodes and devices a node at most."""
    found: dict[str, Any] = {
        "name": "drawn",
        "device": draw(st.sampled_from(DEVICES)),
        "nodes": draw(st.integers(1, nodes)),
        "devices_per_node": draw(st.integers(1, a_node)),
    }
    if draw(st.booleans()):
        found["price_per_hour"] = draw(st.floats(0.1, 9))
    if draw(st.booleans()):
        found["inter"] = {"name": "net", "gb_per_s": draw(st.floats(0.1, 90)), "efficiency": 0.8, "latency_us": 5.0}
    return found


@st.composite
def mixed_clusters(draw: st.DrawFn) -> dict[str, Any]:
    """A cluster file of two or three groups of nodes that differ, in order."""
    devices = st.sampled_from([name for name in DEVICES if name != "xeon-8480"])
    groups = [
        {
            "device": draw(devices), "nodes": draw(st.integers(1, 2)), "devices_per_node": draw(st.integers(1, 3)),
            "network": draw(st.sampled_from(["infiniband", "roce"])), "speed": draw(st.floats(0.2, 1.5)),
        }
        for _ in range(draw(st.integers(2, 3)))
    ]  # fmt: skip
    between = {"name": "net", "gb_per_s": draw(st.floats(0.1, 90)), "efficiency": 0.8, "latency_us": 9.0}
    return {"name": "drawn", "group": groups, "between": between}


@st.composite
def jobs(draw: st.DrawFn) -> Data:
    """A job file in order, with one point, on a cluster file beside it."""
    family, heads = draw(st.sampled_from(["gpt", "llama"])), draw(st.integers(1, 4))
    hidden, vocab = heads * 2 * draw(st.integers(1, 8)), draw(st.integers(2, 99))
    training = {"global_batch": draw(st.integers(1, 12)), "seq_len": draw(st.integers(1, 24))}
    words: dict[str, Any] = {
        "dtype": draw(st.sampled_from(DTYPES)),
        "optimizer": draw(st.sampled_from(OPTIMIZERS)),
        "memory_limit": draw(st.sampled_from(["1KiB", "300 KiB", "2MB", "900GiB"])),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(words))))
    return {
        "model": {"spec": f"{family}:layers={draw(st.integers(1, 3))},hidden={hidden},heads={heads},vocab={vocab}"},
        "cluster": {"file": "cluster.toml"},
        "training": training | {key: words[key] for key in chosen},
        "constraints": {"list": draw(st.lists(st.sampled_from(CONSTRAINTS), max_size=2))},
        "search": {"objective": draw(st.sampled_from(OBJECTIVES)), "top": draw(st.integers(1, 2))},
    }


def toml(data: Mapping[str, Any]) -> str:
    """Values first, then tables, and lists of tables."""
    lists = {k: v for k, v in data.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in data.items() if k not in lists and not isinstance(v, dict)]
    lines += [f"[{key}]\n{toml(value)}" for key, value in data.items() if isinstance(value, dict)]
    lines += [f"[[{key}]]\n{toml(table)}" for key, tables in lists.items() for table in tables]
    return "\n".join(lines)


def points(job: Data, cluster: dict[str, Any]) -> tuple[Point, ...]:
    """The points of a job file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(toml(job))
        (Path(folder) / "cluster.toml").write_text(toml(cluster))
        return read_jobs([Path(folder) / "job.toml"])[0].points


def check_plan(job: Data, cluster: dict[str, Any]) -> None:
    """A job in order gets a plan that keeps to its limit, a proven no, or a mistake that only planning can see."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(toml(job))
        (Path(folder) / "cluster.toml").write_text(toml(cluster))
        (point,) = read_jobs([Path(folder) / "job.toml"])[0].points
        result = solve(point)
    error = result.document.get("error")
    if error is None:
        assert result.document["feasible"]
        assert 0 <= result.document["gap"] < 1
    else:
        assert error["kind"] in (ConfigError.__name__, InfeasibleError.__name__), result.log
        assert error["message"]


def check_mistakes(job: Data, cluster: dict[str, Any], wrong: set[int], wrong_there: set[int]) -> None:
    """Each of the mistakes put into the files is in the message, and reading them raises nothing but ConfigError."""
    job, cluster = deepcopy(job), dict(cluster)
    places = {(MISTAKES[n][0], MISTAKES[n][1]): n for n in sorted(wrong)}
    for (table, field), n in places.items():
        job.setdefault(table, {})[field] = MISTAKES[n][2]
    words = [MISTAKES[n][3] for n in places.values()]
    if job["cluster"]["file"] == "cluster.toml":
        cluster |= {CLUSTER_MISTAKES[n][0]: CLUSTER_MISTAKES[n][1] for n in wrong_there}
        words += [CLUSTER_MISTAKES[n][2] for n in wrong_there]
    with pytest.raises(ConfigError) as caught:
        points(job, {key: value for key, value in cluster.items() if value is not None})
    text = "\n".join(caught.value.mistakes)
    assert [word for word in words if word not in text] == []


numbers = st.sets(st.integers(0, len(MISTAKES) - 1), min_size=1, max_size=6)
numbers_there = st.sets(st.integers(0, len(CLUSTER_MISTAKES) - 1), max_size=3)


@examples(30)
@given(jobs(), clusters(), numbers, numbers_there)
def test_every_mistake_is_named(job: Data, cluster: dict[str, Any], wrong: set[int], wrong_there: set[int]) -> None:
    """Files with several mistakes: all are named at once."""
    check_mistakes(job, cluster, wrong, wrong_there)


@pytest.mark.slow
@examples(200)
@given(jobs(), clusters(), numbers, numbers_there)
def test_every_mistake_of_many_files(job: Data, cluster: dict[str, Any], wrong: set[int], there: set[int]) -> None:
    """The same of 200 pairs of files."""
    check_mistakes(job, cluster, wrong, there)


@examples(40)
@given(
    st.one_of(st.text(max_size=60), st.sampled_from(["model = 3", "[model]", "[[model]]\nspec = 1", "[model.spec]"]))
)
def test_anything_else_is_refused(text: str) -> None:
    """What isn't a job file at all is refused as a mistake in the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"job\.toml: "):
            read_jobs([path])


UNEVEN: Data = {
    "model": {"spec": "gpt:layers=2,hidden=20,heads=2,vocab=2"},
    "cluster": {"file": "cluster.toml"},
    "training": {"global_batch": 9, "seq_len": 12},
    "constraints": {"list": ["blocks.0:tp=2"]},
}
"""Nine samples may be dealt over two devices, one sample may not."""


MIXED: dict[str, Any] = {
    "name": "two",
    "group": [
        {"device": "a100-80gb", "nodes": 1, "devices_per_node": 2},
        {"device": "h100", "nodes": 1, "devices_per_node": 1},
    ],
    "between": {"name": "n", "gb_per_s": 1.0, "efficiency": 0.5, "latency_us": 9.0},
}
"""Groups of one device each are all that both parts hold."""


SEVEN: Data = {
    "model": {"spec": "llama:layers=2,hidden=24,heads=4,vocab=4"},
    "cluster": {"file": "cluster.toml"},
    "training": {"global_batch": 7, "seq_len": 9},
}
"""Seven samples can't be dealt over two by three axes without cutting some."""


@settings(max_examples=1)
@given(jobs(), clusters(nodes=1, a_node=2))
@example(UNEVEN, {"name": "two", "device": "a100-80gb", "nodes": 2, "devices_per_node": 1})
@example(UNEVEN, MIXED)
@example(SEVEN, {"name": "six", "device": "a100-80gb", "nodes": 2, "devices_per_node": 3})
def test_a_plan_or_a_proven_no(job: Data, cluster: dict[str, Any]) -> None:
    """Job files in order get a plan, a proven no, or a mistake that names what to change."""
    check_plan(job, cluster)


@pytest.mark.slow
@examples(200)
@given(jobs(), st.one_of(clusters(), mixed_clusters()))
def test_two_hundred_plans(job: Data, cluster: dict[str, Any]) -> None:
    """The same of 200 pairs of files."""
    check_plan(job, cluster)
