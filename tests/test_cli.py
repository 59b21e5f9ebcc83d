"""The command line: its surface, its exit codes and what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import main

COMMANDS = {
    "plan": "--cluster --global-batch --seq-len --dtype --optimizer --memory-limit --config --constraint --objective "
    "--profile --top --allow-inexact --what-if --seed --time-limit -o --report --timeline --json",
    "estimate": "--cluster --global-batch --config --seq-len --dtype --optimizer --memory-limit --profile --straggler "
    "-o --timeline --json",
    "scale": "--devices --device --global-batch --seq-len --dtype --optimizer --memory-limit --constraint --objective "
    "--profile --time-limit --json",
    "validate": "--report --json",
    "validate-ops": "--fit --exclude-device --report --json",
    "profile": "--cluster --global-batch --device -o",
    "profile-collectives": "-o",
    "search": "--workers --resume --ray",
    "explain": "",
    "diff": "",
    "check": "--cluster",
    "export": "--to -o",
    "devices": "",
    "devices add": "--tflops --bandwidth-gbs --memory-gib",
    "clusters": "",
    "models": "",
}
"""Every command and option that users rely on."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user folder of the test's own."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "user"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


@pytest.mark.parametrize("command", COMMANDS)
def test_surface(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Every command has the options that users rely on, and its help fits 80 columns."""
    code, out, _ = run(capsys, *command.split(), "--help")
    assert code == 0
    assert [option for option in COMMANDS[command].split() if f"{option} " not in out and f"{option}," not in out] == []
    assert max(map(len, out.splitlines())) <= 80


def test_no_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """The commands are those of the frozen list: adding one means adding it here."""
    _, out, _ = run(capsys, "--help")
    listed = {line.split()[0] for line in out.split("Commands:")[1].splitlines() if line.strip()}
    assert listed == {command for command in COMMANDS if " " not in command}


def test_start_is_quick_and_without_torch() -> None:
    """`autopar --help` takes less than 0.6 s of CPU time, and importing the command line doesn't load torch."""
    check = "import sys, autopar.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
    before = os.times()
    subprocess.run([sys.executable, "-m", "autopar", "--help"], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert used_s < 0.6


def test_torch_free_modules() -> None:
    """The modules that plans are read and explained with, or others' predicted by, don't load torch."""
    modules = "autopar.asked, autopar.frameworks, autopar.pricing, "
    modules += "autopar, autopar.plan, autopar.report.explain, autopar.cluster, autopar.graph, autopar.engine"
    check = f"import sys, autopar.errors, autopar.jobs.run, autopar.rows, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "Missing argument 'MODEL'"),
        (["nonsense"], "No such command 'nonsense'"),
        (["plan", "gpt:", "--cluster", "8xa100-80gb", "--global-batch", "0"], "greater than or equal to 1"),
        (["estimate", "gpt:", "--cluster", "8xa1000", "--global-batch", "8", "--config", "dp=8"], "did you mean a100"),
        (["explain", "absent.json"], "absent.json: can't be read as a plan"),
        (["devices", "add", "x", "--tflops=-1", "--bandwidth-gbs=1", "--memory-gib=1"], "-1.0 is not allowed"),
        (["search", "absent.toml"], "absent.toml: can't be read"),
        (["validate", "absent.csv"], "absent.csv: can't be read"),
        (["plan", "x", "--cluster", "8xa100", "--global-batch", "8", "-o", "no/where.json"], "folder that exists"),
    ],
)
def test_usage_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """A mistake exits with 2, is said on standard error within 80 columns, without a traceback."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    assert "Traceback" not in err
    assert max(map(len, err.splitlines())) <= 80


def test_errors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json a failure is one JSON document on standard output and nothing else."""
    code, out, err = run(capsys, "plan", "x", "--cluster", "8xnothing", "--global-batch", "8", "--json")
    error = json.loads(out)["error"]
    assert (code, err, error["kind"], error["exit_code"]) == (2, "", "ConfigError", 2)
    assert "'nothing' is not known" in error["message"]


def test_one_rank_prints_the_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun a failure that all ranks have is one JSON document; all exit with its code."""
    documents = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        code, out, _ = run(capsys, "explain", "absent.json", "--json")
        assert code == 2
        documents += out.splitlines()
    assert len(documents) == 1


def test_reports_that_cannot_be_written_are_refused_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without plotly `plan --report` is refused before the model is looked at, and writes no other file either."""
    monkeypatch.setattr("autopar.cli.answer.find_spec", lambda _name: None)
    file = tmp_path / "plan.json"
    where = ("--cluster", "8xa100", "--global-batch", "8")
    code, _, err = run(capsys, "plan", "no-such-model", *where, "--report", str(tmp_path / "r.html"), "-o", str(file))
    assert code == 2
    assert "pip install 'autopar[report]'" in err
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """--debug adds the traceback, wherever it stands."""
    _, _, err = run(capsys, "explain", "absent.json", "--debug")
    assert "Traceback" in err


def test_devices_added_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """A device that was added is listed with its figures, and clusters can be made of it."""
    code, _, _ = run(
        capsys, "devices", "add", "mine", "--tflops", "100", "--bandwidth-gbs", "900", "--memory-gib", "48"
    )
    assert code == 0
    _, out, _ = run(capsys, "devices")
    assert [line.split() for line in out.splitlines() if line.startswith("mine")] == [
        ["mine", "48", "900", "100.0", "100.0", "6.25"]
    ]
    _, out, _ = run(capsys, "devices", "--json")
    assert "mine" in [device["name"] for device in json.loads(out)]


@pytest.mark.parametrize("command", ["devices", "clusters", "models"])
def test_lists_fit_the_terminal(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """The lists fit 80 columns and carry no colour codes."""
    code, out, _ = run(capsys, command)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
