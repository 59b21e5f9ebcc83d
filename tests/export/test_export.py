"""Plans as settings of other frameworks: what was written in a configuration comes out, what can't be said is named."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from autopar.cluster import load_cluster
from autopar.errors import ConfigError
from autopar.export import deepspeed, megatron, torchtitan
from autopar.export.recipe import Recipe, read
from autopar.formulate.config import ManualConfig
from autopar.frameworks import predict, shape_of_spec
from autopar.plan import POLICIES, PlanRecord, Request
from tests.integration.models import traced
from tests.integration.staged import one_stage, staged


def written(text: str, devices: int = 8) -> PlanRecord:
    """The plan of a configuration for a GPT of four blocks and a batch of 32."""
    plan = one_stage(traced("deep gpt", "bfloat16"), text, devices, 32, "bf16")
    return replace(plan, request=replace(plan.request, seq_len=8))


def piped(text: str, counts: tuple[int, ...], schedule: str) -> PlanRecord:
    """Two groups of four devices, with these layers (embedding, four blocks, head) a stage, and 8 microbatches."""
    return staged(traced("deep gpt", "bfloat16"), (text, text), counts, schedule, 8, 4, 32, "bf16")


def flags(record: PlanRecord) -> dict[str, str]:
    """Megatron's flags with their values."""
    text, _ = megatron.settings(read(record))
    return {flag: value for flag, _, value in (line.partition(" ") for line in text.splitlines())}


def test_titan_fields_multiply_to_devices_and_batch() -> None:
    """Degrees make up all devices, and microbatch times accumulation times replicas the batch."""
    for text, zero in (("dp=4,tp=2,sp=1,zero=3,microbatch_size=2", "always"), ("dp=4,tp=2,sp=1,zero=2", "never")):
        job = tomllib.loads(torchtitan.settings(read(written(text)))[0])
        training, parallel = job["training"], job["parallelism"]
        degrees = {k.removesuffix("_degree"): v for k, v in parallel.items() if k.endswith("_degree") and v > 1}
        assert degrees == {"data_parallel_shard": 4, "tensor_parallel": 2}
        assert parallel["fsdp_reshard_after_forward"] == zero
        assert training["global_batch_size"] == 32
        assert training["local_batch_size"] == (2 if "size=2" in text else 1)
        assert training["seq_len"] == 8
    ddp = tomllib.loads(torchtitan.settings(read(written("dp=8")))[0])["parallelism"]
    assert (ddp["data_parallel_replicate_degree"], ddp["data_parallel_shard_degree"]) == (8, 1)


def test_stages_of_a_pipeline() -> None:
    """Uneven stages name their own blocks, in the order of the model, and a rank's batch holds all microbatches."""
    record = piped("dp=4,zero=2", (2, 4), "1f1b")
    job = tomllib.loads(torchtitan.settings(read(record))[0])
    assert job["parallelism"]["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm", "output"],
    ]  # fmt: skip
    assert job["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
    assert job["training"]["local_batch_size"] == 8
    assert job["parallelism"]["pipeline_parallel_microbatch_size"] == 1
    several = flags(piped("tp=4,sp=1", (2, 1, 1, 2), "interleaved"))
    layout = re.sub(r"t\*(\d+)", lambda m: "t" * int(m.group(1)), several["--pipeline-model-parallel-layout"])
    assert layout == "'Et|t|t|tL'"
    assert several["--pipeline-model-parallel-size"] == "2"


def test_megatron_flags() -> None:
    """Every key of a configuration has its flag, and what isn't asked for has none."""
    found = flags(written("dp=4,tp=2,sp=1,zero=1,microbatch_size=2,recompute=full:3"))
    assert found == {
        "--tensor-model-parallel-size": "2", "--sequence-parallel": "", "--pipeline-model-parallel-size": "1",
        "--use-distributed-optimizer": "", "--micro-batch-size": "2", "--global-batch-size": "32", "--seq-length": "8",
        "--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": "3", "--bf16": "",
        "--optimizer": "adam",
    }  # fmt: skip
    sharded = flags(written("dp=8,zero=3,recompute=full"))
    assert sharded["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert (sharded["--recompute-method"], sharded["--recompute-num-layers"]) == ("uniform", "1")


def test_what_megatron_is_predicted_with_comes_back() -> None:
    """Context and expert parallelism of an estimate under Megatron's habits are exported as they were written."""
    text = "dp=4,tp=2,cp=2,pp=2,ep=2,sp=1,zero=1,recompute=selective,framework=megatron"
    cluster = load_cluster("4x8xh100-80gb")
    request = Request("m", cluster.name, "h100-80gb", 32, 64, "bf16", POLICIES["bf16"], "adamw", config=text)
    shape = shape_of_spec("llama:layers=8,hidden=64,heads=4,vocab=64,experts=4,topk=2,moe_ffn=64", 16)
    found = flags(predict(shape, ManualConfig.parse(text), request, cluster, "bf16"))
    assert (found["--context-parallel-size"], found["--expert-model-parallel-size"]) == ("2", "2")
    assert found["--recompute-granularity"] == "selective"
    assert found["--micro-batch-size"] == "1"


def test_deepspeed_batch_adds_up() -> None:
    """The three batch sizes agree for the data-parallel ranks, as DeepSpeed demands."""
    text, notes = deepspeed.settings(read(written("dp=4,tp=2,zero=2,recompute=full")))
    found = json.loads(text)
    sizes = [found[k] for k in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    assert sizes[0] * sizes[1] * 4 == found["train_batch_size"] == 32
    assert found["zero_optimization"] == {"stage": 2}
    assert found["tensor_parallel"] == {"autotp_size": 2}
    assert any("checkpoint 4 of 4 blocks" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "text", "words"),
    [
        (torchtitan.settings, "dp=4,tp=2,zero=1,recompute=selective", ("zero=1", "without sp=1", "selective")),
        (torchtitan.settings, "dp=4,tp=2,sp=1", ("zero=0 beside tensor",)),
        (torchtitan.settings, "dp=8,zero=2,recompute=full:3", ("full recomputation of 3 of 4",)),
        (megatron.settings, "dp=8,layers=0-1:zero=1", ("blocks.2, blocks.3: split as dp=8 tp=1 cp=1 zero=0",)),
        (deepspeed.settings, "dp=4,tp=2,sp=1,recompute=selective", ("no sequence", "selective")),
        (megatron.settings, "dp=8,zero=1,zero_group=2", ("zero_group=2",)),
    ],
)
def test_what_does_not_fit_is_named(settings: Callable[[Recipe], Any], text: str, words: tuple[str, ...]) -> None:
    """A plan that a framework can't run is refused with one mistake for each thing that doesn't fit."""
    with pytest.raises(ConfigError) as caught:
        settings(read(written(text)))
    mistakes = caught.value.mistakes
    assert len(mistakes) == len(words)
    assert all(any(word in mistake for mistake in mistakes) for word in words)


def test_split_experts_are_refused() -> None:
    """A plan whose mesh splits experts is no other framework's, which is said whatever else there is."""
    record = written("dp=8")
    (stage,) = record.stages
    dealt = tuple(replace(strategy, roles=("batch+experts",)) for strategy in stage.strategies)
    mistakes = read(replace(record, stages=(replace(stage, strategies=dealt),))).mistakes
    assert [m for m in mistakes if m.startswith("experts are split")]
    assert not any("experts" in m for m in read(record).mistakes)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings go to standard output or the file, what they leave open to standard error; a refusal exits with 2."""
    plan, out = tmp_path / "plan.json", tmp_path / "ds.json"
    written("dp=8,zero=1").save(plan)
    for arguments, code in (([], 0), (["-o", str(out)], 0), (["--to", "torchtitan"], 2)):
        with pytest.raises(SystemExit) as exit_:
            main(["export", str(plan), "--to", "deepspeed", *arguments])
        assert (exit_.value.code or 0) == code
    said = capsys.readouterr()
    assert said.out.startswith(out.read_text().rstrip())
    assert "note: start it on 8 devices" in said.err
    assert "zero=1" in said.err
