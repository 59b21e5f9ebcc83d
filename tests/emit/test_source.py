"""Stages as Python files: on real processes they compute what the plan's own code does, and what a person changes."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import autopar
from autopar.emit.build import emit
from autopar.emit.example import random_batch
from autopar.emit.parameters import local
from autopar.emit.rows import slice_rows
from autopar.emit.source.write import write_source
from autopar.errors import EmitError, PlanError
from autopar.graph import OpGraph
from autopar.plan import PlanRecord
from tests.integration.models import example, traced
from tests.integration.staged import one_stage, staged
from tests.pool import Pool

BATCH = 16


def planned(name: str, text: str) -> PlanRecord:
    """A plan of one stage, or of a pipeline of two groups: `dp=2|tp=2`."""
    graph, texts = traced(name), tuple(text.split("|"))
    if len(texts) == 1:
        return one_stage(graph, text, 4, BATCH)
    half = len(graph.layers) // 2
    return staged(graph, texts, (half, len(graph.layers) - half), "1f1b", 4, 2, BATCH)


def outcome(record: PlanRecord, graph: OpGraph, name: str, folder: str) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """Losses in training and evaluation, and this rank's gradients: by the plan's own code, then by the files."""
    examples = [example(name)[1][n] for n in graph.inputs]
    batch = dict(zip(graph.inputs, random_batch(graph, examples, BATCH, 1, torch.device("cpu")), strict=True))
    found = []
    for source in (None, Path(folder)):
        pm = emit(record, graph, example(name)[0], device="cpu", source=source)
        rows = slice_rows(batch, graph, pm.data_parallel_rows() or range(0))
        losses = pm.train_step(**rows), pm.eval_step(**rows)
        found.append((*losses, [local(p.grad) for p in pm.parameters() if p.grad is not None]))
    return found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("odd gpt", "dp=2,tp=2,sp=1,zero=1,recompute=selective"),  # uneven heads, sequences and vocabulary
        ("gpt eager", "dp=2,tp=2,zero=3,recompute=full"),  # dropout
        ("gpt eager", "dp=2,tp=2,sp=1,recompute=light"),
        ("skips", "dp=2|tp=2"),  # stages with other meshes
    ],
)
def test_files_give_the_same_numbers(pool: Pool, name: str, text: str, tmp_path: Path) -> None:
    """Losses and gradients are equal bit for bit, in fp64."""
    record, graph = planned(name, text), traced(name)
    files = write_source(record, graph, tmp_path)
    assert [f.name for f in files] == [f"stage_{i}.py" for i in range(len(record.stages))]
    for own, written in pool.run(4, outcome, record, graph, name, str(tmp_path)):
        assert own[0].equal(written[0])
        assert own[1].equal(written[1])
        assert own[2]
        assert all(a.equal(b) for a, b in zip(own[2], written[2], strict=True))


def test_what_a_person_changes_is_run(pool: Pool, tmp_path: Path) -> None:
    """With the loss doubled in the last line of the file, loss and gradients are."""
    record, graph = planned("skips", "dp=4"), traced("skips")
    (file,) = write_source(record, graph, tmp_path)
    head, _, last = file.read_text().rpartition("return (")
    file.write_text(f"{head}return (2 * {last}")
    for own, written in pool.run(4, outcome, record, graph, "skips", str(tmp_path)):
        torch.testing.assert_close(written[0], 2 * own[0])
        torch.testing.assert_close(written[2], [2 * g for g in own[2]])


def test_collectives_are_visible(tmp_path: Path) -> None:
    """Column and row products with their all-reduces, and the embedding's shard, stand in the text by axis."""
    (file,) = write_source(planned("odd gpt", "dp=2,tp=2"), traced("odd gpt"), tmp_path)
    text = file.read_text()
    block = next(f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef) and f.name == "blocks_0")
    calls = [n.func.id for n in ast.walk(block) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert calls.count("all_reduce") == 4  # two forward, two backward
    assert "first=pick(d1, 0, 34)" in text
    assert "blocks.*.mlp.up_proj.weight" in text.split('"""')[1]


def test_refusals(tmp_path: Path) -> None:
    """Files of another plan, absent ones, batches of another size and another model are refused by name."""
    model, inputs = example("mlp")
    graph, record = traced("mlp"), one_stage(traced("mlp"), "microbatch_size=4", 1, BATCH)
    plan = autopar.Plan(record)
    with pytest.raises(EmitError, match="no such file"):
        emit(record, graph, model, device="cpu", source=tmp_path)
    plan.emit_source(tmp_path, model, inputs)
    with pytest.raises(EmitError, match="another plan"):
        emit(replace(record, num_microbatches=2, global_microbatch=8), graph, model, device="cpu", source=tmp_path)
    pm = emit(record, graph, model, device="cpu", source=tmp_path)
    with pytest.raises(EmitError, match="microbatches of 4 samples, this one has 2"):
        pm.train_step(x=torch.zeros(8, 16), labels=torch.zeros(8, dtype=torch.long))
    with pytest.raises(PlanError, match="graph hash"):
        plan.emit_source(tmp_path, *example("skips"))
