"""What `verify` says of differences."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import EmitError
from autopar.verify import Difference, VerifyReport, _compare, _Training, verify
from tests.integration.models import example, traced
from tests.integration.test_exact import planned
from tests.pool import Pool

verify_module = sys.modules["autopar.verify"]  # `autopar.verify` is the function


def _training(gradients: list[float], loss: float = 1.0) -> _Training:
    named = {f"p{i}": torch.tensor([value]) for i, value in enumerate(gradients)}
    return _Training([loss], named, {})


def test_nothing_hides_a_gradient_that_is_no_number() -> None:
    """The largest difference is nan whether nan comes first, last, or from one rank of several."""
    theirs = _training([1.0, 1.0, 1.0])
    for at in range(3):
        broken = _training([math.nan if i == at else 1.0 + 1e-9 for i in range(3)])
        for ours in ([broken], [_training([1.0, 1.0, 1.0]), broken]):
            report = _compare(ours, theirs, "a model")
            assert math.isnan(report.largest)
            assert report.gradient.where == f"p{at}"


def test_nothing_hides_a_loss_that_is_no_number() -> None:
    """So is it where a loss is, whatever the gradients do."""
    assert math.isnan(_compare([_training([1.0], math.nan), _training([1.0])], _training([1.0]), "a model").largest)
    alike = Difference(0.0)
    assert VerifyReport(1.0, 1.0, 0.5, alike, alike, (), 1, "a model").largest == 0.5


def test_infinite_values_that_are_equal_are_no_difference() -> None:
    """Buffers hold masks with -inf; elsewhere it counts, as does another finite element beside it."""
    mask, other, masked_more = (torch.tensor(v) for v in ([-math.inf, 2.0], [-math.inf, 1.0], [-math.inf, -math.inf]))
    said = [
        _compare([_Training([1.0], {}, {"mask": m})], _Training([1.0], {}, {"mask": mask}), "a model").parameter.value
        for m in (mask.clone(), other, masked_more)
    ]
    assert said == [0.0, 0.5, math.inf]


def drifted() -> tuple[float, str, float]:
    """On a rank, of which the third has another parameter after the steps: what is said of it."""
    plan, (model, batch) = planned(traced("mlp"), "dp=4,microbatch_size=4"), example("mlp")
    trained = verify_module._train

    def with_a_fault(module: nn.Module, step: Callable[[], torch.Tensor], steps: int) -> _Training:
        found: _Training = trained(module, step, steps)
        found.parameters["last.bias"][:1] = -math.inf  # on all alike
        if dist.get_rank() == 2:
            found.parameters["last.weight"][0, 0] += 0.5
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_module, "_train", with_a_fault)
        report = verify(plan, model, batch, graph=traced("mlp"))
    return report.gradient.value, report.parameter.where, report.parameter.value


def failing() -> str:
    """On a rank: what `verify` raises where the reference can't be run."""
    plan, (model, batch) = planned(traced("mlp"), "dp=4,microbatch_size=4"), example("mlp")

    def no_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_module, "_reference", no_memory)
        with pytest.raises(EmitError) as found:
            verify(plan, model, batch, graph=traced("mlp"))
    return str(found.value)


def test_replicas_that_drift_apart_are_seen(pool: Pool) -> None:
    """Ranks that hold the same parameters are compared with one another, not only the first with the model."""
    gradient, where, value = pool.run(4, drifted)[0]
    assert gradient < 1e-9
    assert where == "last.weight on rank 2"
    assert value > 1e-3


def test_an_error_of_the_reference_is_raised_on_all_ranks(pool: Pool) -> None:
    """A model too large for one device ends `verify` everywhere instead of leaving the others to wait."""
    assert all("out of memory" in said for said in pool.run(4, failing))
