"""Whether plans stay below the memory limit they were made for: measured against predicted peak of tensor bytes.

    python -m benchmarks.byte_limits

Three small models on two and on four processes. For each, limits between what the leanest plan needs and what plain
data parallelism holds, the search free to choose; then pipelines written by hand, stage by stage. The peak is that of a
training step with AdamW, the most of all ranks. Prices are those of a device file, so that plans don't hang on timings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import ranks

if TYPE_CHECKING:
    from torch import nn

    from autopar.formulate.planner import Planner
    from autopar.graph import OpGraph
    from autopar.plan import PlanRecord
    from autopar.trace.models.spec import LoadedModel

RANKS, LIMITS, GLOBAL_BATCH = (2, 4), 10, 16
DEVICE = "epyc-9654"
MODELS = {
    "GPT-2, tied": "gpt:layers=4,hidden=64,heads=4,vocab=512,seq=32",
    "Llama, grouped queries": "llama:layers=4,hidden=64,heads=8,kv_heads=4,vocab=512,seq=32",
    "BERT with dropout": f"{__file__}:bert",
}
PIPELINES = {
    2: (
        "pp=2,microbatch_size=2",
        "pp=2,microbatch_size=2,schedule=gpipe",
        "pp=2,microbatch_size=8",
        "pp=2,microbatch_size=2,virtual_stages=2",
        "pp=2,microbatch_size=2,recompute=full",
        "pp=2,microbatch_size=1,schedule=zb",
        "pp=2,microbatch_size=2,schedule=zbv,recompute=full",
    ),
    4: (
        "pp=2,dp=2,microbatch_size=2,zero=1",
        "pp=2,dp=2,microbatch_size=2,zero=2",
        "pp=2,dp=2,microbatch_size=2,zero=3",
        "pp=2,dp=2,microbatch_size=1,zero=3,recompute=full",
        "pp=2,tp=2,microbatch_size=2",
        "pp=4,microbatch_size=2,schedule=gpipe,recompute=full",
        "pp=2,dp=2,microbatch_size=1,virtual_stages=2,zero=2",
        "pp=2,dp=2,microbatch_size=1,virtual_stages=2,zero=3",
        "pp=2,dp=2,microbatch_size=1,schedule=zbv,zero=3",
        "pp=2,tp=2,microbatch_size=2,schedule=dualpipev,recompute=selective",
    ),
}


@dataclass(frozen=True)
class Row:
    """A plan and its peaks, of each group of devices; `limit` is None where none was given."""

    model: str
    devices: int
    plan: str
    limit: int | None
    predicted: tuple[int, ...]
    measured: tuple[int, ...]

    @property
    def error(self) -> float:
        """What was predicted for the fullest group over what the fullest held, less 1."""
        return max(self.predicted) / max(self.measured) - 1

    @property
    def below(self) -> bool:
        """Whether the limit was kept."""
        return self.limit is None or max(self.measured) <= self.limit


def bert() -> tuple[nn.Module, dict[str, Any]]:
    """A BERT with a masked-language head, on the meta device, and inputs for it."""
    import torch
    import transformers

    config = transformers.BertConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.zeros(2, 32, dtype=torch.long)
    with torch.device("meta"):
        return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


# --- plans --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model to plan, and its trace."""

    name: str
    loaded: LoadedModel
    graph: OpGraph

    def planner(self, devices: int, limit: int | None = None, constraints: tuple[str, ...] = ()) -> Planner:
        """What plans it on so many devices under a limit."""
        from autopar.cluster import load_cluster
        from autopar.cost.roofline import RooflinePricer
        from autopar.formulate.planner import Planner
        from autopar.plan import POLICIES, Request

        cluster = load_cluster(f"{devices}x{DEVICE}")
        request = Request(
            self.name, cluster.name, cluster.device.name, devices, GLOBAL_BATCH, "fp32", POLICIES["fp32"], "adamw",
            memory_limit_bytes=limit, constraints=constraints,
        )  # fmt: skip
        return Planner(self.graph, cluster, RooflinePricer(cluster), request)


def load(name: str, spec: str) -> Model:
    """Build and trace a model."""
    from autopar.trace.capture import trace
    from autopar.trace.models.spec import load_model

    loaded = load_model(spec)
    return Model(name, loaded, trace(loaded.model, loaded.inputs, compute_dtype="float32"))


def spaced_limits(model: Model, devices: int, count: int, constraints: tuple[str, ...] = ()) -> list[int]:
    """Limits in equal ratios, from the least that has a plan up to what plain data parallelism holds."""
    from autopar.errors import InfeasibleError
    from autopar.formulate.config import ManualConfig

    config = ManualConfig.parse(f"dp={devices},microbatch_size={GLOBAL_BATCH // devices}")
    most = model.planner(devices).estimate(config).peak_tensor_bytes
    try:
        least = model.planner(devices, 1, constraints).plan().peak_tensor_bytes
    except InfeasibleError as error:
        (text,) = re.findall(r"a memory limit of ([\d.]+) MiB", str(error))
        least = int(float(text) * 2**20)
    return [round(least * (most / least) ** (i / (count - 1))) for i in range(count)]


def plans(model: Model, devices: int) -> Iterator[tuple[str, int | None, PlanRecord]]:
    """Plans with their names and limits: those the search chooses, then pipelines written by hand."""
    from autopar.formulate.config import ManualConfig

    for limit in spaced_limits(model, devices, LIMITS):
        record = model.planner(devices, limit).plan()
        yield in_short(record), limit, record
    for text in PIPELINES[devices]:
        yield text, None, model.planner(devices).estimate(ManualConfig.parse(text))


def in_short(record: PlanRecord) -> str:
    """The plan in some words."""
    from autopar.report.strategy import most_common

    stages = f"{len(record.stages)} stages {record.schedule}, " if record.pp_degree > 1 else ""
    return f"{stages}{record.num_microbatches} x {record.global_microbatch}, {most_common(record)}"


# --- peaks --------------------------------------------------------------------------------------------------------


def step_peak_bytes(record: PlanRecord, graph: OpGraph, loaded: LoadedModel) -> int:
    """On a rank: the most bytes of tensors that a training step holds."""
    from autopar.emit.peak import step_peak_tensor_bytes
    from autopar.trace.inputs import bind

    return step_peak_tensor_bytes(record, graph, loaded.model, bind(loaded.model, loaded.inputs).tensors)


def group_bytes(record: PlanRecord) -> tuple[int, ...]:
    """Predicted tensor bytes of each group of devices."""
    return tuple(sum(memory.values()) - memory.get("reserve", 0) for memory in record.costs.group_memory)


def fullest(record: PlanRecord, peaks: list[int]) -> tuple[int, ...]:
    """The most that a rank of each group of devices holds."""
    return tuple(max(peaks[rank] for rank in stage.devices) for stage in record.stages[: record.pp_degree])


def measure() -> None:
    """On each rank: rank 0 plans, all run the plans; rank 0 answers with a row a plan."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    devices, rows = dist.get_world_size(), []
    for name, spec in MODELS.items():
        model = load(name, spec)
        found = [list(plans(model, devices)) if dist.get_rank() == 0 else []]
        dist.broadcast_object_list(found)
        for words, limit, record in found[0]:
            peaks: list[int] = [0] * devices
            dist.all_gather_object(peaks, step_peak_bytes(record, model.graph, model.loaded))
            rows.append(Row(name, devices, words, limit, group_bytes(record), fullest(record, peaks)))
            print(_line(rows[-1]), file=sys.stderr, flush=True) if dist.get_rank() == 0 else None
    ranks.answer([asdict(row) for row in rows])
    dist.destroy_process_group()


# --- table --------------------------------------------------------------------------------------------------------


def _mib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**20:.2f}"


def _line(row: Row) -> str:
    predicted, measured = ("/".join(map(_mib, peaks)) for peaks in (row.predicted, row.measured))
    over = "" if row.below else "  ABOVE THE LIMIT"
    return f"{_mib(row.limit):>8s} {predicted:>20s} {measured:>20s} {row.error:7.1%}  {row.plan}{over}"


def _summary(what: str, rows: list[Row], errors: Callable[[Row], list[float]]) -> str:
    found = [abs(e) for row in rows for e in errors(row)]
    return f"{what}: largest error {max(found):.1%}, median {median(found):.1%}"


def rows_of(devices: int) -> list[Row]:
    """Plan and run everything on so many processes."""
    found = ranks.launch("benchmarks.byte_limits", devices)
    return [Row(**row | {k: tuple(row[k]) for k in ("predicted", "measured")}) for row in found]


def main() -> None:
    """Print the table and its summary."""
    rows: list[Row] = []
    for devices in RANKS:
        rows += rows_of(devices)
    for key in dict.fromkeys((row.model, row.devices) for row in rows):
        print(f"{key[0]}, batch {GLOBAL_BATCH}, {key[1]} processes; MiB a device, of a pipeline by group of devices")
        print(f"{'limit':>8s} {'predicted':>20s} {'measured':>20s} {'error':>7s}  plan")
        print("\n".join(_line(row) for row in rows if (row.model, row.devices) == key))
    searched = [row for row in rows if row.limit is not None]
    print(f"below the limit: {sum(row.below for row in searched)} of {len(searched)}")
    print(_summary("chosen plans", searched, lambda row: [row.error]))
    written = [row for row in rows if row.limit is None]
    print(_summary("stages of pipelines by hand", written, _stage_errors))


def _stage_errors(row: Row) -> list[float]:
    return [p / m - 1 for p, m in zip(row.predicted, row.measured, strict=True)]


if __name__ == "__main__":
    measure() if ranks.inside() else main()
