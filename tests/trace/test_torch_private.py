"""Private names of torch that tracing uses."""

from __future__ import annotations

import torch

from autopar.trace.torch_private import HIGHER_ORDER, OVERLOAD, as_if_exporting, storage_id


def test_private_names_exist_and_do_what_they_are_used_for() -> None:
    """The compiling state is seen by models, storages are told apart, operator types are told apart."""
    assert not torch.compiler.is_exporting()
    with as_if_exporting():
        assert torch.compiler.is_exporting()
    x = torch.empty(4, device="meta")
    assert storage_id(x) == storage_id(x.view(2, 2)) != storage_id(torch.empty(4, device="meta"))
    assert isinstance(torch.ops.aten.add.Tensor, OVERLOAD)
    assert isinstance(torch.ops.higher_order.cond, HIGHER_ORDER)
