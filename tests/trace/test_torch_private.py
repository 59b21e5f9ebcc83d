"""Private names of torch that tracing uses."""

from __future__ import annotations

import torch
from torch import nn

from autopar.trace.torch_private import (
    HIGHER_ORDER,
    OVERLOAD,
    as_if_exporting,
    is_persistent,
    named_tensors,
    owned_tensors,
    put_tensor,
    storage_id,
)


def test_private_names_exist_and_do_what_they_are_used_for() -> None:
    """The compiling state is seen by models, storages are told apart, operator types are told apart."""
    assert not torch.compiler.is_exporting()
    with as_if_exporting():
        assert torch.compiler.is_exporting()
    x = torch.empty(4, device="meta")
    assert storage_id(x) == storage_id(x.view(2, 2)) != storage_id(torch.empty(4, device="meta"))
    assert isinstance(torch.ops.aten.add.Tensor, OVERLOAD)
    assert isinstance(torch.ops.higher_order.cond, HIGHER_ORDER)


def test_tensors_of_a_module() -> None:
    """Parameters, buffers and plain attributes are found and replaced where they are; only buffers may persist."""
    owner = nn.BatchNorm1d(2)
    owner.register_buffer("unsaved", torch.zeros(1), persistent=False)
    owner.plain = torch.zeros(3)
    assert [is_persistent(owner, name) for name in ("running_mean", "unsaved", "plain")] == [True, False, False]
    assert {"weight", "running_var", "unsaved", "plain"} < set(owned_tensors(owner))
    for name in ("unsaved", "plain"):
        put_tensor(owner, name, torch.ones(1))
        assert getattr(owner, name).item() == 1
    assert "unsaved" in dict(owner.named_buffers())
    shared = nn.Linear(2, 2, bias=False)
    assert [name for name, _ in named_tensors(nn.Sequential(shared, shared))] == ["0.weight", "1.weight"]
