"""Steps of transformers under other frameworks' plans: closed forms, and what was published of real clusters."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.api import estimate
from autopar.cli.main import _run
from autopar.cluster import Fabric, load_cluster
from autopar.dims import Dims
from autopar.errors import ConfigError
from autopar.formulate.config import ManualConfig
from autopar.frameworks import layout_of, shape_of, shape_of_spec
from autopar.rows import STEP_KINDS, read_tables
from autopar.transformer.calls import Local, block_piece
from autopar.transformer.constants import Constants, shipped_constants
from autopar.transformer.layout import CLASSIC, DEEPSPEED, TUNED, TUNED_2026, Conventions, Layout
from autopar.transformer.memory import block_bytes, kept_bytes, stage_bytes
from autopar.transformer.step import costs_of, step_time
from autopar.transformer.traffic import wire
from autopar.validation.steps import predict_steps
from autopar.validation.words import framework_in

SHARED = Path(__file__).parents[3] / "shared"


@cache
def reference() -> dict[str, Any]:
    path = SHARED / "reference" / "seed_numbers.json"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def gpt(layers: int, hidden: int, heads: int, seq: int = 2048, vocab: int = 51200) -> Dims:
    return Dims(
        layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab, seq, gated=False, tied=True, bias=True,
        positions=True,
    )  # fmt: skip


def llama_7b(seq: int) -> Dims:
    return Dims(32, 4096, 32, 32, 128, 11008, 32000, seq, gated=True, tied=False, bias=False, positions=False)


def seconds(shape: Dims, cluster: str, batch: int, config: str, dtype: str = "bf16") -> float:
    where = load_cluster(cluster)
    layout = layout_of(ManualConfig.parse(config), shape, where, batch, dtype)
    return step_time(costs_of(shape, layout, where), shipped_constants()).step_time_s


def layout(config: str, cluster: str = "8x8xa100-80gb", batch: int = 64, **changes: Any) -> Layout:
    found = layout_of(ManualConfig.parse(config), gpt(32, 4096, 32), load_cluster(cluster), batch, "fp16")
    return replace(found, **changes)


# --- the model ------------------------------------------------------------------------------------------------------


def test_parameters_and_flops_of_the_published_table() -> None:
    """Table 1 of PTD-P: parameters to the printed digit; and its hardware FLOPs give the TFLOP/s it prints.

    The table's time isn't printed: its teraFLOP/s and the formula of FLOPs are, from which `iter_s_derived` is.
    """
    table = reference()["ptdp_table1"]
    for row in table["rows"]:
        shape = gpt(int(row["l"]), int(row["h"]), int(row["heads"]), table["s"], table["V"])
        assert shape.num_params / 1e9 == pytest.approx(row["params_B"], abs=0.05 if row["params_B"] < 1000 else 0.5)
        rate = shape.hardware_flops(int(row["batch"])) / row["iter_s_derived"] / row["gpus"] / 1e12
        assert rate == pytest.approx(row["tflops_per_gpu"], rel=0.003)


def test_flops_of_a_model_by_hand() -> None:
    """6 FLOPs a matrix element and token, 6 a head's width and position for attention's causal half."""
    shape = gpt(2, 8, 2, seq=4, vocab=16)
    matrices = 2 * 12 * 8 * 8 + 16 * 8
    assert shape.model_flops(3) == 12 * (6 * matrices + 6 * 2 * 8 * 4)


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_activations_by_the_published_formulas(tp: int) -> None:
    """Bytes kept of a block are those of Korthikanti et al., 2022: with scores in memory, split, and recomputed."""
    shape = gpt(32, 4096, 32)
    s, b, h, a = 2048, 4, 4096, 32
    classic: dict[str, Any] = {"conventions": CLASSIC, "fused_attention": False, "microbatch": b}
    plain = layout(f"dp={64 // tp},tp={tp},framework=megatron", **classic)
    split = replace(plain, sequence=tp > 1)
    assert block_bytes(shape, plain) == pytest.approx(s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp)))
    assert block_bytes(shape, split) == pytest.approx(s * b * h / tp * (34 + 5 * a * s / h))
    assert kept_bytes(shape, replace(split, selective=True)) == pytest.approx(34 * s * b * h / tp)
    assert kept_bytes(shape, replace(plain, recomputed=1.0)) == pytest.approx(2 * s * b * h)


@pytest.mark.parametrize(("zero", "kept"), [(0, (2, 2, 12, 1)), (1, (2, 2, 12, 8)), (2, (2, 2, 12, 8))])
def test_states_by_the_formulas_of_zero(zero: int, kept: tuple[int, int, int, int]) -> None:
    """DeepSpeed's states a parameter, in half precision with Adam: 16, 4 + 12 / d, 2 + 14 / d bytes (ZeRO, 2020)."""
    shape = gpt(32, 4096, 32)
    held = stage_bytes(shape, layout(f"dp=8,devices=8,zero={zero},framework=deepspeed", conventions=DEEPSPEED), 0)
    parameter, gradient, state, ways = kept
    each = shape.num_params
    spread = each / ways if zero == 2 else each
    assert held.states == pytest.approx(parameter * each + gradient * spread + state * each / ways, rel=0.005)


def test_bytes_follow_the_dtype() -> None:
    """Megatron sums float16 gradients in 2 bytes and others in 4; all but masks of float32 activations is doubled."""
    shape = gpt(32, 4096, 32)
    half, other, full = (
        layout("dp=64,framework=megatron", compute=dtype) for dtype in ("float16", "bfloat16", "float32")
    )
    held = [stage_bytes(shape, one, 0).gradients / shape.num_params for one in (half, other, full)]
    assert held == pytest.approx([2, 4, 4], rel=0.005)
    assert block_bytes(shape, full) == 2 * block_bytes(shape, half) == 2 * block_bytes(shape, other)


def test_activations_of_operators_that_are_not_fused(capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP's bytes of a block agree with what is walked of the traced model: Llama keeps half as much again as fused.

    A trace's RMS norm scales in float32 (2 bytes a value more, twice) and keeps rotations' small tables.
    """
    spec = "llama:layers=2,hidden=1024,heads=8,vocab=512,ffn=2752,seq=512"
    held = {}
    for framework in ("autopar", "fsdp"):
        config = f"dp=8,microbatch_size=4,zero=3,framework={framework}"
        asked = ["estimate", spec, "--cluster", "8xa100-80gb", "--global-batch", "32", "--config", config, "--json"]
        assert _run(asked, debug=True) == 0
        held[framework] = json.loads(capsys.readouterr().out)["memory_by_category"]["activations"]
    assert held["fsdp"] == pytest.approx(held["autopar"], rel=0.12)
    assert held["fsdp"] < held["autopar"]


def test_activations_of_experts_by_hand() -> None:
    """Mixtral on 8 tensor ranks that split each expert: rows in expert order and their results twice stay whole.

    A token keeps 8 h / 8 bytes around norms, 2 (h + 2 kv) / 8 + 2 h / 8 in attention, 2 * 6 ffn / 8 in its experts.
    """
    shape = replace(llama_7b(4096), kv_heads=8, ffn=14336, experts=8, topk=2)
    where = load_cluster("8xh100-80gb")
    config = ManualConfig.parse("tp=8,sp=1,framework=megatron")
    kept = block_bytes(shape, layout_of(config, shape, where, 8, "bf16"))
    assert kept == 4096 * (8 * 4096 / 8 + 2 * (4096 + 2 * 1024) / 8 + 2 * 4096 / 8 + 2 * 6 * 14336 / 8 + 2 * 6 * 4096)


def test_experts_are_held_where_they_are_dealt() -> None:
    """With experts dealt over 8 ranks a device holds an eighth of them, and all of the rest."""
    shape = replace(llama_7b(4096), experts=8, topk=2)
    where = load_cluster("8xh100-80gb")
    whole, dealt = (
        stage_bytes(
            shape, layout_of(ManualConfig.parse(f"dp=8,ep={ep},framework=megatron"), shape, where, 8, "bf16"), 0
        )
        for ep in (1, 8)
    )
    experts = 32 * 8 * shape.expert_params
    assert whole.parameters - dealt.parameters == pytest.approx(2 * experts * 7 / 8)


def test_fused_experts_are_products_like_any_other() -> None:
    """From Megatron-Bridge 26.06 on, float8 experts on Blackwell run in one kernel: sooner than one by one, without
    bytes of activations and casts beside them; before, in bfloat16 and on Hopper all is as ever."""
    shape = replace(llama_7b(4096), experts=64, topk=2, ffn=2048)
    plan = replace(layout("dp=8,framework=megatron", "8xb200-180gb", 8), ep=8, compute="bfloat16")

    def forward(how: Conventions, device: str, dtype: str = "float8_e4m3fn") -> Local:
        return block_piece(shape, replace(plan, conventions=how, gemm_dtype=dtype), _model(device)).forward

    old, new = forward(TUNED, "b200-180gb"), forward(TUNED_2026, "b200-180gb")
    assert new.grouped == 0
    assert old.narrow < new.narrow < old.narrow + old.grouped
    assert (old.moved - new.moved) * _model("b200-180gb").device.memory_bytes_per_s == pytest.approx(
        2 * 4096 * 2 * 2048 * (3 + 1.5 / 2 * 3)
    )
    assert forward(TUNED, "b200-180gb", "bfloat16") == forward(TUNED_2026, "b200-180gb", "bfloat16")
    assert forward(TUNED, "h100-80gb") == forward(TUNED_2026, "h100-80gb")
    versions = ("Megatron-Bridge 26.04.01", "Megatron-Bridge 26.06", "Megatron-Bridge 26.08.01", "Megatron-Bridge")
    assert [framework_in(text) for text in versions] == [TUNED, TUNED_2026, TUNED_2026, TUNED]


# --- seconds --------------------------------------------------------------------------------------------------------


def test_pipeline_of_equal_stages() -> None:
    """Stages of equal work and no traffic take (m + p - 1) passes; simulated and in closed form alike."""
    shape = gpt(32, 4096, 32, vocab=1)
    plan = layout("tp=8,pp=8,microbatch_size=2,framework=megatron", batch=64)
    nothing = dict.fromkeys(
        ("pass_us", "step_ms", "straggle", "optimizer", "gap_us", "kernel_us", "between", "round_us")
    )
    free = Constants(dict(Constants.expected().table) | dict.fromkeys(nothing, 1e-9))
    costs = costs_of(shape, plan, load_cluster("8x8xa100-80gb"))
    simulated, closed = (step_time(costs, free, simulated=way).step_time_s for way in (True, False))
    assert simulated == pytest.approx(closed, rel=1e-3)
    one = step_time(replace(costs, layout=replace(plan, num_microbatches=8)), free).step_time_s
    assert simulated / one == pytest.approx((32 + 7) / (8 + 7), rel=2e-3)


@pytest.mark.parametrize("schedule", ["zb", "zbv", "dualpipev"])
def test_zero_bubble_schedules_idle_less(schedule: str) -> None:
    """Schedules that split the backward pass are predicted, with a smaller bubble than 1F1B's."""
    shape, where = gpt(32, 4096, 32), load_cluster("8x8xa100-80gb")
    plain, split = (layout(f"tp=8,pp=8,framework=megatron,schedule={name}") for name in ("1f1b", schedule))
    bubble, less = (step_time(costs_of(shape, x, where), shipped_constants()).bubble_s for x in (plain, split))
    assert 0 <= less < bubble


@pytest.mark.parametrize(("sp", "part"), [(0, 1.0), (1, 2 / 3)])
def test_sums_beside_the_weights_products(sp: int, part: float) -> None:
    """Where all is hidden that can be, Megatron's backward pass shows no sum, in sequence parallel a third of six.

    Where nothing is, it shows as much as a framework that waits for each.
    """
    shape, where = gpt(32, 12288, 96), load_cluster("8xa100-80gb")  # products take longer than sums
    plan = layout(f"tp=8,sp={sp},framework=megatron", "8xa100-80gb", 8)

    def shown_s(hidden: float, hides: bool) -> float:
        how = replace(plan, conventions=replace(plan.conventions, hides_backward=hides))
        known = Constants(dict(Constants.expected().table) | {"tensor_hidden": hidden})
        return step_time(costs_of(shape, how, where), known).communication_s

    sent_s = costs_of(shape, plan, where).traffic.tensor_backward.inside * Constants.expected().of("inside")
    assert shown_s(0.0, True) == pytest.approx(shown_s(1.0, False))
    saved_s = shown_s(0.0, True) - shown_s(1.0, True)
    assert saved_s == pytest.approx(plan.num_microbatches * 32 * part * sent_s)


def test_ring_over_nodes_by_hand() -> None:
    """A sum over two nodes of 8 sends 2 · 15/16 of the buffer over the 8 links of a node's edge."""
    where = load_cluster("2x8xa100-80gb")
    found = wire("all_reduce", 8e9, 16, 1, where, _model("a100-80gb"))
    assert found.between == pytest.approx(2 * 15 / 16 * 8e9 / (8 * where.inter.bytes_per_s))
    assert found.inside == 0


def test_sums_in_switches_between_nodes_by_hand() -> None:
    """In switches that add up 8 GB leave a node over 8 links of 10 GB/s once instead of 2 x 15/16 times, in two rounds;
    where 31 of 32 nodes lie in other pods, at half the rate, an exchange between all of them takes twice as long."""
    where, model = load_cluster("2x8xa100-80gb"), _model("a100-80gb")
    plain = where.inter
    found = wire("all_reduce", 8e9, 16, 1, replace(where, inter=Fabric("sharp", 1e10, 1e-5, in_switch=True)), model)
    assert (found.between, found.rounds) == pytest.approx((0.1, 2.0))
    large = load_cluster("32x8xa100-80gb")
    pods = replace(large, inter=Fabric(plain.name, plain.bytes_per_s, plain.latency_s, pod_nodes=1, spine_share=0.5))
    one, two = (wire("all_to_all", 8e9, 32, 8, which, model).between for which in (large, pods))
    assert two == pytest.approx(2 * one)


def _model(name: str) -> Any:
    from autopar.cost.roofline import model_of

    return model_of(load_cluster(f"8x{name}").device)


def test_best_degrees_of_a_published_cluster() -> None:
    """PTD-P, figures 13 and 16: tensor 8 and pipeline 8 are best of 64 devices, and a microbatch of 2."""
    for batch in (32, 128):
        times = {tp: seconds(gpt(32, 20480, 128), "8x8xa100-80gb", batch,
                             f"tp={tp},pp={64 // tp},recompute=full,framework=megatron", "fp16")
                 for tp in (2, 4, 8, 16, 32)}  # fmt: skip
        assert min(times, key=times.__getitem__) == 8
    for batch in (128, 512):
        times = {size: seconds(gpt(32, 15360, 128), "8x8xa100-80gb", batch,
                               f"tp=8,pp=8,microbatch_size={size},recompute=full,framework=megatron", "fp16")
                 for size in (1, 2, 4, 8)}  # fmt: skip
        assert min(times, key=times.__getitem__) == 2


def test_fully_sharded_llama_at_scale() -> None:
    """Llama-7B, 2 sequences a device: sharding alone is best to 64 devices, with tensor parallel 2 to 4 by 2,048.

    Tokens a second and device fall all the way (Fernandez et al., "Hardware scaling trends and diminishing returns in
    large-scale distributed training", 2024, report a third less from 128 to 2,048).
    """
    best, rates = {}, []
    for devices in (8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        times = {}
        for tp in (1, 2, 4, 8):
            config = f"dp={devices // tp},tp={tp},sp={int(tp > 1)},zero=3,microbatch_size={2 * tp},framework=fsdp"
            times[tp] = seconds(llama_7b(4096), f"{devices // 8}x8xh100-80gb", 2 * devices, config)
        best[devices] = min(times, key=times.__getitem__)
        rates.append(2 * 4096 / times[best[devices]])
    assert {best[n] for n in (8, 16, 32, 64)} == {1}
    assert best[2048] in (2, 4)
    assert rates == sorted(rates, reverse=True)
    assert 0.1 < 1 - rates[-1] / rates[4] < 0.45


def test_tensor_parallel_stays_in_the_node() -> None:
    """On Frontier's nodes of 8 no best plan of 22B or 175B parameters has tensor parallel over more than a node."""
    for shape, pipelines in ((gpt(48, 6144, 48), (1, 2, 4)), (gpt(96, 12288, 96), (8, 16))):
        times = {}
        for tp in (2, 4, 8, 16, 32):
            for pp in pipelines:
                config = f"dp={512 // (tp * pp)},tp={tp},pp={pp},zero=1,recompute=full,framework=megatron"
                where = replace(load_cluster("frontier"), nodes=64)
                plan = layout_of(ManualConfig.parse(config), shape, where, 512, "bf16")
                times[tp, pp] = step_time(costs_of(shape, plan, where), shipped_constants()).step_time_s
        assert min(times, key=times.__getitem__)[0] <= 8


def test_published_runs_stay_as_near_as_the_page_says() -> None:
    """Errors on rows of known sources don't grow unseen: medians of PTD-P and vTrain, PTD-P's table within 10 %."""
    path = SHARED / "data" / "training_rows.csv"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    (table,) = read_tables([path], STEP_KINDS)
    chosen = [row for row in table.rows if row["source_id"] in ("vtrain", "ptdp-a100")]
    found = predict_steps([replace(table, rows=chosen)])
    published = [row for row, given in zip(found, chosen, strict=True) if given["notes"].startswith("aggregate")]
    assert len(published) == 10
    assert max(row.ape or 0.0 for row in published) < 0.1
    vtrain = sorted(row.ape or 0.0 for row in found if row.source_id == "vtrain")
    assert vtrain[len(vtrain) // 2] < 0.05


# --- what is asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("dp=8,ep=4,framework=megatron,devices=8", "experts"),
        ("dp=8,offload=optimizer,framework=fsdp,devices=8", "offload"),
        ("pp=64,framework=megatron", "64"), ("tp=7,framework=megatron", "7"),
        ("dp=64,zero=1,zero_group=3,framework=megatron", "zero_group=3"),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be(config: str, said: str) -> None:
    """What can't be laid out, or isn't predicted, is an error that names it."""
    with pytest.raises(ConfigError, match=said):
        layout(config)


def test_estimate_under_a_framework(capsys: pytest.CaptureFixture[str]) -> None:
    """The command predicts what autopar doesn't run: the contract's keys, bytes that add up, and the same seconds."""
    spec = "llama:layers=4,hidden=1024,heads=16,vocab=32000,experts=8,topk=2"
    config = "dp=4,tp=2,ep=4,zero=1,framework=megatron"
    arguments = ["--cluster", "8xh100-80gb", "--global-batch", "8", "--config", config]
    arguments += ["--dtype", "fp8", "--seq-len", "512"]
    assert _run(["estimate", spec, *arguments, "--json"], debug=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runnable"] is False
    assert found["exact"] is True
    assert found["peak_memory_bytes"] == sum(found["memory_by_category"].values())
    assert found["num_params"] == shape_of_spec(spec, 512).num_params
    shape, where = shape_of_spec(spec, 512), load_cluster("8xh100-80gb")
    plan = layout_of(ManualConfig.parse(config), shape, where, 8, "fp8")
    alone = step_time(costs_of(shape, plan, where), shipped_constants())
    assert found["step_time_s"] == pytest.approx(alone.step_time_s)
    assert _run(["estimate", spec, *arguments], debug=True) == 0
    assert "tensor 2 ways" in capsys.readouterr().out


def test_an_uneven_batch_takes_as_long_as_its_largest_share() -> None:
    """10 sequences on 4 replicas run as 12 would, 3 on the fullest, and the record counts 10."""
    shape, where = shape_of_spec("llama:layers=4,hidden=1024,heads=16,vocab=32000,seq=512", None), "4xh100-80gb"
    config = ManualConfig.parse("dp=4,microbatch_size=3,framework=fsdp")
    uneven, even = (estimate(shape, {}, cluster=where, global_batch=n, config=config) for n in (10, 12))
    assert uneven.num_microbatches == 1
    assert uneven.step_time_s == even.step_time_s
    assert uneven.tokens_per_s == pytest.approx(10 * 512 / even.step_time_s)


def test_states_of_the_optimizer_asked_for() -> None:
    """Of the moments, 8 bytes a parameter, SGD holds none and the 8-bit Adam 2, and their step is shorter."""
    shape, config = gpt(4, 1024, 16), ManualConfig.parse("dp=8,framework=megatron")
    names = ("adamw", "sgd", "adamw8bit")
    found = [
        estimate(shape, {}, cluster="8xh100-80gb", global_batch=8, config=config, optimizer=name) for name in names
    ]
    held = [(one.memory_by_category["optimizer"] - found[1].memory_by_category["optimizer"]) for one in found]
    elements = shape.layers * shape.block_params + shape.embedding_params
    assert held == pytest.approx([8 * elements, 0, 2 * elements])
    assert found[1].step_time_s < found[2].step_time_s < found[0].step_time_s


def test_what_is_not_predicted_under_a_framework_is_refused() -> None:
    """A dtype that no framework's model knows, a device faster than the others, more experts a token than there are."""
    shape, config = gpt(4, 1024, 16), ManualConfig.parse("dp=8,framework=megatron")
    for wrong in ({"dtype": "fp64"}, {"straggler": 0.5}, {"straggler": float("nan")}):
        (name,) = wrong
        with pytest.raises(ConfigError, match=name):
            estimate(shape, {}, cluster="8xh100-80gb", global_batch=8, config=config, **wrong)
    with pytest.raises(ConfigError, match="topk=9"):
        shape_of_spec("llama:layers=1,hidden=64,heads=4,vocab=64,experts=8,topk=9", None)


def test_dimensions_of_models() -> None:
    """A model's own dims, and a transformers configuration, give the same shape; what has none is refused."""
    from torch import nn

    from autopar.trace.models.spec import load_model

    spec = "llama:layers=2,hidden=64,heads=4,kv_heads=2,ffn=128,vocab=256"
    loaded = load_model(spec, seq_len=32)
    assert shape_of(loaded.model, loaded.inputs) == shape_of_spec(spec, 32)
    counted = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert shape_of_spec(spec, 32).num_params == counted
    with pytest.raises(ConfigError, match="framework=autopar"):
        shape_of(nn.Linear(2, 2), loaded.inputs)


def test_others_wait_for_a_slow_device() -> None:
    """A device that takes twice as long doubles the passes of a step without a pipeline, of one stage with one."""
    shape, where = gpt(32, 4096, 32), load_cluster("8x8xa100-80gb")
    for config, most in (("dp=64,framework=megatron", 2.0), ("tp=8,pp=8,framework=megatron", 2.0)):
        costs = costs_of(shape, layout(config), where)
        usual, slow = (step_time(costs, shipped_constants(), straggler=f).step_time_s for f in (1.0, 2.0))
        assert 1.5 * usual < slow < most * usual
