"""Gradients of all stages that a rank runs: brought home after a step, and their norm over the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.emit.loss_scale import LossScale
from autopar.emit.parameters import add_gradient, local
from autopar.emit.runtime import Runtime
from autopar.emit.teams import Teams
from autopar.emit.torch_private import norms_of, scale_all


class Gradients:
    """Those of `runtimes`, one rank's. `everyone`: the group of all ranks that hold a part of the model, None where it
    is this one alone; `teams`: who else holds tied parameters, in a pipeline; `wide`: norms are taken in float64.
    """

    def __init__(
        self,
        runtimes: Sequence[Runtime],
        device: torch.device,
        everyone: dist.ProcessGroup | None,
        teams: Teams | None,
        scale: LossScale | None,
        wide: bool,
    ) -> None:
        self._runtimes, self._device, self._everyone, self._teams = runtimes, device, everyone, teams
        self._scale, self._dtype = scale, torch.float64 if wide else torch.float32

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters, as the optimizer sees them."""
        return {n: p for runtime in self._runtimes for n, p in runtime.publics.items()}

    @torch.no_grad()
    def bring_home(self) -> None:
        """Add what all finished backward passes made to `.grad`; nothing where some of it has overflown."""
        found: dict[str, Tensor] = {}
        for runtime in self._runtimes:
            for name, gradient in runtime.take_gradients().items():
                found[name] = found[name].add_(gradient) if name in found else gradient
        parameters = self.parameters
        if self._teams is not None:
            self._teams.sum_tied(found, parameters, self._device)
        if self._scale is not None and not self._scale.take([*found.values()], self._everyone, self._device):
            self._leave_out(parameters)
            return
        for name in list(found):
            add_gradient(found.pop(name), parameters[name])

    def _leave_out(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """What earlier steps left in `.grad` stays; where that is nothing but zeros, optimizers have nothing to do."""
        largest = self._over_all(self._norms_over(dict.fromkeys(parameters, 1), float("inf")), dist.ReduceOp.MAX)
        if not largest:
            for parameter in parameters.values():
                parameter.grad = None

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients so that their norm is at most `max_norm`; the norm before."""
        norm = self.norm(norm_type)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        for device in dict.fromkeys(g.device for g in gradients):
            scale_all([g for g in gradients if g.device == device], factor.to(device))
        return norm

    @torch.no_grad()
    def norm(self, norm_type: float) -> Tensor:
        """Over the whole model: each rank adds its shards, a shard held by n ranks with 1/n of its weight."""
        copies = {n: runtime.copies(n) for runtime in self._runtimes for n in runtime.publics}
        if self._teams is not None:
            copies = {n: count for n, count in copies.items() if self._teams.counts(n)}
        infinite = norm_type == float("inf")
        here = self._norms_over(copies, norm_type)
        everywhere = self._over_all(here, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
        return everywhere if infinite else everywhere ** (1 / norm_type)

    def _norms_over(self, copies: Mapping[str, int], norm_type: float) -> Tensor:
        """This rank's part of the norm's power: of each gradient's shard that there is, over its copies."""
        parameters = self.parameters
        found = {n: local(g) for n in copies if (g := parameters[n].grad) is not None and local(g).numel()}
        if not found:
            return torch.zeros((), device=self._device, dtype=self._dtype)
        norms = torch.stack([n.to(self._device, self._dtype) for n in norms_of([*found.values()], norm_type)])
        if norm_type == float("inf"):
            return norms.max()
        shares = 1 / torch.tensor([copies[n] for n in found], device=norms.device, dtype=norms.dtype)
        return (norms**norm_type * shares).sum()

    def _over_all(self, number: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self._everyone is not None:
            dist.all_reduce(number, op=how, group=self._everyone)
        return number
