"""What frameworks keep beside activations: what stages have sent, and gradients that add up whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.rows import Table
from autopar.transformer.layout import CLASSIC, FSDP, LITGPT, MODERN
from autopar.transformer.memory import stage_bytes
from autopar.validation.steps import ReadRow, read_rows
from tests.transformer.test_steps import gpt, layout
from tests.validation.test_steps import ROW


def test_stages_keep_what_they_sent() -> None:
    """Of 8 stages the first of 1F1B keeps 8 results of 2 x 2048 tokens, 2 bytes a value, the last none.

    Megatron lets go of them from 2022 on; in sequence parallel each of 2 tensor ranks has half.
    """
    shape = gpt(32, 4096, 32)
    plan = layout("dp=4,tp=2,pp=8,microbatch_size=2,framework=megatron", conventions=CLASSIC)
    sent = 2 * 2048 * 4096 * 2

    def more(group: int, sequence: bool) -> float:
        kept, gone = (
            replace(plan, sequence=sequence, conventions=replace(CLASSIC, keeps_sent=keeps)) for keeps in (True, False)
        )
        return stage_bytes(shape, kept, group).activations - stage_bytes(shape, gone, group).activations

    assert [more(group, False) / sent for group in (0, 6, 7)] == pytest.approx([8, 2, 0])
    assert more(0, True) == pytest.approx(8 * sent / 2)
    assert (FSDP.keeps_sent, MODERN.keeps_sent) == (True, False)


@pytest.mark.parametrize(("batch", "whole"), [("16", False), ("32", True), ("", True)])
def test_gradients_that_add_up_whole(batch: str, whole: bool) -> None:
    """LitGPT on 4 devices: 16 bits a parameter, and a quarter of gradients but where microbatches add up.

    Without a batch its recipes take 64 sequences, four microbatches of 4 a device; the head isn't the embedding's.
    """
    row = ROW | {
        "framework": "LitGPT", "gpus": "4", "dp": "4", "tp": "1", "micro_batch": "4", "global_batch_seqs": batch,
        "model_name": "llama 3.2 1b",
    }  # fmt: skip
    (read,) = read_rows([Table(Path("rows.csv"), "training", [row])])
    assert isinstance(read, ReadRow)
    shape, plan = read.run.shape, read.run.layout
    held = stage_bytes(shape, plan, 0)
    assert plan.conventions is LITGPT
    assert not shape.tied
    assert held.parameters == pytest.approx(2 * shape.num_params / 4, rel=1e-3)
    assert held.gradients == pytest.approx(2 * shape.num_params / (1 if whole else 4), rel=1e-3)
    assert held.optimizer == pytest.approx(4 * shape.num_params / 4, rel=1e-3)
