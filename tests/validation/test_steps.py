"""Training and memory rows: what is read of them, that none ends the command, and what is said of all together."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cli.main import _run
from autopar.cluster import all_devices
from autopar.errors import ConfigError
from autopar.rows import STEP_KINDS, Table, read_tables
from autopar.validation.public_models import MODELS
from autopar.validation.steps import PredictedStep, ReadRow, predict_steps, read_rows
from autopar.validation.summaries import LEAST_PLANS, summary
from autopar.validation.words import Zero, device_in, framework_in, zero_in
from tests.examples import examples

ROW = {
    "row_id": "a", "source_id": "lab", "model_name": "llama", "arch": "llama", "layers": "32", "hidden": "4096",
    "heads": "32", "kv_heads": "8", "ffn_hidden": "14336", "vocab": "128256", "seq_len": "8192", "gpu": "H100-80GB-SXM",
    "gpus": "64", "gpus_per_node": "8", "dtype": "bf16", "framework": "Megatron-LM", "dp": "16", "tp": "4", "pp": "1",
    "cp": "1", "micro_batch": "1", "global_batch_seqs": "128", "step_time_s": "5", "status": "ok",
}  # fmt: skip


def predict(*rows: dict[str, str], kind: str = "training") -> list[PredictedStep]:
    return predict_steps([Table(Path("rows.csv"), kind, [ROW | row for row in rows])])


@pytest.mark.parametrize(
    ("text", "zero"),
    [
        ("1 (optimizer states over 8 dp ranks)", Zero(1, 8)), ("1 (optimizer states over all dp)", Zero(1)),
        ("fsdp2 (shard 64)", Zero(3, 64)), ("fsdp2 (full shard)", Zero(3)), ("fsdp(shard group 128)", Zero(3, 128)),
        ("hsdp", Zero(3, -1)), ("ddp/distributed-optimizer", Zero(1)), ("distributed optimizer (1)", Zero(1)),
        ("2", Zero(2)), ("ZeRO-2", Zero(2)), ("SHARD_GRAD_OP", Zero(2)),
        ("FULL_SHARD", Zero(3)), ("NO_SHARD", Zero(0)), ("zero stage 3", Zero(3)), ("ddp", Zero(0)),
    ],
)  # fmt: skip
def test_words_for_zero(text: str, zero: Zero) -> None:
    """What sources write for the sharding of states is read as a level and a number of ranks."""
    assert zero_in(text) == zero


def test_longest_alias_wins() -> None:
    """A device's and a framework's most specific name in a text decides; what isn't known is said."""
    assert device_in("H100-96GB-HBM2e (500W)")[0].name == "h100-96gb"
    assert device_in("A100 (unlabelled)")[0].name == "a100-80gb"
    assert device_in("A100-SXM4-40GB")[0].name == "a100-40gb"
    assert device_in("NVIDIA A100 40GB PCIe")[0].name == "a100-40gb-pcie"
    named = {"NeMo AutoModel (PyTorch FSDP2) TE + DeepEP": "automodel", "Megatron-LM v1.1.5 + ZeRO-3": "deepspeed"}
    for text, name in named.items():
        found = framework_in(text)
        assert found is not None
        assert found.name == name
    assert framework_in("homemade") is framework_in("") is None
    for device in all_devices():
        for name in (device.name, *device.aliases):
            assert device_in(name)[0].name == device.name
    with pytest.raises(ConfigError, match="X9000"):
        device_in("X9000")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "X9000"}, "X9000"), ({"zero_stage": "sometimes"}, "sometimes"), ({"dtype": "int4"}, "int4"),
        ({"tp": "3"}, "3"), ({"layers": ""}, "layers"), ({"schedule": "random"}, "random"), ({"dp": "7"}, "dp"),
        ({"arch": "hybrid-mamba"}, "mamba"), ({"gpus": "many"}, "many"), ({"recompute": "perhaps"}, "perhaps"),
        ({"global_batch_seqs": "8"}, "dp=16"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_skipped_with_its_reason(change: dict[str, str], reason: str) -> None:
    """A row whose words aren't known is left out with the word; the row beside it is predicted."""
    bad, good = predict(change, {})
    assert bad.skipped_reason is not None
    assert reason in bad.skipped_reason
    assert bad.predicted_step_time_s is None
    assert good.predicted_step_time_s
    assert good.ape is not None


def test_yes_and_no_in_words() -> None:
    """What is yes or no may be so in words: the same prediction as with 1 and 0."""
    columns = ("gated_mlp", "tied_embeddings", "sequence_parallel", "flash_attention")
    words, numbers = ([dict.fromkeys(columns, value) for value in values] for values in (("True", "no"), ("1", "0")))
    seconds = [row.predicted_step_time_s for row in predict(*words)]
    assert seconds == [row.predicted_step_time_s for row in predict(*numbers)]
    assert None not in seconds
    assert len({*seconds}) == 2


def test_no_row_ends_the_command() -> None:
    """Whatever stands in a column, a row is predicted with finite figures or skipped with a reason."""
    odd = ("", "0", "-1", "1e309", "nan", "2.5", "999999999", "x,y", "(1)")
    rows = [{column: value} for column, value in product(ROW, odd) if column != "row_id"]
    rows += [{"experts": "128", "topk": value, "ep": value} for value in odd]
    for kind in ("training", "memory"):
        for row in predict(*rows, kind=kind):
            figures = (row.predicted_step_time_s, row.predicted_peak_memory_bytes)
            assert row.skipped_reason or all(figure is not None and 0 < figure < 1e30 for figure in figures)


ODD = st.sampled_from(
    (
        "", " ", "0", "-1", "1", "3", "7", "64", "1e3", "4,096", "nan", "inf", "none", "unknown", "n/a", "TRUE", "1.5",
        "8x", "32B", "ZeRO-3 + offload", "stage 1", "DDP", "bf16-mixed", "O1", "tf32", "int8", "H200", "h100 sxm5 80gb",
        "NVIDIA A100-SXM4-40GB", "GB200 NVL72", "MI300X", "TPU v5e", "910B", "interleaved 1F1B", "ZB-2p", "every layer",
        "128k", "Horovod", "\u00b2", "\uff18", "x" * 500,
    )
)  # fmt: skip


BESIDE = (
    "zero_stage", "recompute", "schedule", "virtual_stages", "experts", "topk", "ep", "sequence_parallel",
    "flash_attention", "interconnect_inter", "peak_mem_gb", "component", "mem_kind", "oom",
)  # fmt: skip
"""Columns that `ROW` leaves empty."""


@examples(300)
@given(st.dictionaries(st.sampled_from((*ROW, *BESIDE)), ODD, max_size=6))
def test_odd_rows_are_refused_in_words(change: dict[str, str]) -> None:
    """Several odd columns at once: finite figures that JSON can hold, or a reason that was written for it.

    None is refused because something broke on the way.
    """
    for kind in ("training", "memory"):
        (row,) = found = predict(change, kind=kind)
        json.dumps([row.to_json(), summary(found)], allow_nan=False)
        assert row.skipped_reason or (row.predicted_step_time_s and row.predicted_peak_memory_bytes)
        assert "can't be predicted" not in (row.skipped_reason or "")


def test_a_table_as_spreadsheets_write_it(tmp_path: Path) -> None:
    """A byte order mark, blanks around names of columns, thousands apart and words for nothing change no figure."""
    named = ROW | {"hidden": "4,096", "recompute": "n/a", "micro_batch": "not stated"}
    text = "\ufeff" + ", ".join(named) + "\n" + ",".join(f'"{value}"' for value in named.values())
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    (row,) = predict_steps(read_tables([tmp_path / "rows.csv"], STEP_KINDS))
    (plain,) = predict({})
    assert row.row_id == "a"
    assert row.predicted_step_time_s == plain.predicted_step_time_s


def test_what_is_left_open_is_assumed_and_listed() -> None:
    """An empty column takes the framework's default, and the answer says so."""
    (row,) = predict({"vocab": "", "micro_batch": "", "zero_stage": "", "recompute": ""})
    assert {"vocab=32000", "micro_batch=1", "zero_stage=1", "recompute=none"} <= set(row.assumed)
    (alone,) = predict({"framework": "LitGPT", "gpus": "1", "dp": "1", "tp": "1", "global_batch_seqs": ""})
    assert "recompute=none" in alone.assumed  # its checkpointing comes with FSDP
    (looped,) = predict({"pp": "4", "dp": "4", "schedule": "interleaved-1f1b"})
    assert "virtual_stages=2" in looped.assumed
    (full,) = predict({"zero_stage": "0", "recompute": "full"})
    assert not any(a.startswith(("vocab", "zero", "recompute")) for a in full.assumed)


@pytest.mark.parametrize("name", MODELS)
def test_public_models_have_the_size_of_their_name(name: str) -> None:
    """A public model's dims come to the parameters that its name counts, as far as names round."""
    counted = re.search(r"([\d.]+)b\b", name)
    (row,) = read_rows([Table(Path("rows.csv"), "training", [{"model_name": name, "gpu": "h100", "gpus": "8"}])])
    assert isinstance(row, ReadRow)
    if counted:
        assert row.run.shape.num_params / 1e9 == pytest.approx(float(counted[1]), rel=0.3)


def test_measured_times_of_several_kinds() -> None:
    """Tokens a second stand for a missing time; inverted times are summed up apart; oom rows aren't scored."""
    timed, by_rate, inverted, out = predict(
        {}, {"step_time_s": "", "tokens_per_s_per_gpu": str(128 * 8192 / 64 / 4)},
        {"step_time_s": "", "step_time_est_s": "6"}, {"status": "oom"},
    )  # fmt: skip
    assert timed.measured_step_time_s == 5
    assert by_rate.measured_step_time_s == pytest.approx(4)
    assert inverted.estimated
    assert inverted.measured_step_time_s == 6
    assert out.ape is None
    assert out.oom
    found = summary([timed, by_rate, inverted, out])
    assert (found["n"], found["estimated"]["n"]) == (2, 1)


def test_bytes_in_the_unit_of_the_tool() -> None:
    """A gigabyte is 1e9 bytes, a whole number that nvidia-smi shows is GiB; a component is compared with its own."""
    whole, shown, states = predict(
        {"component": "total peak", "peak_mem_gb": "60"},
        {"component": "total peak", "peak_mem_gb": "60", "mem_kind": "nvidia-smi"},
        {"component": "model states", "peak_mem_gb": "30", "mem_kind": "torch allocated"},
        kind="memory",
    )  # fmt: skip
    assert whole.measured_peak_memory_bytes == 60e9
    assert shown.measured_peak_memory_bytes == 60 * 2**30
    assert states.predicted_component_bytes
    assert states.predicted_component_bytes < (states.predicted_peak_memory_bytes or 0.0)


def test_parts_of_memory_by_their_words() -> None:
    """Parts that a row names add up to their sum, whatever they are called; a word for none is refused."""
    names = ("Model weights", "gradients", "Optimizer states", "model states", "weights + grads", "Peak (max)", "n/a")
    rows = predict(*({"component": name, "mem_kind": "unknown"} for name in (*names, "rumour")), kind="memory")
    weights, gradients, optimizer, states, both = (row.predicted_component_bytes or 0.0 for row in rows[:5])
    assert min(weights, gradients, optimizer) > 0
    assert (states, both) == pytest.approx((weights + gradients + optimizer, weights + gradients))
    assert rows[5].is_total
    assert rows[5].predicted_peak_memory_bytes == rows[6].predicted_peak_memory_bytes
    assert "rumour" in (rows[7].skipped_reason or "")


def test_words_for_how_a_run_ended() -> None:
    """A run that failed has no step time, nor one that ran out of memory; words for nothing change nothing."""
    words = ("OK", "unknown", "Completed", "failed", "CUDA out of memory")
    ok, unknown, done, failed, out, flagged = predict(*({"status": word} for word in words), {"oom": "true"})
    assert ok.ape == unknown.ape == done.ape
    assert (failed.ape, out.ape, flagged.ape) == (None, None, None)
    assert [row.oom for row in (ok, failed, out, flagged)] == [False, False, True, True]


def test_a_run_that_ended_for_memory_has_no_error() -> None:
    """What was shown before memory ran out is no peak: it counts neither in all nor by source."""
    ran, out = predict({"peak_mem_gb": "60"}, {"peak_mem_gb": "60", "status": "oom"})
    found = summary([ran, out])["memory"]
    assert (found["n"], found["n_oom"]) == (1, 1)
    assert [source["n"] for source in found["by_source"].values()] == [1]


def _plan(group: str, predicted: float, measured: float, plan: str = "") -> PredictedStep:
    return PredictedStep(
        "r", "training", group=(group,), plan=(plan or str(predicted),), predicted_step_time_s=predicted,
        measured_step_time_s=measured, ape=abs(predicted / measured - 1), baseline_s=1.0, closed_form_s=1.0,
    )  # fmt: skip


def test_ranking_by_hand() -> None:
    """Tau and regret of two groups, worked out on paper.

    Group a: of three pairs one is within 5 %; of the two others one is in order, so tau 0, and the plan taken, of 11 s,
    loses 10 %. Group b: all in order. A group of two plans isn't ranked.
    """
    a = [_plan("a", 1, 11), _plan("a", 2, 10), _plan("a", 3, 11.3)]
    b = [_plan("b", 1, 1), _plan("b", 2, 2), _plan("b", 3, 3)]
    found = summary([*a, *b, _plan("c", 2, 1), _plan("c", 1, 2)])
    assert LEAST_PLANS == 3
    assert found["n_groups"] == 2
    assert found["kendall_tau"] == pytest.approx((0 + 1) / 2)
    assert found["mean_regret"] == pytest.approx((0.1 + 0) / 2)
    assert found["near_best"] == pytest.approx(0.5)
    assert found["baselines"]["constant"]["kendall_tau"] == 0  # equal predictions rank nothing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of four plans."""
    rows = [ROW | {"tp": t, "dp": str(64 // int(t))} for t in "1248"]
    found = tmp_path / "rows.csv"
    found.write_text("\n".join([",".join(ROW), *(",".join(row.values()) for row in rows)]))
    return found


def test_page(path: Path, tmp_path: Path) -> None:
    """The command writes a page to look at."""
    pytest.importorskip("plotly", reason="needs the extra `report`")
    page = tmp_path / "page.html"
    assert _run(["validate", str(path), "--report", str(page)], debug=True) == 0
    assert "<pre>" in page.read_text()


def test_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the table in 80 columns, or the contract's JSON alone."""
    assert _run(["validate", str(path)], debug=True) == 0
    text = capsys.readouterr().out
    assert "lab" in text
    assert max(map(len, text.splitlines())) <= 80
    assert _run(["validate", str(path), "--json"], debug=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"n", "n_skipped", "median_ape", "mean_ape", "p90_ape", "mean_bias", "baseline_median_ape", "by_source",
            "by_gpu", "kendall_tau", "mean_regret", "estimated", "memory"} <= set(found["summary"])  # fmt: skip
    assert {"row_id", "predicted_step_time_s", "measured_step_time_s", "ape", "predicted_peak_memory_bytes",
            "predicted_component_bytes", "measured_peak_memory_bytes", "feasible", "assumed",
            "skipped_reason"} <= set(found["rows"][0])  # fmt: skip
    assert read_tables([path], STEP_KINDS)[0].kind == "training"


@pytest.mark.parametrize("text", ["-2", "nan", "inf", "soon"])
def test_measurements_that_are_none_are_said(text: str) -> None:
    """The row is predicted, compared with nothing, and what was left out is named."""
    (row,) = predict({"step_time_s": text})
    assert row.predicted_step_time_s
    assert row.measured_step_time_s is None
    assert any(text in said and "step_time_s" in said for said in row.assumed)


def test_no_devices() -> None:
    """A number of devices below 1 is named as such."""
    (row,) = predict({"gpus": "0"})
    assert "gpus=0: must be at least 1" in (row.skipped_reason or "")
