"""A hand-written plan under the conventions of Megatron, FSDP or DeepSpeed, predicted from a transformer's dimensions.

It is the model by which `autopar validate` is scored: plans that autopar itself does not run (experts, context
parallelism, float8, zero-bubble schedules) are predicted, and marked as not runnable.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf, prod
from typing import TYPE_CHECKING, Any

from autopar import __version__
from autopar.choices import listed
from autopar.cluster import Cluster, MixedCluster
from autopar.cost.states import STATE_BYTES
from autopar.dims import Dims
from autopar.errors import ConfigError
from autopar.formulate.config import ManualConfig, microbatch_count
from autopar.graph import REPLICATE
from autopar.plan import Fingerprint, LayerStrategy, MeshAxis, PlanRecord, Request, StagePlan
from autopar.trace.models.dimspec import parse_dims
from autopar.transformer.calls import peak_flops_per_s
from autopar.transformer.constants import shipped_constants
from autopar.transformer.layout import COMPUTE, DEEPSPEED, FSDP, MODERN, NARROW, Conventions, Layout
from autopar.transformer.memory import Bytes, fits, peak_bytes
from autopar.transformer.stages import stage_blocks
from autopar.transformer.step import StepTime, costs_of, step_time

if TYPE_CHECKING:
    from torch import nn

TOKEN_BYTES = 16.0
"""A token and its label, of 64 bits each."""

CONVENTIONS: Mapping[str, Conventions] = {"megatron": MODERN, "fsdp": FSDP, "deepspeed": DEEPSPEED}


def predict(
    shape: Dims, config: ManualConfig, request: Request, cluster: Cluster, dtype: str, straggler: float = 1.0
) -> PlanRecord:
    """An estimate's record, one device `straggler` times as slow. Raises ConfigError where it can't be predicted."""
    began = time.process_time()
    if not 1 <= straggler < inf:
        raise ConfigError(f"straggler={straggler}: give how many times as long a device takes, 1 or more")
    if isinstance(cluster, MixedCluster):
        raise ConfigError(
            f"framework={config.framework}: predicted on equal nodes only, and those of {cluster.name!r} differ; give "
            "another cluster, or framework=autopar"
        )
    states = STATE_BYTES.get(request.optimizer)
    layout = layout_of(config, shape, cluster, request.global_batch, dtype)
    layout = layout if states is None else replace(layout, state_bytes=states)
    taken = step_time(costs_of(shape, layout, cluster), shipped_constants(), straggler=straggler)
    held = peak_bytes(shape, layout)
    return _record(shape, layout, taken, held, replace(request, dtype=dtype, seq_len=shape.seq), cluster, began)


# --- the model ------------------------------------------------------------------------------------------------------


def shape_of_spec(spec: str, seq_len: int | None) -> Dims:
    """The dimensions that `gpt:...` or `llama:...` gives, those of experts included. Raises ConfigError."""
    return parse_dims(spec, seq_len, experts=True)


def shape_of(model: nn.Module, inputs: Any) -> Dims:
    """Dimensions of a model: its own, or those of its configuration. Raises ConfigError where there are none."""
    seq = _sequence(inputs)
    dims = getattr(model, "dims", None)
    if isinstance(dims, Dims):
        return replace(dims, seq=seq)
    config = getattr(model, "config", None)
    layers, hidden, heads, vocab = (
        _first(config, names)
        for names in (
            ("num_hidden_layers", "n_layer", "num_layers"), ("hidden_size", "n_embd", "d_model"),
            ("num_attention_heads", "n_head", "num_heads"), ("vocab_size",),
        )
    )  # fmt: skip
    if not (layers and hidden and heads and vocab):
        raise ConfigError(
            f"{type(model).__name__}: framework=autopar predicts any model; other frameworks are predicted from the "
            "dimensions of a transformer language model, and its configuration has none. Leave framework out."
        )
    names = [name for name, _ in model.named_parameters()]
    experts = _first(config, ("num_local_experts", "num_experts", "n_routed_experts"))
    wide = _first(config, ("intermediate_size", "n_inner", "ffn_dim", "d_ff")) or 4 * hidden
    return Dims(
        layers=layers, hidden=hidden, heads=heads, kv_heads=_first(config, ("num_key_value_heads",)) or heads,
        head_dim=_first(config, ("head_dim",)) or hidden // heads,
        ffn=(_first(config, ("moe_intermediate_size",)) if experts else 0) or wide, vocab=vocab, seq=seq,
        gated=any(mark in name for name in names for mark in ("gate_proj", "gate_up", ".w3")),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        bias=any(name.endswith("bias") for name in names),
        positions=any(mark in name for name in names for mark in ("wpe", "embed_positions", "position_embeddings")),
        experts=experts, topk=_first(config, ("num_experts_per_tok",)) if experts else 0,
    )  # fmt: skip


def _first(config: object, names: Iterable[str]) -> int:
    """The first of some whole numbers that a configuration has; 0 for none."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def _sequence(inputs: Any) -> int:
    """Tokens a sequence: the second dim of the first input that has one."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    shapes = [tuple(value.shape) for value in values if hasattr(value, "shape")]
    return next((shape[1] for shape in shapes if len(shape) >= 2), 1)


# --- the plan -------------------------------------------------------------------------------------------------------


def layout_of(config: ManualConfig, shape: Dims, cluster: Cluster, global_batch: int, dtype: str) -> Layout:
    """The layout of a configuration. Raises ConfigError with every mistake."""
    config = config.fit(cluster.devices, global_batch, shape.layers)
    mistakes = [
        f"{key}={value}: not predicted for framework={config.framework}; leave it out"
        for key, value, usual in (("layers", config.layers, ""), ("offload", config.offload, "none"))
        if value != usual
    ]
    stages = tuple(int(n) for n in config.stage_layers.split("/")) if config.stage_layers else ()
    if stages and (len(stages) != config.pp * config.chunks or sum(stages) != shape.layers):
        mistakes.append(
            f"stage_layers={config.stage_layers}: must be {shape.layers} blocks in pp*virtual_stages stages"
        )
    if shape.layers < config.pp * config.chunks:
        mistakes.append(f"pp*virtual_stages = {config.pp * config.chunks} is above {shape.layers} blocks")
    if config.ep > 1 and (not shape.experts or shape.experts % config.ep):
        mistakes.append(f"ep={config.ep}: the model has {shape.experts} experts; give a divisor of that")
    if config.zero_group not in ("all", "node") and (config.dp * config.cp) % int(config.zero_group):
        mistakes.append(f"zero_group={config.zero_group}: must divide dp*cp = {config.dp * config.cp}")
    if dtype not in COMPUTE:
        mistakes.append(f"dtype={dtype}: not predicted for framework={config.framework}; give {listed(tuple(COMPUTE))}")
    compute = COMPUTE.get(dtype, "bfloat16")
    needed = (compute, NARROW.get(dtype, compute))
    mistakes += [
        f"dtype={dtype}: device {cluster.device.name} has no rate for {name}"
        for name in dict.fromkeys(needed)
        if name not in cluster.device.peak_flops_per_s
    ]
    if mistakes:
        raise ConfigError(*mistakes)
    kind, _, count = config.recompute.partition(":")
    return Layout(
        dp=config.dp, tp=config.tp, cp=config.cp, ep=config.ep, pp=config.pp, chunks=config.chunks,
        schedule=config.named_schedule, microbatch=config.microbatch_size,
        num_microbatches=microbatch_count(global_batch, config.dp, config.microbatch_size) or 1,
        zero=config.zero, zero_ways=_ways(config.zero_group, max(1, cluster.devices_per_node // config.tp)),
        sequence=bool(config.sp) and config.tp > 1,
        recomputed=(int(count) / shape.layers if count else 1.0) if kind == "full" else 0.0,
        selective=kind == "selective", fused_attention=True, compute=compute, gemm_dtype=needed[1],
        conventions=CONVENTIONS[config.framework], stage_layers=stages,
    )  # fmt: skip


def _ways(group: str, node: int) -> int:
    """Ranks over which ZeRO shards, 0 for all."""
    return {"all": 0, "node": node}[group] if group in ("all", "node") else int(group)


# --- the record -----------------------------------------------------------------------------------------------------


def _record(
    shape: Dims, layout: Layout, taken: StepTime, held: Bytes, request: Request, cluster: Cluster, began: float
) -> PlanRecord:
    device, step, used = cluster.device, taken.step_time_s, layout.devices
    tokens = request.global_batch * shape.seq
    rate = shape.model_flops(request.global_batch) / step / used
    best = peak_flops_per_s(layout.gemm_dtype, device)
    memory = {name: round(value) for name, value in _categories(held).items()}
    peak, limit = sum(memory.values()), request.memory_limit_bytes
    kinds = {
        "compute": step - taken.communication_s - taken.bubble_s - taken.optimizer_s,
        "communication": taken.communication_s, "bubble": taken.bubble_s, "optimizer": taken.optimizer_s,
    }  # fmt: skip
    return PlanRecord(
        request=request, fingerprint=Fingerprint("", "", device.name), stages=tuple(_stages(shape, layout)),
        num_microbatches=layout.num_microbatches, microbatch_size=layout.microbatch,
        global_microbatch=request.global_batch // layout.num_microbatches, pp_degree=layout.pp,
        schedule=layout.schedule if layout.pp > 1 else "none" if layout.num_microbatches == 1 else "accumulate",
        step_time_s=step, tokens_per_s=tokens / step, tokens_per_s_per_device=tokens / step / used,
        tflops_per_device=rate / 1e12, mfu=rate / best if best else None, peak_memory_bytes=peak,
        peak_tensor_bytes=peak - memory["reserve"], memory_by_category=memory,
        feasible=held.tensors <= limit if limit else fits(held, device), runnable=False, exact=True, masks=True,
        exposed_comm_s=taken.communication_s, bubble_s=taken.bubble_s, lower_bound_s=None, gap=None,
        cost_sources={"measured": 0.0, "fitted": 1.0, "roofline": 0.0, "extrapolated": 0.0},
        assumptions=(
            f"predicted from the model's dimensions under the conventions of {layout.conventions.name}, with constants "
            "fitted to published training runs (docs/accuracy.md)",
        ),
        trace_s=0.0, search_s=time.process_time() - began, num_params=shape.num_params,
        energy_j=None if device.power_w is None else device.power_w * used * step,
        input_s=request.global_batch / layout.dp * shape.seq * TOKEN_BYTES / device.host_bytes_per_s,
        placement=tuple(range(used)), layer_names=tuple(_names(shape)), time_by_kind_s=kinds,
        autopar_version=__version__,
    )  # fmt: skip


def _categories(held: Bytes) -> dict[str, float]:
    return {
        "parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer,
        "activations": held.activations, "transient": held.transient, "reserve": held.context + held.slack,
    }  # fmt: skip


def _names(shape: Dims) -> list[str]:
    return ["embedding", *(f"blocks.{i}" for i in range(shape.layers)), "head"]


def _stages(shape: Dims, layout: Layout) -> list[StagePlan]:
    """Stages over the devices of each group: tensor parallel nearest, then context and data parallel."""
    degrees = (layout.dp, layout.cp, layout.tp)
    sizes = [size for size in degrees if size > 1]
    mesh = tuple(MeshAxis(f"d{i}", size, prod(sizes[i + 1 :])) for i, size in enumerate(sizes))
    crossing = 1 if layout.sequence else REPLICATE
    splits = tuple(split for size, split in zip(degrees, (0, 1, crossing), strict=True) if size > 1)
    heads = tuple(factor for size, factor in zip(degrees, ("", "", "heads"), strict=True) if size > 1)
    recompute = "full" if layout.recomputed else "selective" if layout.selective else "none"
    strategy = LayerStrategy(splits, splits, {"attention": heads}, {}, layout.zero, recompute)
    found, first = [], 0
    blocks, width = stage_blocks(shape, layout), prod(degrees)
    for number, count in enumerate(blocks):
        layers = round(count) + (number == 0) + (number == len(blocks) - 1)
        begin = layout.pipeline.group_of(number) * width
        found.append(StagePlan(first, tuple(range(begin, begin + width)), mesh, (strategy,), (0,) * layers))
        first += layers
    return found
