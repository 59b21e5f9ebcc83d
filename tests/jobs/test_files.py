"""Job files: sweeps and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import ConfigError
from autopar.jobs.points import read_jobs

GOOD = """
[model]
spec = ["gpt:layers=2,hidden=64,heads=2,vocab=100", "gpt2"]
[cluster]
name = ["8xa100-80gb", "16x8xa100-80gb", "selene"]
[training]
global_batch = 64
seq_len = 128
[constraints]
list = ["exclude=recompute"]
[search]
seed = 3
"""


def test_lists_make_a_sweep(tmp_path: Path) -> None:
    """Two models on three clusters are six points, the cluster varying quicker; defaults fill the rest."""
    path = tmp_path / "job.toml"
    path.write_text(GOOD)
    (job,) = read_jobs([path])
    assert [(p.spec[:4], p.cluster) for p in job.points] == [
        (spec, cluster) for spec in ("gpt:", "gpt2") for cluster in ("8xa100-80gb", "16x8xa100-80gb", "selene")
    ]
    assert {(p.global_batch, p.seq_len, p.dtype, p.optimizer) for p in job.points} == {(64, 128, "bf16", "adamw")}
    assert {p.seed for p in job.points} == {3}


def test_cluster_files_stand_beside_the_job(tmp_path: Path) -> None:
    """A cluster file is looked for in the job's folder."""
    cluster = 'name = "mine"\ndevice = "a100"\nnodes = 1\ndevices_per_node = 2\n'
    (tmp_path / "mine.toml").write_text(cluster)
    path = tmp_path / "job.toml"
    path.write_text(GOOD.replace('name = ["8xa100-80gb", "16x8xa100-80gb", "selene"]', 'file = "mine.toml"'))
    (job,) = read_jobs([path])
    assert {p.cluster for p in job.points} == {str(tmp_path / "mine.toml")}


def test_every_mistake_of_every_file(tmp_path: Path) -> None:
    """Wrong values, unknown fields and devices, and bad constraints of two files are all reported."""
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(GOOD.replace("global_batch = 64", "global_batch = 0\ndtype = 'int3'").replace("seed", "sead"))
    second.write_text(GOOD.replace("16x8xa100", "16x8xa10000").replace("exclude=recompute", "exclude=everything"))
    with pytest.raises(ConfigError) as caught:
        read_jobs([first, second, tmp_path / "absent.toml"])
    text = "\n".join(caught.value.mistakes)
    for words in (
        "a.toml: training.global_batch",
        "a.toml: training.dtype",
        "a.toml: search.sead: unknown field; did you mean seed?",
        "b.toml: cluster.name",
        "'a10000-80gb' is not known",
        "b.toml: constraints.list",
        "exclude=everything",
        "absent.toml: can't be read",
    ):
        assert words in text


def test_every_missing_cluster_file(tmp_path: Path) -> None:
    """Each cluster file that is absent is named with the job file that asks for it."""
    path = tmp_path / "job.toml"
    names = 'name = ["8xa100-80gb", "16x8xa100-80gb", "selene"]'
    path.write_text(GOOD.replace(names, 'file = ["one.toml", "two.toml"]'))
    with pytest.raises(ConfigError) as caught:
        read_jobs([path])
    first, second = caught.value.mistakes
    assert first.startswith(f"{path}: cluster.file: {tmp_path / 'one.toml'}: can't be read")
    assert second.startswith(f"{path}: cluster.file: {tmp_path / 'two.toml'}: can't be read")


def test_name_or_file(tmp_path: Path) -> None:
    """A job needs exactly one of a cluster's name and file."""
    path = tmp_path / "job.toml"
    path.write_text(GOOD.replace("[training]", 'file = "x.toml"\n[training]'))
    with pytest.raises(ConfigError, match=r"job.toml: cluster.file: give either name or file"):
        read_jobs([path])
