"""What a rank runs of one stage, with its parameters as layers and as the optimizer see them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from autopar.emit.groups import StageGroups
from autopar.emit.layers import StageModule
from autopar.emit.parameters import StageParameter, finish_gradients, local, reduce_gradients, refresh
from autopar.emit.storage import Storage


@dataclass(frozen=True)
class Runtime:
    """What a rank runs of one stage.

    `publics` are the parameters as the optimizer sees them, in the model's order; `steps` those that we keep, `kept`
    those that FSDP2 keeps, with its own sharded tensor, whose memory the public one shares.
    """

    stage: StageModule
    groups: StageGroups
    storages: dict[str, Storage]
    publics: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    steps: tuple[StageParameter, ...]
    kept: tuple[tuple[Storage, nn.Parameter], ...]

    def begin(self) -> None:
        """Let everything that was gathered or cast be made anew from the stored values."""
        refresh(self.steps, self.groups)
        for module in self.stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def take_gradients(self) -> dict[str, Tensor]:
        """This rank's shards of the gradients, summed over the stage's ranks, since they were last taken."""
        gradients = reduce_gradients(self.steps, self.groups)
        for storage, parameter in self.kept:
            if parameter.grad is not None:
                gradients.append((storage, local(parameter.grad), storage.remaining_axes))
                parameter.grad = None
        return finish_gradients(gradients, self.groups)

    def copies(self, name: str) -> int:
        """How many ranks of the stage store the same shard of a parameter."""
        return self.groups.ways(self.storages[name].whole_axes(self.groups))
