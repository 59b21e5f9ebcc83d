"""Encoders, vision transformers and convolutional nets compute what they compute on one device: real processes."""

from __future__ import annotations

import pytest

from autopar.formulate.config import ManualConfig
from tests.integration.models import MODELS, traced
from tests.integration.test_exact import GLOBAL_BATCH, check, planned
from tests.pool import Pool

CONFIGS = {"dp": "dp=4", "zero3": "dp=4,zero=3", "tp x dp": "dp=2,tp=2"}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_plan_is_exact(pool: Pool, name: str, config: str, recompute: str) -> None:
    """Loss, gradients and parameters after three AdamW steps are those of one device to 1e-9, all in float64."""
    text = CONFIGS[config]
    size = GLOBAL_BATCH // ManualConfig.parse(text).dp
    record = planned(traced(name), f"{text},microbatch_size={size},recompute={recompute}")
    report = pool.run(4, check, record, traced(name), name)[0]
    assert not report["missing_gradients"]
    assert report["largest"] < 1e-9, report


@pytest.mark.parametrize("name", ["bert", "vit", "cnn with groups"])
def test_microbatches_are_exact(pool: Pool, name: str) -> None:
    """Models whose samples keep apart may be split in time, too; the padding mask of an encoder is one of theirs."""
    record = planned(traced(name), "dp=2,tp=2,microbatch_size=2")
    assert record.num_microbatches == 4
    report = pool.run(4, check, record, traced(name), name)[0]
    assert report["largest"] < 1e-9, report
