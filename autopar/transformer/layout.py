"""How a step is spread over devices: degrees, what is sharded, what runs again. Conventions of frameworks beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.cost.orders import Shape as PipelineShape

COMPUTE: Mapping[str, str] = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "bfloat16", "mxfp8": "bfloat16",
    "nvfp4": "bfloat16",
}  # fmt: skip
"""The dtype in which all but linear layers computes, by the dtype asked for."""

NARROW: Mapping[str, str] = {"fp8": "float8_e4m3fn", "mxfp8": "float8_e4m3fn", "nvfp4": "float4_e2m1fn_x2"}
"""Dtypes of linear layers that are predicted only."""


@dataclass(frozen=True)
class Conventions:
    """What a framework does where a plan doesn't say.

    `fused_attention`: scores never reach memory. `kernels`: of a block's forward pass. `hides_tp`, `hides_dp`: whether
    tensor- and data-parallel collectives run beside compute, `hides_backward`: whether tensor-parallel ones of the
    backward pass run beside the weights' products. `gradient_bytes` travel a parameter, and so many
    `held_gradient_bytes` are kept. `sequence`: whether tensor parallel implies Megatron's sequence parallel. `zero` and
    `recompute` are the defaults, `recompute_alone` that on a single device where it differs. `dropout`: whether the
    models of its time train with it. `lean_loss`: whether the loss keeps no float32 copy of the logits. `passes`: how
    often pointwise work moves what fused kernels would move once; `keeps`: how often autograd keeps it. `eager`:
    whether norms, rotations and activations are operators of their own, which keep what they read. `library_attention`:
    whether attention is the maker's newest kernel. `rerun`: the share of a block that `selective` recomputation runs
    again; 0 where it is the core of attention alone. `whole_batch`: whether the batch isn't split in time where a plan
    doesn't say, but for a pipeline into as many microbatches as stages. `messages`: how many collectives a block's
    parameters take; `link_share`: of a link's rate that these reach. `half_states`: whether parameters, gradients and
    moments all have 16 bits. `extra_state_bytes`: of copies that the optimizer makes a parameter, sharded as its states
    are. `dtensor`: whether DTensor splits tensors. `shows`: which memory its own log shows, `allocated` or `reserved`
    by torch; all that the device holds where empty. `fused_experts`: whether, with narrow dtypes on Blackwell, experts
    run as one product with their activation and casts in it, and a step is replayed as one graph. `keeps_sent`: whether
    what a pipeline's stage has sent stays until its backward pass. `whole_gradients`: whether ZeRO 3 leaves gradients
    whole on each rank while those of several microbatches add up. `usual_batch`: sequences of a step where a plan
    doesn't say, 0 for one microbatch a rank. `unties`: whether the head has weights of its own whatever the model says.
    """

    name: str
    fused_attention: bool
    kernels: int
    hides_tp: bool
    hides_dp: bool
    gradient_bytes: int
    held_gradient_bytes: int
    sequence: bool
    zero: int
    recompute: str
    dropout: bool = False
    lean_loss: bool = False
    passes: float = 1.0
    library_attention: bool = False
    rerun: float = 0.0
    keeps: float = 1.0
    whole_batch: bool = False
    messages: float = 1.0
    half_states: bool = False
    extra_state_bytes: float = 0.0
    link_share: float = 1.0
    dtensor: bool = False
    shows: str = ""
    eager: bool = False
    recompute_alone: str = ""
    hides_backward: bool = False
    fused_experts: bool = False
    keeps_sent: bool = False
    whole_gradients: bool = False
    usual_batch: int = 0
    unties: bool = False


CLASSIC = Conventions(
    "megatron 2021", False, 22, False, False, 2, 4, False, 0, "none", True, keeps_sent=True
)  # its schedules.py, before `deallocate_output_tensor`
CLASSIC_ZERO = replace(CLASSIC, name="megatron deepspeed", held_gradient_bytes=2)
MODERN = Conventions(
    "megatron core",
    True,
    16,
    False,
    True,
    4,
    4,
    False,
    1,
    "none",
    library_attention=True,
    messages=0.3,
    hides_backward=True,
)
TUNED = replace(
    MODERN,
    name="nemo",
    kernels=14,
    hides_tp=True,
    hides_backward=False,
    sequence=True,
    gradient_bytes=2,
    held_gradient_bytes=2,
)
TUNED_2026 = replace(TUNED, name="megatron bridge 26.06", fused_experts=True)  # its release notes, 0.5.1
FSDP = Conventions(
    "fsdp",
    True,
    22,
    False,
    True,
    4,
    4,
    True,
    3,
    "none",
    passes=1.5,
    rerun=0.45,
    whole_batch=True,
    dtensor=True,
    eager=True,
    keeps_sent=True,  # torch/distributed/pipelining/stage.py, `fwd_cache`
)
COMPILED = replace(FSDP, name="fsdp compiled", kernels=12, passes=0.8, eager=False)
TORCHTITAN = replace(COMPILED, name="torchtitan", recompute="selective", keeps=0.93, shows="reserved")  # metrics.py
TORCHTITAN_2025 = replace(TORCHTITAN, lean_loss=True)
LITGPT = replace(
    FSDP,
    name="litgpt",
    recompute="full",
    half_states=True,
    shows="allocated",
    recompute_alone="none",
    whole_gradients=True,  # `no_backward_sync`, of which torch's FSDP says so
    usual_batch=64,  # args.py
    unties=True,  # `tie_embeddings` is refused
)  # finetune/full.py
TUNED_FSDP = replace(COMPILED, name="automodel", library_attention=True)
DEEPSPEED = Conventions(
    "deepspeed",
    True,
    30,
    False,
    True,
    2,
    2,
    False,
    3,
    "none",
    passes=1.5,
    rerun=0.45,
    messages=60,
    keeps=1.15,
    link_share=0.4,
    eager=True,
    keeps_sent=True,  # runtime/pipe/engine.py, `pipe_buffers`
)  # fmt: skip
PADDLE = Conventions("paddle", True, 26, False, False, 2, 2, False, 1, "none", passes=1.3, messages=2)
INTERNEVO = Conventions(
    "internevo",
    True,
    20,
    False,
    True,
    2,
    2,
    False,
    1,
    "none",
    passes=1.3,
    messages=30,
    extra_state_bytes=10,
    keeps_sent=True,
)  # core/scheduler/pipeline_scheduler.py, `output_objs`
GALVATRON = replace(MODERN, name="galvatron", zero=3, passes=1.5, keeps=1.9, whole_batch=True)


@dataclass(frozen=True)
class Layout:
    """Degrees and choices of a step, of which ep divides dp * cp (times tp where experts aren't split).

    `zero_ways` are the ranks over which ZeRO shards, 0 for all data ranks. `recomputed` is the share of blocks that run
    again whole, `selective` whether the core of attention does. `gemm_dtype` is that of the blocks' linear layers.
    `state_bytes` a parameter are those of the optimizer's states, with 32 bits where there is a choice.
    """

    dp: int
    tp: int
    cp: int
    ep: int
    pp: int
    chunks: int
    schedule: str
    microbatch: int
    num_microbatches: int
    zero: int
    zero_ways: int
    sequence: bool
    recomputed: float
    selective: bool
    fused_attention: bool
    compute: str
    gemm_dtype: str
    conventions: Conventions
    stage_layers: tuple[int, ...] = ()
    state_bytes: float = 8.0

    @property
    def pipeline(self) -> PipelineShape:
        """What the schedule is laid out for."""
        return PipelineShape(self.schedule, self.pp, self.chunks, self.num_microbatches)

    @property
    def width(self) -> float:
        """Bytes of an activation."""
        return 4.0 if self.compute == "float32" else 2.0

    def of_gradients(self, usual: float) -> float:
        """Bytes of a gradient that usually has so many: Megatron's float32 ones are for bfloat16 (its arguments.py)."""
        return min(usual, 2.0) if self.compute == "float16" else usual

    @property
    def devices(self) -> int:
        """Devices used."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks that share a dense parameter's gradient."""
        return self.dp * self.cp

    @property
    def shard_ways(self) -> int:
        """Ranks over which states, or all, of a dense parameter are sharded."""
        return min(self.zero_ways or self.data_ranks, self.data_ranks) if self.zero else 1

    @property
    def expert_ways(self) -> int:
        """Ranks that the experts of a layer are dealt over."""
        return max(1, self.ep)
