"""Rows of sources that nobody has seen: other words, devices and plans are predicted within reason or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.rows import Table
from autopar.transformer.calls import peak_flops_per_s
from autopar.transformer.memory import stage_bytes
from autopar.validation.runs import Run, read_run
from autopar.validation.steps import PredictedStep, predict_steps
from autopar.validation.words import framework_in

RUN = {
    "row_id": "a", "source_id": "lab", "model_name": "llama", "layers": "32", "hidden": "4096", "heads": "32",
    "kv_heads": "8", "ffn_hidden": "14336", "vocab": "128256", "seq_len": "8192", "gpu": "H100", "gpus": "64",
    "dtype": "bf16", "framework": "Megatron-LM", "tp": "4", "pp": "1", "micro_batch": "1", "global_batch_seqs": "128",
}  # fmt: skip
EXPERTS = {
    "arch": "moe", "layers": "28", "hidden": "2048", "heads": "16", "kv_heads": "16", "ffn_hidden": "1408",
    "experts": "64", "topk": "6", "ep": "8", "tp": "1",
}  # fmt: skip
SMALL = {"layers": "12", "hidden": "2048", "heads": "16", "kv_heads": "16", "ffn_hidden": "8192", "tp": "1"}

ODD: tuple[dict[str, str], ...] = (
    *({"gpu": gpu} for gpu in (
        "GB200", "NVIDIA GB200 NVL72", "B200", "B300", "MI300X", "AMD Instinct MI300X OAM", "H200 SXM 141GB", "H20",
        "A100", "A100 40GB PCIe", "A800", "H800", "GH200", "H100 NVL", "L40S",
    )),
    *({"gpu": gpu, "dtype": dtype} for gpu, dtype in (
        ("GB300 NVL72", "nvfp4"), ("MI325X", "fp8"), ("MI355X", "mxfp8"), ("B200", "FP8-cs"),
        ("H100", "FP8 (current scaling)"), ("H100", "fp8 blockwise"), ("H100", "bf16-mixed"), ("H100", "float32"),
        ("V100", "fp16"),
    )),
    *({"framework": name} for name in (
        "", "MaxText", "nanotron 0.4", "GPT-NeoX", "HF Trainer + accelerate", "torchtune", "Axolotl", "LLaMA-Factory",
        "EasyLM (JAX)", "MindSpeed", "Primus", "Colossal-AI", "NeMo 24.07", "Alpa",
    )),
    *({"zero_stage": zero, "framework": name, "tp": "1"} for zero, name in (
        ("hsdp", "FSDP2"), ("HYBRID_SHARD", "PyTorch FSDP"), ("fsdp (shard group 16)", "MosaicML LLM Foundry"),
        ("hsdp", "torchtitan"), ("ZeRO-2", "DeepSpeed"), ("ZeRO-3 offload", "deepspeed"), ("ddp", "pytorch ddp"),
    )),
    *({"pp": "4", "schedule": schedule} for schedule in ("zb-h1", "zbv", "1F1B-I", "interleaved", "gpipe", "none")),
    {"cp": "4", "seq_len": "131072", "global_batch_seqs": "16"},
    {"cp": "8", "tp": "8", "seq_len": "262144", "global_batch_seqs": "4"},
    {"cp": "2", "pp": "2", "virtual_stages": "4", "schedule": "interleaved"},
    {"gpus": "12", "global_batch_seqs": "12"}, {"gpus": "100", "tp": "1", "global_batch_seqs": "200"},
    {"gpus": "6", "tp": "2", "pp": "3", "layers": "30", "global_batch_seqs": "24"},
    {"gpus": "2520", "tp": "8", "pp": "35", "layers": "105", "hidden": "20480", "ffn_hidden": "81920", "heads": "160",
     "global_batch_seqs": "2520"},
    {"gpus": "1"} | SMALL, {"gpus": "8", "gpu": "RTX 4090", "seq_len": "2048"} | SMALL,
    EXPERTS, EXPERTS | {"ep": "", "tp": "2"}, EXPERTS | {"dtype": "fp8"},
    EXPERTS | {"gpu": "B200", "dtype": "mxfp8", "framework": "Megatron-Bridge 26.06"},
    EXPERTS | {"ep": "64", "gpus": "256", "layers": "61", "hidden": "7168", "heads": "128", "kv_heads": "128",
               "experts": "256", "topk": "8", "ffn_hidden": "2048", "pp": "4", "schedule": "dualpipe",
               "global_batch_seqs": "4096"},
    {"seq_len": "", "vocab": "", "kv_heads": "", "ffn_hidden": "", "heads": ""},
    {"model_name": "Llama-3.1-70B", "layers": "", "hidden": "", "heads": "", "ffn_hidden": ""},
    {"micro_batch": "", "global_batch_seqs": ""}, {"micro_batch": "3"}, {"global_batch_seqs": "1000"},
    {"recompute": "full:8"}, {"recompute": "selective (core attn)"}, {"recompute": "moe_act"},
    {"interconnect_inter": "RoCE 400Gbps"}, {"interconnect_intra": "900"}, {"sequence_parallel": "1"},
)  # fmt: skip
"""Rows as other sources might print them."""

REFUSED = ({"gpu": "TPU v5p"}, {"gpu": "Gaudi3"}, {"gpu": "Ascend 910B"}, {"gpu": "V100", "dtype": "bf16"},
           {"dtype": "int8"}, {"recompute": "the odd ones"}, {"pp": "4", "schedule": "breadth first"})  # fmt: skip


def read(change: dict[str, str]) -> Run:
    return read_run(RUN | change)


def predicted(*changes: dict[str, str]) -> list[PredictedStep]:
    return predict_steps([Table(Path("rows.csv"), "training", [RUN | change for change in changes])])


@pytest.mark.parametrize("change", ODD, ids=lambda change: " ".join(change.values())[:40])
def test_other_sources_rows_are_predicted_within_reason(change: dict[str, str]) -> None:
    """Model FLOPs are done at 5 to 75 % of the datasheet's rate, and a device holds its share of 16-bit weights."""
    (row,) = predicted(change)
    assert row.skipped_reason is None
    assert row.predicted_step_time_s
    assert row.predicted_peak_memory_bytes
    run = read(change)
    peak = peak_flops_per_s(run.layout.gemm_dtype, run.cluster.device)
    assert peak
    rate = run.shape.model_flops(run.global_batch) / row.predicted_step_time_s / run.layout.devices
    assert 0.05 < rate / peak < 0.75
    assert row.predicted_peak_memory_bytes > 2 * run.shape.num_params / run.layout.devices


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: " ".join(change.values()))
def test_what_no_one_knows_is_refused_by_its_value(change: dict[str, str]) -> None:
    """A device, dtype, schedule or recomputation that isn't known is skipped, and the reason names what was given."""
    (row,) = predicted(change)
    assert row.predicted_step_time_s is None
    assert row.skipped_reason
    assert change.get("dtype", next(reversed(change.values()))) in row.skipped_reason


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("LLaMA-Factory", "fsdp"), ("LLaMA-Factory, DeepSpeed ZeRO-2", "deepspeed"), ("HF transformers", "fsdp"),
        ("DeepSpeed (HF transformers)", "deepspeed"), ("Primus", "megatron core"),
        ("Primus (torchtitan)", "torchtitan"),
        ("a trainer of our own", ""),
    ],
)  # fmt: skip
def test_frameworks_under_trainers(text: str, name: str) -> None:
    """A trainer runs on the framework that is named beside it, else on its usual one."""
    found = framework_in(text)
    assert (found.name if found else "") == name


PLANS = st.fixed_dictionaries({
    "framework": st.sampled_from(["Megatron-LM", "NeMo", "PyTorch FSDP", "torchtitan 2025", "DeepSpeed", "InternEvo"]),
    "gpu": st.sampled_from(["A100", "H100", "B200", "MI300X"]), "gpus": st.sampled_from(["64", "128"]),
    "tp": st.sampled_from("1248"), "pp": st.sampled_from("124"), "cp": st.sampled_from("12"),
    "seq_len": st.sampled_from(["2048", "8192", "32768"]), "global_batch_seqs": st.just("512"),
    "micro_batch": st.sampled_from("12"),
})  # fmt: skip


@given(PLANS)
@settings(max_examples=25, deadline=None)
def test_more_of_one_thing_costs_what_it_must(plan: dict[str, str]) -> None:
    """Whole recomputation takes longer and less memory; a microbatch twice as large takes more memory; states shrink
    with each level of ZeRO; four layers more take longer and more."""
    plan = plan | {"recompute": "none", "zero_stage": "1"}
    again = plan | {"recompute": "full"}
    larger = plan | {"micro_batch": str(2 * int(plan["micro_batch"]))}
    deeper = plan | {"layers": "36"}
    base, rerun, wide, deep = predicted(plan, again, larger, deeper)
    for row in (base, rerun, wide, deep):
        assert row.skipped_reason is None
    assert (rerun.predicted_step_time_s or 0) > (base.predicted_step_time_s or 0)
    assert (rerun.predicted_peak_memory_bytes or 0) < (base.predicted_peak_memory_bytes or 0)
    assert (wide.predicted_peak_memory_bytes or 0) > (base.predicted_peak_memory_bytes or 0)
    assert (deep.predicted_step_time_s or 0) > (base.predicted_step_time_s or 0)
    assert (deep.predicted_peak_memory_bytes or 0) > (base.predicted_peak_memory_bytes or 0)
    run = read(plan)
    held = [stage_bytes(run.shape, replace(run.layout, zero=level), 0).states for level in (0, 1, 2, 3)]
    assert held == sorted(held, reverse=True)
    assert held[0] > held[3] or run.layout.data_ranks == 1
