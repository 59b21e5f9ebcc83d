"""Predictions beside published rows: what is read, skipped, predicted and summed up."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from autopar.cli.main import _run
from autopar.errors import ConfigError
from autopar.rows import OP_KINDS, Table, read_tables
from autopar.validation.calls import Call, Skipped, read_calls, software
from autopar.validation.predict import predict, summary
from autopar.validation.text import table_text

GEMM = "gpu,dtype,m,n,k,batch,time_us,source"


def table(tmp_path: Path, *lines: str, name: str = "rows.csv") -> Table:
    """A table of these lines, the first being its columns."""
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return read_tables([path], OP_KINDS)[0]


def square(time_us: str = "500", gpu: str = "a100_sxm", size: int = 4096, source: str = "") -> str:
    return f"{gpu},bfloat16,{size},{size},{size},1,{time_us},{source}"


def test_rows_that_cannot_be_predicted_say_why(tmp_path: Path) -> None:
    """Unknown devices, dtypes without a rate, and what is no number are skipped with their value; others are not."""
    rows = table(
        tmp_path, GEMM, square(), square(gpu="x9000"), "a100_sxm,fp8,1024,1024,1024,1,9,", "a100_sxm,bf16,ten,8,8,1,9,"
    )
    found = predict([rows])
    assert [row.index for row in found] == [0, 1, 2, 3]
    assert found[0].skipped_reason is None
    reasons = [row.skipped_reason or "" for row in found[1:]]
    assert [word in reason for word, reason in zip(("x9000", "fp8", "'ten'"), reasons, strict=True)] == [True] * 3
    assert summary(found)["n"] == 1
    assert summary(found)["n_skipped"] == 3


def test_constant_share_of_peak(tmp_path: Path) -> None:
    """The baseline of 4096^3 on an A100 is 2 x 4096^3 / (0.8 x 312 TFLOP/s), and its error is told beside ours."""
    found = predict([table(tmp_path, GEMM, square("600"))])[0]
    expected_us = 2 * 4096**3 / (0.8 * 312e12) * 1e6
    assert found.baseline_us == pytest.approx(expected_us)
    assert found.baseline_ape == pytest.approx(abs(expected_us / 600 - 1))
    assert found.source == "fitted"


def test_rows_without_a_time_are_predicted(tmp_path: Path) -> None:
    """They have no error, and don't count."""
    found = predict([table(tmp_path, GEMM, square(""))])
    assert found[0].predicted_us
    assert found[0].ape is None
    assert summary(found)["n"] == 0
    assert summary(found)["mean_ape"] is None


def test_an_excluded_device_is_not_fitted(tmp_path: Path) -> None:
    """By any of its names; an unknown one is an error."""
    rows = table(tmp_path, GEMM, square())
    assert predict([rows], exclude=["A100-SXM"])[0].source == "roofline"
    with pytest.raises(ConfigError, match="x9000"):
        predict([rows], exclude=["x9000"])


def test_profiled_rows_put_a_device_right(tmp_path: Path) -> None:
    """A made-up device 1.7 times as slow as its datasheet is predicted to 5 % after 40 rows, and far off before."""
    sizes = np.random.default_rng(0).integers(1024, 8192, (80, 3))
    lines = [
        f"rtx3090,bfloat16,{m},{n},{k},1,{1.7 * 2 * m * n * k / (0.8 * 71e12) * 1e6 + 20:.2f}," for m, n, k in sizes
    ]
    timed, other = table(tmp_path, GEMM, *lines[:40]), table(tmp_path, GEMM, *lines[40:], name="other.csv")
    before, after = summary(predict([other])), summary(predict([other], [timed]))
    assert before["mean_ape"] > 0.2
    assert after["mean_ape"] < 0.05
    assert after["by_source"].keys() == {"fitted"}
    assert {(row.source, row.ape) for row in predict([timed], [timed])} == {("measured", 0.0)}


def test_a_version_apart_from_all_others_is_known_by_three_rows(tmp_path: Path) -> None:
    """A library whose newest version is six times as fast as ten others is met to a quarter between its three rows."""

    def line(version: int, bytes_: int, rate: float) -> str:
        return f"l40s,pcie4,all_reduce,4,1,{bytes_},{30 + bytes_ / rate * 1e6:.3f},suite/library-1.{version}/kernel"

    columns = "gpu,link,collective,n_ranks,n_nodes,bytes,time_us,source"
    slow = [line(version, 2**size, 5e9) for version in range(10) for size in range(20, 28)]
    timed = table(tmp_path, columns, *slow, *(line(10, 2**size, 3e10) for size in (20, 23, 26)))
    asked = table(tmp_path, columns, *(line(10, 2**size, 3e10) for size in (21, 22, 24, 25)), name="asked.csv")
    errors = [row.ape for row in predict([asked], [timed], ["l40s"])]
    assert max(error for error in errors if error is not None) < 0.25


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("aiconfigurator/vllm-0.24.0/context_attention", "vllm"),
        ("aiconfigurator/trtllm-1.3.0rc20", "trtllm"),
        ("aiconfigurator/nccl-nccl-2.29.2/NCCL-half", "nccl-nccl"),
        ("vidur/mlp_up_proj", "vidur"),
        ("neusight-train/bmm", "neusight-train"),
        ("", ""),
    ],
)
def test_software_without_versions(source: str, name: str) -> None:
    """Fits are by library, not by release."""
    assert software(source) == name


def test_all_kinds_are_read(tmp_path: Path) -> None:
    """A row of each kind of table is a call with sizes of its form, by names that sources use."""
    kinds = {
        "attention": (
            "gpu,dtype,batch,heads,kv_heads,seq_q,seq_kv,head_dim,causal,direction,time_us,source",
            "h100_sxm,bf16,4,32,8,4096,4096,128,1,fwd,900,",
        ),
        "elementwise": ("gpu,op,dtype,rows,cols,bytes,direction,time_us,source", "v100_sxm,gelu,half,8,8,256,fwd,5,"),
        "collectives": (
            "gpu,link,collective,n_ranks,n_nodes,bytes,time_us,source",
            "a100_sxm,nvlink,alltoall,8,1,1048576,50,",
        ),
    }
    for kind, lines in kinds.items():
        rows = table(tmp_path, *lines, name=f"{kind}.csv")
        assert rows.kind == kind
        call = read_calls(rows)[0]
        assert not isinstance(call, Skipped)
        assert (predict([rows])[0].predicted_us or 0) > 0


def test_command_line_answers_with_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`validate-ops --json` prints the contract's keys; without it a table of at most 80 columns."""
    rows = table(tmp_path, GEMM, square(), square("70", size=2048), square(gpu="x9000"))
    assert _run(["validate-ops", str(rows.path), "--json"], debug=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"index", "predicted_us", "measured_us", "ape", "source", "skipped_reason"} <= answer["rows"][0].keys()
    wanted = {
        "n",
        "n_skipped",
        "median_ape",
        "mean_ape",
        "p90_ape",
        "mean_bias",
        "baseline_mean_ape",
        "by_gpu",
        "by_op",
    }
    assert wanted <= answer["summary"].keys()
    assert max(map(len, table_text(predict([rows])).splitlines())) <= 80


def test_report_is_a_page(tmp_path: Path) -> None:
    """`--report` writes pictures of each family, and the table."""
    pytest.importorskip("plotly")
    rows, page = table(tmp_path, GEMM, square(), square("70", size=2048)), tmp_path / "page.html"
    assert _run(["validate-ops", str(rows.path), "--report", str(page)], debug=True) == 0
    text = page.read_text(encoding="utf-8")
    assert "gemm: predicted and measured microseconds" in text
    assert "training-sized" in text


DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not DATA.exists(), reason=f"no published timings in {DATA}")
@pytest.mark.parametrize(("kind", "most"), [("gemm", 0.1), ("attention", 0.14), ("elementwise", 0.08)])
def test_published_rows_are_predicted_better_than_by_a_constant_share(kind: str, most: float, tmp_path: Path) -> None:
    """On every 97th published row of training's sizes: within the errors stated, and below the constant share."""
    with gzip.open(DATA / f"ops_{kind}.csv.gz", "rt", newline="") as file:
        rows = [row for i, row in enumerate(csv.DictReader(file)) if i % 97 == 0]
    found = summary(predict([Table(tmp_path, kind, rows)]))["training_sized"]
    assert found["mean_ape"] < min(most, found["baseline_mean_ape"])


def test_calls_know_training_sizes(tmp_path: Path) -> None:
    """Products of at least 1024 rows and 512 columns and depth are such as training has."""
    calls = read_calls(table(tmp_path, GEMM, square(), square(size=512)))
    assert [call.usual for call in calls if isinstance(call, Call)] == [True, False]
