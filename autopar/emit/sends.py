"""What a rank's stages have sent: kept no longer than until it is known to have arrived.

Schedules of several stages a rank never wait for what they send before the step ends. Waiting for it earlier takes no
time once what came from the receiver shows that it is there (`cost/arrivals.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import P2POp, Work

from autopar.cost.arrivals import arrivals
from autopar.cost.orders import Kind, Shape, works
from autopar.emit.torch_private import send_or_receive


class Sends:
    """Sends of the stages of group number `group` in a step under a schedule.

    `begin` is told of each pass over a microbatch as it begins, `send` what it made.
    """

    def __init__(self, shape: Shape, group: int) -> None:
        own, sent = works(shape, group), arrivals(shape, group)
        self._numbers = {
            (w.stage, w.microbatch, w.kind.is_forward): n for n, w in enumerate(own) if w.kind != Kind.WEIGHT
        }
        self._arrived = dict(zip(sent.made.tolist(), sent.arrived.tolist(), strict=True))
        self._waiting: dict[int, list[Work]] = {}

    def send(self, stage: int, microbatch: int, forward: bool, what: Sequence[P2POp]) -> None:
        """Send what a pass has made."""
        arrived = self._arrived[self._numbers[stage, microbatch, forward]]
        self._waiting.setdefault(arrived, []).extend(send_or_receive(list(what)))

    def begin(self, stage: int, microbatch: int, forward: bool) -> None:
        """A pass begins, its input is there: let go of what has arrived by now."""
        self._wait(self._numbers[stage, microbatch, forward])

    def end(self) -> None:
        """The step is over."""
        self._wait(max(self._waiting, default=0))

    def forget(self) -> None:
        """Nobody waits any more, even where the step was broken off."""
        self._waiting.clear()

    def _wait(self, number: int) -> None:
        for arrived in [n for n in self._waiting if n <= number]:
            for work in self._waiting.pop(arrived):
                work.wait()
