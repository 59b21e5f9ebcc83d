"""The demand of keeping parameters in step: gradient sums, ZeRO's gathers and scatters, the optimizer's own work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.demand import Demand
from autopar.cost.moved import OPTIMIZER_PASSES
from autopar.cost.moves import collective_key, copy_key
from autopar.cost.states import STATE_BYTES
from autopar.graph import DTYPE_BYTES, CollectiveKey, Dtype, Operand, OpKey
from autopar.plan import DtypePolicy, MeshAxis
from autopar.shard.storage import Keeper, ParameterStorage


@dataclass(frozen=True)
class SyncDemand:
    """Demand of one set of parameters: in every microbatch, and once a step."""

    micro: Demand
    step: Demand


def sync_demand(
    elements: int,
    storage: ParameterStorage,
    trained: bool,
    mesh: Sequence[MeshAxis],
    policy: DtypePolicy,
    microbatches: int = 1,
    staged: bool = False,
    again: bool = True,
) -> SyncDemand:
    """Demand of synchronising `elements` local parameters kept as `storage` says.

    ZeRO 0: all-reduce of the gradients once a step. 1: reduce-scatter and all-gather once a step. 2 and 3 (FSDP2): in
    every microbatch a gather for the forward, in 3 another for the backward (where it gathers `again`), and a
    reduce-scatter; in a stage of a
    pipeline (`staged`) gradients are added up whole and scattered once a step. Gradients travel in `policy.gradients`,
    gathered parameters in `policy.compute`; a sum that no scatter does is an all-reduce once a step, of shards where
    they have been scattered.
    """
    if elements == 0:
        return SyncDemand(Demand(), Demand())
    kept = -(-elements // storage.ways(tuple(axis.size for axis in mesh)))
    gather = _collective("all_gather", elements, policy.compute, storage.chunk_axes, mesh)
    scattered = storage.chunk_axes if trained and storage.scatters else ()
    scatter = _collective("reduce_scatter", elements, policy.gradients, scattered, mesh)
    summed = kept if scattered else elements
    further = storage.remaining_axes if trained else ()
    reduced = _collective("all_reduce", summed, policy.gradients, further, mesh)
    ops = _flattened(summed, policy) if reduced else ()
    added = _added(elements, policy) if trained and microbatches > 1 else ()
    if storage.keeper is Keeper.FSDP:
        pack = (copy_key((elements,), policy.gradients),) if scatter else ()
        again = again and storage.zero == 3
        unpack = copy_key((elements,), policy.compute)
        at_once = () if staged else scatter
        micro = Demand(
            forward_ops=(unpack,),
            backward_ops=((unpack,) if again else ()) + (added if staged else pack),
            forward_collectives=gather,
            backward_collectives=(*gather, *at_once) if again else at_once,
        )
        last = (*pack, *ops) if staged else ops
        step = Demand(forward_ops=last, forward_collectives=(*scatter, *reduced) if staged else reduced)
    else:
        packed = (copy_key((elements,), policy.gradients),) if gather else ()
        cast = (_cast(kept, policy),) if gather or policy.compute != policy.parameters else ()
        step = Demand(forward_ops=(*ops, *packed, *cast), forward_collectives=(*scatter, *reduced, *gather))
        micro = Demand(backward_ops=added)
    return SyncDemand(micro, step)


def _added(elements: int, policy: DtypePolicy) -> tuple[OpKey, ...]:
    """A microbatch's gradient is added to the sum."""
    gradient = Operand((elements,), policy.compute, False)
    return (OpKey("aten.add_.Tensor", (gradient, gradient)),)


def _collective(
    kind: str, elements: int, dtype: str, axes: Sequence[int], mesh: Sequence[MeshAxis]
) -> tuple[CollectiveKey, ...]:
    key = collective_key(kind, elements * DTYPE_BYTES[dtype], axes, mesh)
    return (key,) if key.ranks > 1 else ()


def _flattened(elements: int, policy: DtypePolicy) -> tuple[OpKey, ...]:
    """Gradients are copied into one buffer, and back."""
    copy = copy_key((elements,), policy.gradients)
    return (copy, copy)


def _cast(elements: int, policy: DtypePolicy) -> OpKey:
    stored = Operand((elements,), policy.parameters, False)
    return OpKey("aten.to.dtype", (stored, Dtype(policy.compute)))


def optimizer_demand(elements: Sequence[int], policy: DtypePolicy, optimizer: str) -> Demand:
    """Demand of one optimizer step over parameters of which this device updates `elements[i]` each.

    The target is `optimizer.NAME.foreach`: a share of one step of torch.optim's foreach implementation over many. An
    optimizer without an entry of its own (`work.OPTIMIZER_PASSES`) counts as adamw.
    """
    name = optimizer if optimizer in OPTIMIZER_PASSES else "adamw"
    target = f"optimizer.{name}.foreach"
    return Demand(forward_ops=tuple(OpKey(target, (Operand((n,), policy.states, False),)) for n in elements if n))


def optimizer_assumptions(optimizer: str) -> tuple[str, ...]:
    """Says where AdamW stands in for an optimizer: for the seconds of its step, or for its states as well."""
    if optimizer in OPTIMIZER_PASSES:
        return ()
    what = "step is priced as AdamW's" if optimizer in STATE_BYTES else "step and states are priced as AdamW's"
    return (f"optimizer {optimizer}: its {what}",)


def exposed_s(communication_s: float, compute_s: float, overlap: float) -> float:
    """Seconds of communication that compute running beside it does not hide; `overlap` is the device's share."""
    return communication_s - overlap * min(communication_s, compute_s)
