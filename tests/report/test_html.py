"""The page of a plan: what is in it, and that a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autopar.cost.orders import Shape
from autopar.cost.schedule import in_flight
from autopar.plan import Between, CarriedCosts, LayerCost, PlanRecord
from autopar.report.held import held_over_time
from autopar.report.html import write_report
from tests.report.test_explain import record
from tests.report.test_timeline import PASSES, STEP, costed

pytest.importorskip("plotly", reason="needs the extra `report`")
MEMORY = {"parameters": 8, "optimizer": 16, "gradients": 4, "saved": 100, "inputs": 0}
TITLES = ("In short", "Seconds of a step", "The step in time", "Memory by device", "Memory over time",
          "What the layers do", "Alternatives", "Where the seconds come from", "Assumptions", "In words")  # fmt: skip


def pipeline(groups: int = 3, microbatches: int = 5) -> PlanRecord:
    """A stage of two equal layers on each of so many groups of one device."""
    whole = record()
    stage = replace(
        whole.stages[0], devices=(0,), mesh=(), strategies=whole.stages[0].strategies[:1], assignment=(0, 0)
    )
    stage = replace(stage, strategies=(replace(stage.strategies[0], entry=(), exit=(), ops={}, relays={}),))
    stages = tuple(replace(stage, first_layer=2 * g, devices=(g,)) for g in range(groups))
    costs = tuple(LayerCost(g, 0, 2, PASSES, STEP, MEMORY) for g in range(groups))
    carried = CarriedCosts(costs, (), Between((0,) * (groups - 1)), (0.0,) * (groups - 1), (0.0,) * groups,
                           ({"parameters": 16, "activations": 200},) * groups)  # fmt: skip
    names = tuple(f"layer.{i}" for i in range(2 * groups))
    return replace(
        whole, stages=stages, pp_degree=groups, schedule="1f1b", num_microbatches=microbatches, layer_names=names,
        costs=carried, step_time_s=2 * 0.038 * (microbatches + groups - 1) + 2 * 0.007,
    )  # fmt: skip


def test_bytes_kept_follow_the_schedule() -> None:
    """Each group of a 1F1B pipeline keeps its states, and at most what its microbatches in flight saved."""
    plan, shape = pipeline(), Shape("1f1b", 3, 1, 5)
    for group, line in enumerate(held_over_time(plan)):
        sizes = [moment.size_bytes for moment in line]
        assert (sizes[0], sizes[-1], sizes[-2]) == (2 * 24, 2 * 24, 2 * 24 + 2 * 4)
        assert max(sizes) == 2 * 24 + 2 * 4 + 2 * 100 * in_flight(shape)[group]
        assert all(moment.at_s <= then.at_s for moment, then in pairwise(line))


def plans(tmp_path: Path) -> list[Path]:
    """Pages of a plan of one stage with an alternative, and of a pipeline."""
    whole = replace(costed(), memory_by_category={"parameters": 1 << 30, "activations": 2 << 30, "reserve": 1 << 30})
    files = [tmp_path / "one.html", tmp_path / "pipeline.html"]
    write_report(replace(whole, alternatives=(replace(whole, step_time_s=2.0),)), files[0])
    write_report(pipeline(), files[1])
    return files


def drawn(page: str) -> list[list[dict[str, Any]]]:
    """The traces of each picture of a page."""
    return [json.loads(data) for data in re.findall(r'Plotly\.newPlot\("picture-[\d-]+", (\[.*?\]), \{"', page)]


def test_the_page_stands_alone(tmp_path: Path) -> None:
    """Every section is there, nothing is fetched from elsewhere, and the pictures hold the plan's own figures."""
    one, piped = (file.read_text() for file in plans(tmp_path))
    assert re.findall(r"<h2>(.*?)</h2>", one) == list(TITLES)
    assert re.findall(r"<h2>(.*?)</h2>", piped) == [title for title in TITLES if title != "Alternatives"]
    for page in (one, piped):
        assert re.findall(r"<(?:link|img|iframe|script)[^>]+(?:src|href)=", page) == []
    seconds = {trace["name"]: trace["x"] for trace in drawn(one)[0]}
    kinds = costed().time_by_kind_s
    assert seconds["exposed communication"] == pytest.approx([1e3 * kinds["communication"]])
    bars = [trace for trace in drawn(piped)[1] if trace["name"] == "forward"]
    assert (len(bars[0]["x"]), set(bars[0]["y"])) == (15, {"group 0", "group 1", "group 2"})
    (heat,) = drawn(piped)[4]
    assert dict(zip(heat["y"], heat["text"], strict=True))["stage"] == [0, 0, 1, 1, 2, 2]


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    """In a real browser without a network every picture is drawn, and the console has no errors."""
    for file in plans(tmp_path):
        command = [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom", f"file://{file}",
        ]  # fmt: skip
        found = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
        assert [line for line in found.stderr.splitlines() if "CONSOLE" in line] == []
        pictures = re.findall(r'<div id="picture-[\d-]+"[^>]*class="js-plotly-plot"', found.stdout)
        assert len(pictures) == len(drawn(file.read_text()))
        assert found.stdout.count('class="main-svg"') >= len(pictures)
        assert found.stdout.count('class="point"') > 20
