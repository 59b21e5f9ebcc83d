"""Context and expert parallelism by hand: `cp` and `ep` of a configuration, on real processes in float64."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from autopar.errors import ConfigError
from autopar.export import megatron
from autopar.export.recipe import read
from autopar.graph import BROADCAST, REPLICATE
from autopar.plan import PlanRecord
from autopar.report.explain import explain
from autopar.shard.lower import lower_layer
from autopar.shard.program import Call, Program, Relayout
from tests.integration.models import traced
from tests.integration.staged import one_stage
from tests.integration.test_pipelines import check
from tests.pool import Pool

BATCH, SLOW = 4, pytest.mark.slow


@cache
def planned(name: str, text: str, devices: int) -> PlanRecord:
    """The plan of a configuration."""
    return one_stage(traced(name), text, devices, BATCH)


def blocks(record: PlanRecord, name: str) -> Iterator[tuple[tuple[str, ...], Program]]:
    """Roles of the mesh axes in each repeated block, and what it runs."""
    graph = traced(name)
    classes = [layer.class_index for layer in graph.layers]
    for stage in record.stages:
        sizes = tuple(axis.size for axis in stage.mesh)
        for i, chosen in enumerate(stage.assignment, stage.first_layer):
            if classes.count(classes[i]) > 1:
                yield stage.strategies[chosen].roles, lower_layer(graph, i, stage.strategies[chosen], sizes)


def calls(program: Program, operator: str) -> list[tuple[str, ...]]:
    """Factors that the axes split in each call of an operator."""
    return [s.factors for s in program.steps if isinstance(s, Call) and s.op.target.split(".")[1] == operator]


def kinds(program: Program) -> list[str]:
    """Collectives on activations in the forward pass."""
    relaid = [s for s in program.steps if isinstance(s, Relayout) and s.source not in program.params]
    return [move.kind for s in relaid for move in s.forward]


def exact(pool: Pool, name: str, record: PlanRecord) -> None:
    """Loss, every gradient and the parameters after three steps are those of one device."""
    report = pool.run(record.request.devices, check, record, traced(name), name, timeout_s=180)[0]
    assert not report["missing_gradients"]
    assert report["largest"] < 1e-9, report


@pytest.mark.parametrize(
    ("name", "text", "devices", "roles"),
    [
        ("llama", "cp=2,microbatch_size=4", 2, ("sequence",)),
        pytest.param("odd gpt", "cp=4,microbatch_size=2", 4, ("sequence",), marks=SLOW),
        ("llama", "cp=2,tp=2,sp=1,microbatch_size=4", 4, ("sequence", "tensor+sequence")),
        ("llama", "dp=2,cp=2,zero=3,recompute=full", 4, ("batch", "sequence")),
        pytest.param("llama", "dp=2,cp=2,zero=1,microbatch_size=2", 4, ("batch", "sequence"), marks=SLOW),
        pytest.param("llama", "cp=2,pp=2,microbatch_size=2", 4, ("sequence",), marks=SLOW),
        pytest.param("mixture", "dp=2,cp=2", 4, ("batch", "sequence"), marks=SLOW),
    ],
)
def test_the_sequence_is_split_by_hand(pool: Pool, name: str, text: str, devices: int, roles: tuple[str, ...]) -> None:
    """Tokens are split in and between blocks, queries or heads in attention, parameters not; the plan is exact."""
    record = planned(name, text, devices)
    axis = roles.index("sequence")
    for found, program in blocks(record, name):
        assert found == roles
        for end in (program.inputs[0], program.outputs[0]):
            assert program.layouts[end][axis] == 1
        (attention,) = calls(program, "scaled_dot_product_attention")
        assert attention[axis] in ("q", "d1")
        assert {own[axis] for own in calls(program, "linear")} == {"d1"}
        assert all(program.layouts[p][axis] in (BROADCAST, REPLICATE) for p in program.params)
    exact(pool, name, record)


@pytest.mark.parametrize(
    ("text", "devices", "roles"),
    [
        ("dp=2,ep=2,microbatch_size=2", 2, ("batch+experts",)),
        ("dp=4,ep=2,zero=1", 4, ("batch", "batch+experts")),
        ("dp=2,tp=2,ep=2,microbatch_size=2", 4, ("batch+experts", "tensor")),
        pytest.param("dp=4,ep=4,zero=3", 4, ("batch+experts",), marks=SLOW),
        pytest.param("dp=2,cp=2,ep=2,microbatch_size=2", 4, ("batch", "experts+sequence"), marks=SLOW),
        pytest.param("dp=2,cp=2,ep=4", 4, ("batch+experts", "experts+sequence"), marks=SLOW),
        pytest.param("dp=2,ep=2,pp=2", 4, ("batch+experts",), marks=SLOW),
    ],
)
def test_experts_are_split_by_hand(pool: Pool, text: str, devices: int, roles: tuple[str, ...]) -> None:
    """Experts lie on the innermost axes outside the tensor degree, tokens go there and back; the plan is exact."""
    record = planned("mixture", text, devices)
    for found, program in blocks(record, "mixture"):
        assert found == roles
        products = calls(program, "einsum")[1:4]
        for axis, role in enumerate(roles):
            assert all((own[axis] == "e") == ("experts" in role) for own in products)
            for param in ("gate", "up", "down"):
                assert (program.layouts[param][axis] == 0) == ("experts" in role)
            if role == "batch+experts":
                assert kinds(program).count("all_to_all") >= 2
    exact(pool, "mixture", record)


def test_words_and_json_of_plans() -> None:
    """The plan says what is split and can be read again."""
    record = planned("mixture", "dp=2,cp=2,ep=2,microbatch_size=2", 4)
    said = " ".join(explain(record).split())
    assert "batch 2 ways, experts+sequence 2 ways" in said
    assert PlanRecord.from_json(json.loads(json.dumps(record.to_json()))).stages == record.stages


@pytest.mark.parametrize(
    ("name", "text", "devices", "flags"),
    [
        ("mixture", "dp=4,ep=2,zero=1", 4, {"--expert-model-parallel-size 2", "--tensor-model-parallel-size 1"}),
        ("llama", "dp=2,cp=2", 4, {"--context-parallel-size 2", "--tensor-model-parallel-size 1"}),
    ],
)
def test_exported_as_asked(name: str, text: str, devices: int, flags: set[str]) -> None:
    """Megatron-LM is told the degrees that the configuration has."""
    record = one_stage(traced(name, "bfloat16"), text, devices, BATCH, "bf16")
    record = replace(record, request=replace(record.request, config=text))
    found, _ = megatron.settings(read(record))
    assert flags <= set(found.splitlines())


@pytest.mark.parametrize(
    ("name", "text", "devices", "said"),
    [
        ("llama", "cp=16,microbatch_size=4", 16, "cp=16: a sequence has 8 tokens; give at most that"),
        ("mlp", "cp=2,microbatch_size=4", 2, "cp=2: no samples x tokens x width pass between"),
        ("llama", "dp=2,ep=2", 2, "ep=2: no block multiplies a stack of matrices"),
        ("mixture", "dp=3,ep=3,microbatch_size=2", 3, "ep=3: there are 4 experts; give a divisor of that"),
        ("mixture", "dp=2,tp=2,ep=4", 4, "ep=4 must divide dp*cp = 2"),
        ("mixture", "dp=2,cp=3,ep=2,microbatch_size=2", 6, "[1, 2, 3] on 6 devices, must each divide the next"),
    ],
)
def test_what_a_model_has_none_of_is_refused(name: str, text: str, devices: int, said: str) -> None:
    """A degree that the model's sequence or experts can't be split by is refused with what may be given."""
    with pytest.raises(ConfigError) as caught:
        planned(name, text, devices)
    assert said in str(caught.value)
