"""A plan as DeepSpeed's JSON (deepspeed.ai/docs/config-json): stages, and what runs again, are code there."""

from __future__ import annotations

import json
from collections.abc import Iterator

from autopar.export.recipe import Recipe

DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": ""}


def settings(recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """The JSON, and what it leaves open. Raises ConfigError naming each thing it can't express."""
    recipe.require(*_mistakes(recipe))
    record, degrees = recipe.record, recipe.degrees
    found: dict[str, object] = {
        "train_batch_size": record.request.global_batch,
        "train_micro_batch_size_per_gpu": record.global_microbatch // degrees.dp,
        "gradient_accumulation_steps": record.num_microbatches,
        "zero_optimization": {"stage": degrees.zero},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
    if narrow := DTYPES[record.request.dtype]:
        found[narrow] = {"enabled": True}
    if degrees.tp > 1:
        found["tensor_parallel"] = {"autotp_size": degrees.tp}
    notes = [*recipe.notes, f"the optimizer ({record.request.optimizer}) is given to deepspeed.initialize"]
    if any(recipe.recomputed):
        again, of = sum(recipe.recomputed), sum(recipe.stage_blocks)
        notes.append(f"the model's code has to checkpoint {again} of {of} blocks: the JSON can't ask for it")
    return json.dumps(found, indent=2) + "\n", tuple(notes)


def _mistakes(recipe: Recipe) -> Iterator[str]:
    record, degrees = recipe.record, recipe.degrees
    if recipe.piped:
        yield f"pp={record.pp_degree}: DeepSpeed's stages are a PipelineModule in code, not JSON; plan with pp=1"
    if degrees.sequence:
        yield f"sp=1 with tp={degrees.tp}: DeepSpeed's tensor parallelism has no sequence parallelism; plan with sp=0"
    if degrees.cp > 1:
        yield f"cp={degrees.cp}: DeepSpeed's JSON has no context parallelism; plan with cp=1"
    if recipe.ep > 1:
        yield f"ep={recipe.ep}: DeepSpeed's experts are code, not JSON; plan with ep=1"
    if recipe.selective:
        yield "recompute=selective: DeepSpeed's JSON can't ask for it; plan with recompute=none or full"
    if record.request.dtype not in DTYPES:
        yield f"dtype={record.request.dtype}: not exported to DeepSpeed; plan with {', '.join(DTYPES)}"
