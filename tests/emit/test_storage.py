"""Bytes that a rank really allocates for parameters, gradients and optimizer states, against the predicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather

from autopar.cost.demand import Demand
from autopar.cost.states import StateBytes, held_parameters, parameter_bytes
from autopar.emit import runtime as runtimes
from autopar.emit.build import emit
from autopar.emit.groups import StageGroups
from autopar.emit.parameters import StageParameter, local, reduce_gradients
from autopar.emit.placements import place_layers
from autopar.formulate.record.carried import carried_work
from autopar.graph import BROADCAST, REPLICATE, CollectiveKey, OpGraph
from autopar.plan import POLICIES, LayerStrategy, PlanRecord
from autopar.trace.capture import trace
from tests.emit.handmade import data_parallel, mesh_of, record_of
from tests.emit.test_pipeline import batch, rows
from tests.integration.models import example, traced
from tests.integration.staged import one_stage
from tests.pool import Pool

CASES, BATCH, IN, OUT = 10, 8, 12, 6
Bytes = tuple[int, int, int]


class Regression(nn.Module):
    """Two linear layers whose sizes don't divide evenly over four ranks, a scale that is a scalar, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, OUT), nn.Linear(OUT, IN, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean squared error."""
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))) * self.scale, y)


def regression(dtype: str) -> OpGraph:
    example = torch.randn(BATCH, IN)
    return trace(Regression(), (example, example), compute_dtype=POLICIES[dtype].compute)


def random_plan(graph: OpGraph, dtype: str, rng: np.random.Generator) -> PlanRecord:
    """On a 2x2 mesh, the batch split on some axes; each parameter stored in any layout on every axis."""
    data = [[True, True], [True, False], [False, True]][int(rng.integers(3))]
    zero = int(rng.integers(4))

    def strategy(i: int) -> LayerStrategy:
        found = data_parallel(graph, i, data, zero)
        layer = graph.classes[graph.layers[i].class_index]
        stored = {}
        for name in layer.params:
            shape = layer.values[name].shape_at(1)
            allowed = [x for x in product([*range(len(shape)), REPLICATE, BROADCAST], repeat=2) if divides(x, shape)]
            stored[name] = allowed[int(rng.integers(len(allowed)))]
        return replace(found, relays=stored)

    return record_of(graph, mesh_of(2, 2), strategy, global_batch=BATCH, num_microbatches=2, dtype=dtype)


def divides(layout: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(size % (2 * layout.count(d) or 1) == 0 for d, size in enumerate(shape))


def predicted(graph: OpGraph, record: PlanRecord) -> Bytes:
    total = StateBytes(0, 0, 0, 0)
    for placed in place_layers(graph, record.stages[0]):
        for parameter in held_parameters(placed.program, placed.data_axes, placed.strategy.zero):
            if parameter.storage.zero == 2:  # FSDP's gathered copy comes and goes within a step
                parameter = replace(parameter, storage=replace(parameter.storage, zero=3))
            b = parameter_bytes(parameter, record.request.policy, "adamw")
            total = StateBytes(*(x + y for x, y in zip(vars(total).values(), vars(b).values(), strict=True)))
    return int(total.parameters), int(total.gradients), int(total.optimizer)


def allocated(graph: OpGraph, record: PlanRecord) -> Bytes:
    """On a rank: bytes of parameters and copies, of gradients before they are reduced, of optimizer states."""
    pm = emit(record, graph, Regression(), device="cpu")
    optimizer = torch.optim.AdamW(pm.parameters(), foreach=True)
    (runtime,) = pm.runtimes
    gradients = 0

    def watched(parameters: Sequence[StageParameter], groups: StageGroups) -> object:
        nonlocal gradients
        kept = [p._gradient if p._gradient is not None else p.compute.grad for p in runtime.steps]
        sharded = [local(p.grad) for _, p in runtime.kept if p.grad is not None]
        gradients = sum(g.untyped_storage().nbytes() for g in (*kept, *sharded) if g is not None)
        return reduce_gradients(parameters, groups)

    x = torch.randn(BATCH // pm.data_parallel_size, IN)
    with patch.object(runtimes, "reduce_gradients", watched):
        pm.train_step(x, x)
    optimizer.step()
    tensors = [*(p.compute for p in runtime.steps), *(local(p.detach()) for p in runtime.publics.values())]
    storages = {t.untyped_storage().data_ptr(): t.nbytes for t in tensors}
    states = [local(t) for s in optimizer.state.values() for key, t in s.items() if key != "step"]
    return sum(storages.values()), gradients, sum(t.nbytes for t in states)


def allocated_by_all(graph: OpGraph, records: list[PlanRecord]) -> list[Bytes]:
    return [allocated(graph, record) for record in records]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_allocated_bytes_are_those_predicted(pool: Pool, dtype: str) -> None:
    """Parameters stored in random layouts, split on data axes and replicated there included, under random ZeRO levels:
    the fullest rank holds exactly the predicted bytes of parameters, gradients and optimizer states."""
    rng = np.random.default_rng(4)
    graph = regression(dtype)
    records = [random_plan(graph, dtype, rng) for _ in range(CASES)]
    ranks = pool.run(4, allocated_by_all, graph, records)
    for i, record in enumerate(records):
        found = tuple(max(column) for column in zip(*(rank[i] for rank in ranks), strict=True))
        assert found == predicted(graph, record), record.stages[0]


def gathered(name: str, record: PlanRecord) -> int:
    """Bytes of parameters that FSDP2 gathers on a rank in a training step."""
    pm = emit(record, traced(name), example(name)[0], device="cpu")
    mine = rows(pm, batch(name))
    pm.train_step(**mine)  # FSDP2 finds out in which order layers run
    found = 0

    def watched(parameters: list[Any], *others: Any) -> Any:
        nonlocal found
        found += sum(p.sharded_param.nbytes for p in parameters)
        return foreach_all_gather(parameters, *others)

    with patch.object(_fsdp_param_group, "foreach_all_gather", watched):
        pm.train_step(**mine)
    return found


@pytest.mark.parametrize("text", ["", ",recompute=full", ",layers=0:zero=2"])
@pytest.mark.parametrize("name", ["deep llama", "deep gpt"])
def test_gathers_are_those_priced(pool: Pool, name: str, text: str) -> None:
    """Under ZeRO 3 as many bytes are gathered as prices are made of: embeddings once unless they run again, blocks
    twice, the last layer and what layers share once."""
    record = one_stage(traced(name), f"dp=2,microbatch_size=8,zero=3{text}", 2, 16)
    works = zip(record.costs.layers, carried_work(record.costs), strict=True)
    keys = [(cost.count, k) for cost, work in works for k in collectives(work.micro_sync)]
    priced = sum(count * key.bytes for count, key in keys if key.kind == "all_gather")
    assert pool.run(2, gathered, name, record) == [priced] * 2


def collectives(demand: Demand) -> tuple[CollectiveKey, ...]:
    return (*demand.forward_collectives, *demand.backward_collectives)
