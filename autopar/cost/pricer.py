"""The one interface through which seconds enter: by roofline, or measured. Search, estimate and check all ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.graph import CollectiveKey, OpKey

Source: TypeAlias = Literal["measured", "fitted", "roofline", "extrapolated"]
"""Where a second comes from: timed at this very point; between timed points; from datasheet figures and fitted
efficiencies; outside the range of the timed points."""

Seconds: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class OpTimes:
    """Seconds of the forward and backward pass of each key asked for, shape (keys,), and their sources."""

    forward_s: Seconds
    backward_s: Seconds
    sources: list[Source]


@dataclass(frozen=True)
class CollectiveTimes:
    """Seconds of each collective asked for, shape (keys,), and their sources."""

    seconds: Seconds
    sources: list[Source]


class Pricer(Protocol):
    """Prices local ops and collectives on one cluster; quick enough to be asked for 100,000 keys at once."""

    @property
    def cluster(self) -> Cluster:
        """The cluster whose seconds these are."""
        ...

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What these prices take for granted that a reader of a plan should know."""
        ...

    def identity(self) -> str:
        """Hash of everything the prices come from."""
        ...

    def ops(self, keys: Sequence[OpKey]) -> OpTimes:
        """Seconds of each local op; the backward is 0 where no operand wants a gradient."""
        ...

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """Seconds of each collective, all groups of its shape running at once."""
        ...
