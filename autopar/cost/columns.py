"""Many calls that differ in sizes only, priced at once: keys whose sizes are columns instead of numbers.

A search that wants an operator at all microbatch sizes (or meshes) makes one key of it, with an array of shape (calls,)
wherever a size differs. The formulas of `cost/work.py` are arithmetic, so they give the work of all calls in one go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autopar.cost.passes import Pass
from autopar.cost.pricer import Pricer, Seconds, Source
from autopar.cost.roofline import COLUMNS, RooflinePricer, kernels_of, model_of, require_rate
from autopar.cost.work import work
from autopar.graph import Operand, OpKey
from autopar.measure.models.device import DeviceModel

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class ColumnTimes:
    """Seconds of both passes of each key's calls, shape (keys, calls), and their sources (one where all are equal)."""

    forward_s: Seconds
    backward_s: Seconds
    sources: list[list[Source]]


def column_operand(shape: Sequence[int | Integers], dtype: str, requires_grad: bool) -> Operand:
    """A tensor argument whose lengths are numbers, or columns of shape (calls,). Its key can't be looked up."""
    return Operand(cast(tuple[int, ...], tuple(shape)), dtype, requires_grad)


def column_times(keys: Sequence[OpKey], calls: int, pricer: Pricer) -> ColumnTimes:
    """Seconds of `calls` calls of each key; sizes in its operands and arguments are numbers, or columns of (calls,).

    By device models alone this is arithmetic on arrays. Where timings count the keys are taken apart and asked one by
    one. Raises ConfigError for a dtype that the device has no rate for.
    """
    if isinstance(pricer, RooflinePricer):
        model = model_of(pricer.cluster.device)
        found = [work(key) for key in keys]
        forward, backward = _Columns(len(keys), calls), _Columns(len(keys), calls)
        for i, one in enumerate(found):
            forward.add(i, one.forward, one.dtype, one.kind)
            backward.add(i, one.backward, one.dtype, one.kind)
        return ColumnTimes(forward.seconds(model), backward.seconds(model), [[s] for s in forward.sources(model)])
    single = [one_call(key, call) for key in keys for call in range(calls)]
    times, shape = pricer.ops(single), (len(keys), calls)
    sources = [times.sources[i * calls : (i + 1) * calls] for i in range(len(keys))]
    return ColumnTimes(times.forward_s.reshape(shape), times.backward_s.reshape(shape), sources)


def one_call(key: OpKey, call: int) -> OpKey:
    """The key of one of the calls that a key with columns stands for."""

    def single(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return int(value[call])
        if isinstance(value, Operand):
            return Operand(single(value.shape), value.dtype, value.requires_grad)
        return tuple(map(single, value)) if isinstance(value, tuple) else value

    return OpKey(key.target, single(key.args), tuple((name, single(value)) for name, value in key.kwargs))


class _Columns:
    """Kernels of passes by family, dtype and variant."""

    def __init__(self, keys: int, calls: int) -> None:
        self.shape = (keys, calls)
        self.rows: dict[tuple[str, str, str], list[tuple[Any, ...]]] = defaultdict(list)
        self.owners: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        self.launches = np.zeros(self.shape)  # of kernels that no row stands for

    def add(self, key: int, one: Pass, dtype: str, kind: str) -> None:
        kernels = kernels_of(one, kind)
        for family, variant, row in kernels:
            self.rows[family, dtype, variant].append(row)
            self.owners[family, dtype, variant].append(key)
        running = one.bytes > 0 if kernels and kernels[0][0] == "elementwise" else len(kernels)
        self.launches[key] = np.maximum(0, one.launches - 1 * np.asarray(running))

    def seconds(self, model: DeviceModel) -> Seconds:
        """Seconds of each call's pass, shape (keys, calls)."""
        total: Seconds = self.launches * model.device.launch_s
        calls = self.shape[1]
        for (family, dtype, variant), rows in self.rows.items():
            if family != "elementwise":
                require_rate(model.device, dtype)
            table = np.empty((len(COLUMNS[family]), len(rows), calls))
            for i, row in enumerate(rows):
                for j, value in enumerate(row):
                    table[j, i] = value
            sizes = dict(zip(COLUMNS[family], table.reshape(len(table), -1), strict=True))
            seconds = model.seconds(family, sizes, dtype, (variant, "")).reshape(len(rows), calls)
            if family == "elementwise":
                seconds = seconds * (table[0] > 0)  # without bytes there is no kernel
            np.add.at(total, self.owners[family, dtype, variant], seconds)
        return total

    def sources(self, model: DeviceModel) -> list[Source]:
        """Where the seconds of each key are from; of those without work, the datasheet."""
        found: list[Source] = ["roofline"] * self.shape[0]
        for (family, dtype, variant), owners in self.owners.items():
            for owner in owners:
                found[owner] = model.known(family, dtype, (variant, "")).source
        return found
