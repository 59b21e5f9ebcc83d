"""Commands that plan, end to end on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cluster import load_cluster
from autopar.scaling import sizes
from tests.test_cli import run

SMALL = "gpt:layers=2,hidden=64,heads=2,vocab=128,seq=32"
WHERE = ("--cluster", "2xa100-80gb", "--global-batch", "8")
KEYS = """step_time_s tokens_per_s tokens_per_s_per_device tflops_per_device mfu peak_memory_bytes memory_by_category
peak_tensor_bytes feasible runnable exact masks num_microbatches microbatch_size global_microbatch pp_degree stages
schedule exposed_comm_s bubble_s lower_bound_s gap cost_sources assumptions alternatives trace_s search_s num_params
energy_j input_s placement autopar_version plan_format"""
"""What users read from the JSON of a plan."""


def test_plan_estimate_and_explain_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The JSON has every key; a saved plan explains as it did when made; categories add up to the peak."""
    file = tmp_path / "plan.json"
    code, out, _ = run(capsys, "plan", SMALL, *WHERE, "--json", "-o", str(file))
    found = json.loads(out)
    assert code == 0
    assert [key for key in KEYS.split() if key not in found] == []
    assert json.loads(file.read_text()) == found
    assert sum(found["memory_by_category"].values()) == found["peak_memory_bytes"]
    assert found["lower_bound_s"] <= found["step_time_s"]
    code, text, _ = run(capsys, "explain", str(file))
    assert code == 0
    assert text.startswith("plan by autopar")
    assert max(map(len, text.splitlines())) <= 80


def test_estimate_of_a_hand_written_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """An estimate has the same keys, no bound, and the degrees that were asked for."""
    code, out, _ = run(capsys, "estimate", SMALL, *WHERE, "--config", "dp=2,zero=1,microbatch_size=2", "--json")
    found = json.loads(out)
    assert code == 0
    assert [key for key in KEYS.split() if key not in found] == []
    assert (found["lower_bound_s"], found["gap"]) == (None, None)
    assert (found["num_microbatches"], found["microbatch_size"], found["global_microbatch"]) == (2, 2, 4)
    tokens_bytes = 2 * 4 * 32 * 8  # inputs and labels of 4 of the 8 samples
    assert found["input_s"] == pytest.approx(tokens_bytes / load_cluster("2xa100-80gb").device.host_bytes_per_s)


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` exits with 3 and names the limit; `estimate` answers that it is not feasible."""
    limit = ("--memory-limit", "64KiB")
    code, out, err = run(capsys, "plan", SMALL, *WHERE, *limit)
    assert (code, out) == (3, "")
    assert "memory" in err
    code, out, _ = run(capsys, "estimate", SMALL, *WHERE, *limit, "--config", "dp=2", "--json")
    assert (code, json.loads(out)["feasible"]) == (0, False)


UNTRACEABLE = """
import torch

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x).sum()
        return y if y.item() > 0 else -y

def make():
    return Branches(), {"x": torch.zeros(2, 4)}
"""


def test_untraceable_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model with a branch on data exits with 4 and names the line."""
    file = tmp_path / "branches.py"
    file.write_text(UNTRACEABLE)
    code, _, err = run(capsys, "plan", f"{file}:make", *WHERE)
    assert code == 4
    assert "branches.py" in err.replace("\n  ", " ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "hf:/absent/config.json", *WHERE], "/absent/config.json"),
        (["plan", SMALL + ",colour=2", *WHERE], "colour"),
        (["plan", "gpt5", *WHERE], "'gpt5' is unknown"),
        (["plan", SMALL, *WHERE, "--dtype", "int3"], "int3"),
        (["plan", SMALL, *WHERE, "--constraint", "colour=2"], "colour"),
        (["plan", SMALL, *WHERE, "--memory-limit", "much"], "much"),
        (["plan", SMALL, *WHERE, "--what-if", "network=fast"], "network=fast"),
        (["plan", SMALL, *WHERE, "--objective", "cost_per_token"], "has no price_per_hour"),
        (["scale", SMALL, "--devices", "64..8", "--device", "a100", "--global-batch", "8"], "devices='64..8'"),
        (["scale", SMALL, "--devices", "20", "--device", "a100", "--global-batch", "8"], "multiple of the 8 devices"),
        (["estimate", SMALL, *WHERE, "--config", "dp=3"], "dp*tp*cp*pp = 3*1*1*1 = 3, but 2 devices"),
        (["estimate", SMALL, *WHERE, "--config", "dp=2,colour=2"], "unknown key 'colour'"),
    ],
)
def test_mistakes_of_planning(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """A mistake in any argument exits with 2 and is named."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_what_if_changes_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """With a hundredth of the compute rate a plan is slower, and says what it takes on the cluster as it is."""
    config = ("--config", "dp=2", "--json")
    _, usual, _ = run(capsys, "plan", SMALL, *WHERE, *config)
    _, slower, _ = run(capsys, "plan", SMALL, *WHERE, *config, "--what-if", "compute=0.01")
    before, after = json.loads(usual), json.loads(slower)
    assert after["step_time_s"] > before["step_time_s"]
    assert after["request"]["cluster"] == "2xa100-80gb with compute=0.01"
    (said,) = (text for text in after["assumptions"] if "as it is" in text)
    assert f"{before['step_time_s']:.4g} s a step" in said


def test_scale(capsys: pytest.CaptureFixture[str]) -> None:
    """Each size has the plan that planning finds for it; the return is what the devices added bring."""
    where = ("--device", "a100-80gb", "--global-batch", "8")
    code, out, err = run(capsys, "scale", SMALL, "--devices", "1..2", *where, "--json")
    one, two = json.loads(out)["sizes"]
    assert (code, one["devices"], two["devices"], one["marginal_return"]) == (0, 1, 2, None)
    assert "planning 2xa100-80gb" in err
    _, out, _ = run(capsys, "plan", SMALL, *WHERE, "--json")
    assert two["plan"]["step_time_s"] == json.loads(out)["step_time_s"]
    rates = [1 / size["plan"]["step_time_s"] for size in (one, two)]
    assert two["marginal_return"] == pytest.approx((rates[1] - rates[0]) / rates[0])


def test_scale_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """A size without a plan has the reason in its place; sizes double up to the last."""
    where = ("--device", "a100-80gb", "--global-batch", "8", "--memory-limit", "64KiB")
    code, out, _ = run(capsys, "scale", SMALL, "--devices", "1", *where)
    assert code == 0
    assert "memory is the binding limit" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert (sizes("8..64"), sizes("8..48"), sizes("3")) == ([8, 16, 32, 64], [8, 16, 32, 48], [3])


def test_diff_and_check(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plan files are compared; one is priced anew elsewhere, and refused with 3 where the memory is too small."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "user"))
    first, second, trace = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "trace.json"
    run(capsys, "plan", SMALL, *WHERE, "--config", "dp=2,zero=1", "-o", str(first), "--timeline", str(trace))
    run(capsys, "plan", SMALL, *WHERE, "--config", "pp=2,microbatch_size=2", "-o", str(second))
    assert json.loads(trace.read_text())["traceEvents"]
    code, text, _ = run(capsys, "diff", str(first), str(second))
    assert code == 0
    assert "batch 2 ways, ZeRO-1" in text
    assert max(map(len, text.splitlines())) <= 80
    for file in (first, second):
        code, out, _ = run(capsys, "check", str(file), "--cluster", "8xh100-80gb", "--json")
        assert (code, json.loads(out)["request"]["cluster"]) == (0, "8xh100-80gb")
    run(capsys, "devices", "add", "tiny", "--tflops", "1", "--bandwidth-gbs", "9", "--memory-gib", "0.0001")
    code, out, err = run(capsys, "check", str(first), "--cluster", "2xtiny")
    assert (code, out) == (3, "")
    assert "memory is the binding limit" in err
    code, _, err = run(capsys, "check", str(first), "--cluster", "1xh100-80gb")
    assert code == 2
    assert "runs on 2 devices" in err
