"""The values that a parallel module starts from."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.emit.build import emit
from tests.integration.test_exact import planned
from tests.integration.unusual import example
from tests.pool import Pool, RankError


def largest_difference(config: str) -> float:
    """Between what rank 0's model holds and the parallel module, the models of all ranks being different."""
    model, _, graph = example("regression")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    pm = emit(planned(graph, config), graph, model, device="cpu")
    rank_0 = [{name: p.detach() for name, p in model.named_parameters()}]
    dist.broadcast_object_list(rank_0, 0)
    found = {name: p.full_tensor() for name, p in pm.named_parameters() if isinstance(p, DTensor)}
    assert found.keys() == rank_0[0].keys()
    return max(float((found[name] - whole).abs().max()) for name, whole in rank_0[0].items())


@pytest.mark.parametrize("config", ["dp=4,microbatch_size=2", "dp=4,zero=3,microbatch_size=2", "dp=2,tp=2,zero=1"])
def test_values_are_those_of_rank_0(pool: Pool, config: str) -> None:
    """Ranks that initialised their models differently all start from rank 0's."""
    assert pool.run(4, largest_difference, config) == [0.0] * 4


def mixed() -> None:
    """The model is on meta on rank 1 only."""
    model, _, graph = example("regression")
    here = copy.deepcopy(model).to("meta") if dist.get_rank() == 1 else model
    emit(planned(graph, "dp=4,microbatch_size=2"), graph, here, device="cpu")


def test_meta_on_some_ranks_is_refused(pool: Pool) -> None:
    """A model that is real on one rank and on meta on another is refused on all, and nothing hangs."""
    with pytest.raises(RankError, match="on meta on some ranks"):
        pool.run(4, mixed)
