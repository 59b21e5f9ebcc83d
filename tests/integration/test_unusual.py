"""Unusual models are run exactly: on one device without torch.distributed, and on four processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.emit.build import emit
from autopar.errors import ConfigError
from autopar.trace import trace
from autopar.verify import verify
from tests.emit.handmade import data_parallel, record_of
from tests.integration.test_exact import planned
from tests.integration.unusual import CASES, OneBatch, example
from tests.pool import Pool

SPLIT = [name for name in CASES if name != "one batch"]


@pytest.mark.parametrize("name", SPLIT)
def test_one_device_without_processes(name: str) -> None:
    """Four microbatches and full recomputation on one device: loss, gradients and parameters of the model itself."""
    model, inputs, graph = example(name)
    record = record_of(
        graph, (), lambda i: data_parallel(graph, i, (), recompute="full"), global_batch=8, num_microbatches=4
    )
    report = verify(record, model, inputs, graph=graph)
    assert report.largest < 1e-9, str(report)


def check(name: str, text: str) -> dict[str, Any]:
    model, inputs, graph = example(name)
    return verify(planned(graph, text), model, inputs, graph=graph).to_json()


@pytest.mark.parametrize("config", ["dp=4,microbatch_size=2", "dp=4,zero=3,microbatch_size=4", "dp=2,tp=2,zero=1"])
@pytest.mark.parametrize("name", SPLIT)
def test_four_processes(pool: Pool, name: str, config: str) -> None:
    """Data parallel, ZeRO 3 and tensor parallel plans compute what the model computes."""
    report = pool.run(4, check, name, config)[0]
    assert report["largest"] < 1e-9, report


@pytest.mark.parametrize("config", ["dp=4,microbatch_size=4,zero=3", "tp=4,microbatch_size=16"])
def test_a_model_of_one_batch(pool: Pool, config: str) -> None:
    """What can be traced at the batch given alone runs on it, every rank with all samples, and on no other."""
    report = pool.run(4, check, "one batch", config)[0]
    assert report["largest"] < 1e-9, report
    with pytest.raises(ConfigError, match=r"global_batch=16: .* 4 samples"):
        planned(trace(OneBatch(), {"x": torch.zeros(4, 16)}), config)


def test_plain_attributes_are_not_saved() -> None:
    """Tensors that are plain attributes of the model are in the parallel module, and not in its state dict."""
    model, _, graph = example("plain attributes")
    pm = emit(record_of(graph, (), lambda i: data_parallel(graph, i, ()), global_batch=8), graph, model, device="cpu")
    assert set(pm.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(pm.get_buffer("first.scale"), torch.linspace(0.5, 1.5, 32, dtype=torch.float64))
