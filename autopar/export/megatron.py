"""A plan as flags of Megatron-LM's training scripts (`megatron/training/arguments.py` there says what each means)."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.export.recipe import Recipe

OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
"""Megatron's adam decays weights apart from the gradient, as AdamW does."""
DTYPES = {"bf16": ("--bf16",), "fp16": ("--fp16",), "fp32": ()}
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def settings(recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """The flags, one a line, and what they leave open. Raises ConfigError naming each thing they can't express."""
    recipe.require(*_mistakes(recipe))
    notes = list(recipe.notes)
    if recipe.degrees.zero > 1:
        notes.append("Megatron FSDP wants CUDA_DEVICE_MAX_CONNECTIONS unset or above 1")
    return "\n".join([*_degrees(recipe), *_batch(recipe), *_recompute(recipe), *_training(recipe)]) + "\n", tuple(notes)


def _mistakes(recipe: Recipe) -> Iterator[str]:
    record = recipe.record
    if recipe.piped and record.schedule not in ("1f1b", "interleaved"):
        yield f"schedule={record.schedule}: Megatron-LM runs 1f1b and interleaved; plan with one of these"
    if record.schedule == "interleaved" and record.num_microbatches % record.pp_degree:
        yield (
            f"{record.num_microbatches} microbatches over {record.pp_degree} groups of devices: Megatron-LM's "
            "interleaved schedule takes multiples; plan for another batch or microbatch_size"
        )
    if record.request.dtype not in DTYPES:
        yield f"dtype={record.request.dtype}: not exported to Megatron-LM; plan with {', '.join(DTYPES)}"
    if record.request.optimizer not in OPTIMIZERS:
        yield f"optimizer={record.request.optimizer}: Megatron-LM has {' and '.join(OPTIMIZERS)}"
    if any(recipe.recomputed) and not recipe.recompute_all and len(set(recipe.recomputed)) > 1:
        yield (
            f"full recomputation of {'/'.join(map(str, recipe.recomputed))} blocks by stage: Megatron-LM takes one "
            "number for all stages; plan with recompute=none, selective or full"
        )


def _degrees(recipe: Recipe) -> Iterator[str]:
    degrees, record = recipe.degrees, recipe.record
    yield f"--tensor-model-parallel-size {degrees.tp}"
    if degrees.sequence:
        yield "--sequence-parallel"
    yield f"--pipeline-model-parallel-size {record.pp_degree}"
    if recipe.piped:
        yield f"--pipeline-model-parallel-layout {_stages(recipe.stage_blocks)}"
    if degrees.cp > 1:
        yield f"--context-parallel-size {degrees.cp}"
    if recipe.ep > 1:
        yield f"--expert-model-parallel-size {recipe.ep}"
    if degrees.zero == 1:
        yield "--use-distributed-optimizer"
    elif degrees.zero:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {SHARDING[degrees.zero]}"
        yield "--ckpt-format fsdp_dtensor"


def _stages(blocks: tuple[int, ...]) -> str:
    """Stages in the order of the model: E embedding, t a block, L the head with its loss."""
    stages = [f"t*{count}" if count else "" for count in blocks]
    return "'E" + "|".join(stages) + "L'"


def _batch(recipe: Recipe) -> Iterator[str]:
    record = recipe.record
    yield f"--micro-batch-size {record.global_microbatch // recipe.degrees.dp}"
    yield f"--global-batch-size {record.request.global_batch}"
    if record.request.seq_len:
        yield f"--seq-length {record.request.seq_len}"


def _recompute(recipe: Recipe) -> Iterator[str]:
    if recipe.selective:
        yield "--recompute-granularity selective"
    elif any(recipe.recomputed):
        yield "--recompute-granularity full"
        method, count = ("uniform", 1) if recipe.recompute_all else ("block", recipe.recomputed[0])
        yield f"--recompute-method {method}"
        yield f"--recompute-num-layers {count}"


def _training(recipe: Recipe) -> Iterator[str]:
    request = recipe.record.request
    yield from DTYPES[request.dtype]
    yield f"--optimizer {OPTIMIZERS[request.optimizer]}"
    if request.seed:
        yield f"--seed {request.seed}"
