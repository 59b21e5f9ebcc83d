"""A plan as a job file of torchtitan 0.2 (`torchtitan/config/job_config.py` there says what each field means)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from autopar.export.recipe import Recipe
from autopar.schedules import stages_of

SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip
"""Names of `torch.distributed.pipelining`, which torchtitan passes on."""
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}


def settings(recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """The job file (TOML) and what it leaves open. Raises ConfigError naming each thing it can't express."""
    recipe.require(*_mistakes(recipe))
    tables: dict[str, dict[str, object]] = {
        "training": _training(recipe), "parallelism": _parallelism(recipe),
        "activation_checkpoint": _activation_checkpoint(recipe),
        "optimizer": {"name": OPTIMIZERS[recipe.record.request.optimizer]},
    }  # fmt: skip
    text = "\n".join(
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""])
        for name, table in tables.items()
    )
    notes = [*recipe.notes, "[model] name and flavor are yours to add"]
    if recipe.piped:
        notes.append("stages are given by the module names of torchtitan's own Llama models")
    return text, tuple(notes)


def _mistakes(recipe: Recipe) -> Iterator[str]:
    request, degrees = recipe.record.request, recipe.degrees
    if degrees.zero == 1:
        yield "zero=1: torchtitan replicates (0) or runs FSDP2 (2, 3); plan with --constraint zero=2 or zero=3"
    if degrees.tp > 1 and not degrees.sequence:
        yield f"tp={degrees.tp} without sp=1: torchtitan's is with sequence parallelism; plan with sp=1"
    if not degrees.zero and (degrees.tp > 1 or recipe.piped):
        if degrees.dp > 1:
            yield "zero=0 beside tensor parallelism or stages: torchtitan's DDP is for dp alone; plan with zero=2 or 3"
        elif request.policy.compute != "float32":
            yield f"dtype={request.dtype} at dp=1: torchtitan's mixed precision needs FSDP or dp only; plan with fp32"
    if request.policy.compute not in ("bfloat16", "float32") or request.dtype in ("fp8", "mxfp8", "nvfp4"):
        yield f"dtype={request.dtype}: not exported to torchtitan; plan with bf16 or fp32"
    if request.optimizer not in OPTIMIZERS:
        yield f"optimizer={request.optimizer}: torchtitan has {' and '.join(OPTIMIZERS)}"
    if recipe.selective:
        yield (
            "recompute=selective runs the core of attention again; torchtitan's selective mode runs other operators "
            "again. Plan with recompute=none or full"
        )
    if recipe.piped and recipe.record.schedule not in SCHEDULES:
        yield f"schedule={recipe.record.schedule}: torchtitan has {', '.join(SCHEDULES)}"
    if any(recipe.recomputed) and not recipe.recompute_all and not _every(recipe):
        yield (
            f"full recomputation of {_counts(recipe.recomputed)} of {_counts(recipe.stage_blocks)} blocks by stage: "
            "torchtitan takes all blocks or every n-th; plan with recompute=none or full"
        )


def _counts(numbers: tuple[int, ...]) -> str:
    return "/".join(map(str, numbers))


def _every(recipe: Recipe) -> int | None:
    """The n for which every n-th block of each device is as many as the plan recomputes; None if there is none."""
    record = recipe.record
    mine = [stages_of(record.schedule, g, record.pp_degree, len(record.stages)) for g in range(record.pp_degree)]
    blocks = [sum(recipe.stage_blocks[s] for s in stages) for stages in mine]
    again = [sum(recipe.recomputed[s] for s in stages) for stages in mine]
    return next((n for n in range(1, max(blocks) + 1) if [b // n for b in blocks] == again), None)


def _training(recipe: Recipe) -> dict[str, object]:
    record = recipe.record
    each = record.global_microbatch // recipe.degrees.dp
    found: dict[str, object] = {
        "local_batch_size": each * (record.num_microbatches if recipe.piped else 1),
        "global_batch_size": record.request.global_batch,
        "dtype": record.request.policy.parameters,
        "mixed_precision_param": record.request.policy.compute,
        "mixed_precision_reduce": record.request.policy.gradients,
        "seed": record.request.seed,
    }
    return found | ({"seq_len": record.request.seq_len} if record.request.seq_len else {})


def _parallelism(recipe: Recipe) -> dict[str, object]:
    degrees, record = recipe.degrees, recipe.record
    found: dict[str, object] = {
        "data_parallel_replicate_degree": 1 if degrees.zero else degrees.dp,
        "data_parallel_shard_degree": degrees.dp if degrees.zero else 1,
        "fsdp_reshard_after_forward": "always" if degrees.zero == 3 else "never",
        "tensor_parallel_degree": degrees.tp,
        "context_parallel_degree": degrees.cp,
        "expert_parallel_degree": recipe.ep,
        "pipeline_parallel_degree": record.pp_degree,
    }
    if recipe.piped:
        found |= {
            "pipeline_parallel_schedule": SCHEDULES[record.schedule],
            "pipeline_parallel_microbatch_size": record.global_microbatch // degrees.dp,
            "module_fqns_per_model_part": _modules(recipe.stage_blocks),
        }
    return found


def _modules(stage_blocks: tuple[int, ...]) -> list[list[str]]:
    """Names of the modules of each stage in torchtitan's Llama."""
    found, first = [], 0
    for count in stage_blocks:
        found.append([f"layers.{i}" for i in range(first, first + count)])
        first += count
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "output"]
    return found


def _activation_checkpoint(recipe: Recipe) -> dict[str, object]:
    if not any(recipe.recomputed):
        return {"mode": "none"}
    if recipe.recompute_all:
        return {"mode": "full"}
    return {"mode": "selective", "selective_ac_option": str(_every(recipe))}
