"""Short trainings on real processes, by the name of a model, a plan and an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from autopar.checkpoints import Checkpoints
from autopar.emit.build import emit
from autopar.emit.example import random_batch
from autopar.emit.module import ParallelModule
from autopar.emit.on_shards import on_wholes
from autopar.emit.rows import slice_rows
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from tests.integration.models import example, traced
from tests.integration.staged import one_stage, staged

BATCH = 8
Values: TypeAlias = "dict[str, Any]"
Optimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "adagrad": lambda ps: torch.optim.Adagrad(ps),
    "adafactor": lambda ps: on_wholes(torch.optim.Adafactor(ps)),
    "asgd": lambda ps: torch.optim.ASGD(ps, foreach=False),
}

PIPELINES = ("dp=2", "dp=2,zero=1", "dp=2,zero=3")
ONE_STAGE = (
    "dp=4,zero=3", "dp=4,zero=1", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=2", "tp=4", "tp=4,sp=1", "dp=4",
    "dp=4,zero=3,zero_group=2", "dp=4,zero=1,zero_group=2",
)  # fmt: skip


class Case(NamedTuple):
    """A model by name, with its graph (so that ranks need not trace it) and a plan, and the kind of optimizer."""

    name: str
    graph: OpGraph
    plan: PlanRecord
    kind: str


@cache
def planned(name: str, text: str) -> PlanRecord:
    """A plan for four ranks; `A/B` is a pipeline of two groups, cut after so many layers: `A/B dp=2`."""
    cut, _, config = text.rpartition(" ")
    if not cut:
        return one_stage(traced(name), text, 4, BATCH)
    before, behind = (int(n) for n in cut.split("/"))
    return staged(traced(name), (config, config), (before, behind), "1f1b", 4, 2, BATCH)


def case(name: str, text: str, kind: str = "sgd") -> Case:
    """The case of a plan's text."""
    return Case(name, traced(name), planned(name, text), kind)


def plans_of(name: str) -> list[str]:
    """Plans of a model by their texts."""
    layers = len(traced(name).layers)
    return [*ONE_STAGE, *(f"{n}/{layers - n} {config}" for n in range(1, layers) for config in PIPELINES)]


def made(case: Case) -> tuple[ParallelModule, torch.optim.Optimizer]:
    """A module under its plan, with an optimizer that has taken no step."""
    pm = emit(case.plan, case.graph, example(case.name)[0], device="cpu")
    return pm, OPTIMIZERS[case.kind](pm.parameters())


def step(pm: ParallelModule, optimizer: torch.optim.Optimizer, case: Case, seed: int) -> None:
    """One step on a random batch."""
    graph = case.graph
    examples = [example(case.name)[1][n] for n in graph.inputs]
    batch = dict(zip(graph.inputs, random_batch(graph, examples, BATCH, seed, torch.device("cpu")), strict=True))
    rows = pm.data_parallel_rows()
    assert rows is not None
    pm.train_step(**slice_rows(batch, graph, rows))
    optimizer.step()
    optimizer.zero_grad()


def run_and_save(case: Case, folder: str, asynchronous: bool = False) -> dict[str, Tensor]:
    """Two steps, a save and one step more; the values that were to be saved, whole."""
    pm, optimizer = made(case)
    for seed in range(2):
        step(pm, optimizer, case, seed)
    checkpoints = Checkpoints(folder)
    checkpoints.save(2, pm, optimizer, asynchronous=asynchronous)
    values = {n: whole(p).clone() for n, p in pm.state_dict().items()}
    step(pm, optimizer, case, 2)
    checkpoints.wait()
    return values


def load_and_save(case: Case, source: str, target: str) -> int:
    """Load what another plan saved, and save it under this one; the steps that were counted."""
    pm, optimizer = made(case)
    assert Checkpoints(source).load(pm, optimizer) == 2
    Checkpoints(target).save(2, pm, optimizer)
    return pm.steps


def loaded_plainly(name: str, kind: str, folder: str) -> Values:
    """All that the model itself and its optimizer have after loading, in this process."""
    model: nn.Module = copy.deepcopy(example(name)[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = OPTIMIZERS[kind](model.parameters())
    assert Checkpoints(folder).load(model, optimizer) == 2
    values: Values = dict(model.state_dict())
    for name_, parameter in model.named_parameters():
        values |= {f"{name_} {k}": v for k, v in optimizer.state.get(parameter, {}).items()}
    return values | {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}


def assert_equal(found: Values, wanted: Values) -> None:
    """The same names, and values that are equal bit for bit."""
    assert {*found} == {*wanted}
    for name, value in wanted.items():
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value, name


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor; a plain tensor as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).detach()
