"""Plans stay below the byte limit they were made for, and are near what was predicted: real processes, measured."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.formulate.config import ManualConfig
from autopar.formulate.record.carried import carried_work
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from autopar.trace.models.spec import LoadedModel
from benchmarks.byte_limits import MODELS, Model, load, rows_of, spaced_limits, step_peak_bytes
from tests.pool import Pool

PIPED = ("pp=2", "microbatch_size=2")
"""Constraints that leave ZeRO, tensor parallelism, recomputation and the cuts to the search."""


@pytest.fixture(scope="module", params=["GPT-2, tied", pytest.param("Llama, grouped queries", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Model:
    """A small model and its trace."""
    return load(request.param, MODELS[request.param])


def test_pipelines_under_limits_stay_below(pool: Pool, model: Model) -> None:
    """At three limits between the least and all the peak of every rank is below the limit, within 15 % of predicted."""
    for limit in spaced_limits(model, 4, 3, PIPED):
        record = model.planner(4, limit, PIPED).plan()
        peak = max(pool.run(4, step_peak_bytes, record, model.graph, model.loaded))
        assert peak <= limit, (peak, record.peak_tensor_bytes, limit)
        assert 0.85 <= peak / record.peak_tensor_bytes <= 1.15


class Counted(TorchDispatchMode):
    """Counts the collectives issued, by operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::")
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def count_collectives(record: PlanRecord, graph: OpGraph, loaded: LoadedModel) -> dict[str, int]:
    """On a rank: the collectives of a training step."""
    import torch

    from autopar.emit.build import emit
    from autopar.emit.example import random_batch
    from autopar.trace.inputs import bind

    pm = emit(record, graph, loaded.model, device="cpu")
    rows = record.request.global_batch // pm.data_parallel_size
    examples = bind(loaded.model, loaded.inputs).tensors
    batch = dict(zip(graph.inputs, random_batch(graph, examples, rows, 0, torch.device("cpu")), strict=True))
    pm.train_step(**batch)
    with Counted() as counted:
        pm.train_step(**batch)
    found: dict[str, int] = counted.counts
    return found


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_in_pipelines_is_priced_as_it_runs(pool: Pool, zero: int) -> None:
    """Gathers and scatters that the layers of a stage are priced with are as many as its ranks issue in a step.

    FSDP2 may gather one layer more: it prefetches what the backward pass of an earlier microbatch would read.
    """
    model = load("llama", "llama:layers=2,hidden=32,heads=4,vocab=64,seq=8")
    record = model.planner(4).estimate(ManualConfig.parse(f"pp=2,dp=2,microbatch_size=2,zero={zero}"))
    issued = pool.run(4, count_collectives, record, model.graph, model.loaded)
    priced = [{"all_gather": 0, "reduce_scatter": 0} for _ in record.stages]
    for layer, work in zip(record.costs.layers, carried_work(record.costs), strict=True):
        once, each = work.step_sync, work.micro_sync
        for demand, times in ((once, 1), (each, record.num_microbatches)):
            for key in (*demand.forward_collectives, *demand.backward_collectives):
                priced[layer.stage][key.kind] += times * layer.count
    for rank, counts in enumerate(issued):
        assert counts["_reduce_scatter_base_"] == priced[rank // 2]["reduce_scatter"]
        assert 0 <= counts["_allgather_base_"] - priced[rank // 2]["all_gather"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_every_limit_holds(devices: int) -> None:
    """All rows of `benchmarks.byte_limits`: plans at ten limits for each model, and pipelines written by hand."""
    for row in rows_of(devices):
        assert row.below, row
        assert abs(row.error) < 0.15, row
