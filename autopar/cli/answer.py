"""What commands return and share: the answer, reading arguments, writing results."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autopar.errors import ConfigError


@dataclass(frozen=True)
class Answer:
    """What a command found out: as text for people, as plain data for `--json`; `exit_code` where that isn't 0."""

    text: str
    data: Any
    as_json: bool = False
    exit_code: int = 0


@contextmanager
def work() -> Iterator[None]:
    """Whatever libraries print while working goes to standard error."""
    with redirect_stdout(sys.stderr):
        yield


def speaks() -> bool:
    """Whether this process is the one of a torchrun job that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Tell how far the work is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def load(spec: str, seq_len: int | None) -> dict[str, Any]:
    """The model and its inputs, as planning wants them."""
    from autopar.trace.models.spec import load_model

    loaded = load_model(spec, seq_len=seq_len)
    return {"model": loaded.model, "example_inputs": loaded.inputs, "name": loaded.name}


def outlined(spec: str, seq_len: int | None) -> dict[str, Any]:
    """As `load`, but dims stay dims: what is predicted from them alone needs no model."""
    from autopar.trace.models.dimspec import FAMILIES

    if spec.partition(":")[0] not in FAMILIES:
        return load(spec, seq_len)
    from autopar.frameworks import shape_of_spec

    return {"model": shape_of_spec(spec, seq_len), "example_inputs": {}, "name": spec}


def cluster_of(name: str, changes: str | None) -> Any:
    """The cluster of `--cluster`, changed by `--what-if`; `local` is left to planning, which knows the job."""
    if name == "local":
        if changes:
            raise ConfigError(f"--what-if {changes!r}: not for the local machine; name a cluster")
        return name
    from autopar.cluster import load_cluster, what_if

    return what_if(load_cluster(name), changes) if changes else load_cluster(name)


def config_of(text: str) -> Any:
    """The plan of `--config`."""
    from autopar.formulate.config import ManualConfig

    return ManualConfig.parse(text)


def check_targets(*paths: Path | None) -> None:
    """Refuse files that can't be written before the work begins."""
    bad = [path for path in paths if path and (path.is_dir() or not path.absolute().parent.is_dir())]
    if bad:
        raise ConfigError(*(f"{path}: can't be written; give a file in a folder that exists" for path in bad))


def require_plotly(report: Path | None) -> None:
    """Refuse a report that can't be written before the work begins."""
    if report and find_spec("plotly") is None:
        raise ConfigError("--report needs plotly: pip install 'autopar[report]'")


def write(found: Any, output: Path | None, timeline: Path | None, report: Path | None = None) -> None:
    """Write a plan to the files that were asked for, once a job."""
    if not speaks():
        return
    if output:
        found.save(output)
    if timeline:
        found.timeline(timeline)
    if report:
        found.report(report)
