"""What a search asks for, noted while another pricer answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cluster import Cluster
from autopar.cost.pricer import CollectiveTimes, OpTimes, Pricer
from autopar.cost.sampling import collectives_to_time, group_of, kind_of, ops_to_time
from autopar.graph import CollectiveKey, OpKey
from autopar.measure.keys import Key
from autopar.measure.profile import Timing


class Recorder:
    """Prices as `pricer` does; `ops` and `collectives` hold everything asked for, with its predicted seconds."""

    def __init__(self, pricer: Pricer) -> None:
        self._pricer = pricer
        self.ops_s: dict[OpKey, tuple[float, float]] = {}
        self.collectives_s: dict[CollectiveKey, float] = {}

    @property
    def cluster(self) -> Cluster:
        """The cluster whose seconds these are."""
        return self._pricer.cluster

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Those of the pricer which answers."""
        return self._pricer.assumptions

    def identity(self) -> str:
        """That of the pricer which answers."""
        return self._pricer.identity()

    def ops(self, keys: Sequence[OpKey]) -> OpTimes:
        """Seconds of each op."""
        times = self._pricer.ops(keys)
        both = zip(times.forward_s.tolist(), times.backward_s.tolist(), strict=True)
        self.ops_s.update(zip(keys, both, strict=True))
        return times

    def collectives(self, keys: Sequence[CollectiveKey]) -> CollectiveTimes:
        """Seconds of each collective."""
        times = self._pricer.collectives(keys)
        self.collectives_s.update(zip(keys, times.seconds.tolist(), strict=True))
        return times

    def worth_timing(self) -> tuple[list[OpKey], list[CollectiveKey]]:
        """Of all that was asked for, the ops and collectives to time: the same ones whatever is timed already."""
        ops = ops_to_time(list(self.ops_s), [forward for forward, _ in self.ops_s.values()], [])
        return ops, collectives_to_time(list(self.collectives_s), [])

    def relevant(self, known: Mapping[Key, Timing]) -> dict[Key, Timing]:
        """Those timings that say something about what was asked for: of the same kinds of ops and groups."""
        kinds = {kind_of(key) for key in self.ops_s} | {group_of(key) for key in self.collectives_s}
        return {
            key: timing
            for key, timing in known.items()
            if (kind_of(key) if isinstance(key, OpKey) else group_of(key)) in kinds
        }
