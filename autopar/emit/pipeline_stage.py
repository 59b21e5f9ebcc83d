"""A stage of `torch.distributed.pipelining` that holds no more memory than its microbatches in flight need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from autopar.emit.sends import Sends
from autopar.emit.split import WeightGradients
from autopar.emit.torch_private import RESHARD, UNSHARD, backward_of_stage


class LeanStage(PipelineStage):
    """Torch's stage but for four things.

    Torch allocates buffers for all microbatches at once: here one lives from when its microbatch is received to when
    its backward is done. Torch keeps FSDP's parameters gathered from the first backward to the step's end: here
    each layer's are freed as it says; gradients are whole until the step ends all the same. And torch splits a backward
    pass by keeping all of its graph: here `late` says what waits (`split.py`). What schedules of several stages send
    they keep until the step ends: here `sends` lets it go, if given.
    """

    def __init__(
        self,
        stage: nn.Module,
        late: WeightGradients | None,
        number: int,
        count: int,
        device: torch.device,
        received: tuple[Tensor, ...],
        sent: tuple[Tensor, ...],
        line: ProcessGroup | None,
        sends: Sends | None = None,
    ) -> None:
        dw_builder = late.take if late else None
        super().__init__(stage, number, count, device, received, sent, group=line, dw_builder=dw_builder)
        self._late, self._sends = late, sends

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_memory(super()._prepare_forward_infra, *args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_memory(super()._prepare_backward_infra, *args, **kwargs)

    def _without_memory(self, prepare: Any, *args: Any, **kwargs: Any) -> Any:
        device, self.device = self.device, torch.device("meta")
        try:
            return prepare(*args, **kwargs)
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """What receives a microbatch's inputs, into new memory."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """What receives the gradients of a microbatch's outputs, into new memory."""
        self._allocate(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """What sends a microbatch's outputs, if it isn't done here."""
        return self._sent(fwd_chunk_id, True, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """What sends the gradients of a microbatch's inputs, if it isn't done here."""
        return self._sent(bwd_chunk_id, False, super().get_bwd_send_ops(bwd_chunk_id))

    def _sent(self, chunk_id: int, forward: bool, what: list[P2POp]) -> list[P2POp]:
        if self._sends is None or not what:
            return what
        self._sends.send(self.stage_index, chunk_id, forward, what)
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward of a microbatch."""
        self._begin(fwd_chunk_id, True)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def _begin(self, chunk_id: int, forward: bool) -> None:
        if self._sends is not None and self.has_backward:  # without gradients nothing comes back that tells
            self._sends.begin(self.stage_index, chunk_id, forward)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward of a microbatch, after which its buffers are let go, or its first half."""
        self._begin(bwd_chunk_id, False)
        if self._late:
            self._late.on = not full_backward
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.has_backward:
            self._release(self.grad_recv_info.get(bwd_chunk_id, ()))
            if full_backward:
                self._let_go(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The second half."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if self.has_backward:
            self._let_go(bwd_chunk_id)

    def _let_go(self, chunk_id: int) -> None:
        """Let what was received go; what a stage of this rank made is that stage's own."""
        infos = self.args_recv_info[chunk_id]
        if not (self.is_first or self._is_same_rank(self.stage_index - 1)):
            self._empty(infos)
        self._release(infos)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradients for a stage of this rank before this one; none without a backward pass, as torch forgets."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """The gradients from a stage of this rank behind this one: zeros where none came."""
        if not self.has_backward:
            return
        given = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        filled = [
            torch.zeros_like(info.buffer, device=self.device) if found is None and info.buffer is not None else found
            for info, found in given
        ]
        super().set_local_bwd_input(tuple(filled), mb_index)

    def _allocate(self, infos: Any) -> None:
        for info in infos:
            if isinstance(info.buffer, Tensor):
                info.buffer = torch.empty_like(info.buffer, device=self.device, requires_grad=False)

    def _empty(self, infos: Any) -> None:
        """Free memory that the graph of the loss, which torch keeps until the step ends, still refers to."""
        for info in infos:
            if isinstance(info.buffer, Tensor):
                info.buffer.untyped_storage().resize_(0)

    def _release(self, infos: Any) -> None:
        for info in infos:
            if isinstance(info.buffer, Tensor):
                info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """The backward of a microbatch; FSDP keeps its gradients whole until `perform_reduce_grad`."""
        if not isinstance(self.submod, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self.submod.set_is_last_backward(False)
        self.submod.set_requires_gradient_sync(False)
        return backward_of_stage(bwd_kwargs), None


def leave_gathering_to_hooks(schedule: Any) -> None:
    """Let FSDP's hooks gather and free parameters layer by layer, where the schedule would gather whole stages."""
    schedule.register_custom_function(UNSHARD, _note_gathered)
    schedule.register_custom_function(RESHARD, _note_freed)


def _note_gathered(action: Any, ctx: Any) -> None:
    ctx.schedule_ref.unsharded_stages.add(action.stage_index)


def _note_freed(action: Any, ctx: Any) -> None:
    ctx.schedule_ref.unsharded_stages.discard(action.stage_index)
