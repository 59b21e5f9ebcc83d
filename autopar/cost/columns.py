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

    By device models alone this is arithmetic on arrays, for keys that differ in lengths only in one go. Where timings
    count the keys are taken apart and asked one by one. Raises ConfigError for a dtype that the device has no rate for.
    """
    if isinstance(pricer, RooflinePricer):
        return _arithmetic(keys, calls, model_of(pricer.cluster.device))
    single = [one_call(key, call) for key in keys for call in range(calls)]
    times, shape = pricer.ops(single), (len(keys), calls)
    sources = [times.sources[i * calls : (i + 1) * calls] for i in range(len(keys))]
    return ColumnTimes(times.forward_s.reshape(shape), times.backward_s.reshape(shape), sources)


def _arithmetic(keys: Sequence[OpKey], calls: int, model: DeviceModel) -> ColumnTimes:
    forward, backward = np.empty((len(keys), calls)), np.empty((len(keys), calls))
    sources: list[list[Source]] = [[]] * len(keys)
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        alike[_outline(key)].append(i)
    for members in alike.values():
        found = work(joined_key([keys[i] for i in members], calls))
        for seconds, one in ((forward, found.forward), (backward, found.backward)):
            columns = _Columns(len(members) * calls)
            columns.add(one, found.dtype, found.kind)
            seconds[members] = columns.seconds(model).reshape(-1, calls)
            if seconds is forward:
                source = columns.source(model)
        for i in members:
            sources[i] = [source]
    return ColumnTimes(forward, backward, sources)


def _outline(key: OpKey) -> tuple[Any, ...]:
    """All of a key but lengths other than 1, which formulas know nothing special of."""

    def outline(value: Any) -> Any:
        if isinstance(value, Operand):
            lengths = tuple(n if isinstance(n, int) and n <= 1 else None for n in value.shape)
            return ("operand", lengths, value.dtype, value.requires_grad)
        if isinstance(value, tuple):
            return tuple(map(outline, value))
        return "column" if isinstance(value, np.ndarray) else (type(value), value)

    return (key.target, outline(key.args), tuple((name, outline(value)) for name, value in key.kwargs))


def joined_key(keys: Sequence[OpKey], calls: int) -> OpKey:
    """One key for `calls` calls of each of the keys, which are alike but for lengths: the first's calls come first."""
    made: dict[tuple[int, ...], Integers] = {}

    def column(values: Sequence[Any]) -> Any:
        if all(isinstance(value, int) and value == values[0] for value in values):
            return values[0]
        known = tuple(value if isinstance(value, int) else -id(value) for value in values)
        if known not in made:
            table = np.empty((len(values), calls), dtype=np.int64)
            for row, value in zip(table, values, strict=True):
                row[:] = value
            made[known] = table.reshape(-1)
        return made[known]

    def together(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Operand):
            lengths = zip(*(value.shape for value in values), strict=True)
            return column_operand([column(those) for those in lengths], first.dtype, first.requires_grad)
        if isinstance(first, tuple):
            return tuple(together(those) for those in zip(*values, strict=True))
        return column(values) if isinstance(first, np.ndarray) else first

    if len(keys) == 1:
        return keys[0]
    kwargs = zip(*(key.kwargs for key in keys), strict=True)
    return OpKey(
        keys[0].target, together([key.args for key in keys]),
        tuple((pairs[0][0], together([value for _, value in pairs])) for pairs in kwargs),
    )  # fmt: skip


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
    """Kernels of one pass of many calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.rows: list[tuple[tuple[str, str, str], tuple[Any, ...]]] = []  # family, dtype and variant; sizes
        self.launches: Any = 0  # of kernels that no row stands for
        self.host_bytes: Any = 0

    def add(self, one: Pass, dtype: str, kind: str) -> None:
        kernels = kernels_of(one, kind)
        self.rows += [((family, dtype, variant), row) for family, variant, row in kernels]
        running = one.bytes > 0 if kernels and kernels[0][0] == "elementwise" else len(kernels)
        self.launches = np.maximum(0, one.launches - 1 * np.asarray(running))
        self.host_bytes = one.host_bytes

    def seconds(self, model: DeviceModel) -> Seconds:
        """Seconds of each call's pass, shape (calls,)."""
        device = model.device
        total: Seconds = np.zeros(self.calls)
        total += self.launches * device.launch_s + np.asarray(self.host_bytes) / device.host_bytes_per_s
        for (family, dtype, variant), row in self.rows:
            if family != "elementwise":
                require_rate(device, dtype)
            table = np.empty((len(row), self.calls))
            for line, value in zip(table, row, strict=True):
                line[:] = value
            sizes = dict(zip(COLUMNS[family], table, strict=True))
            seconds = model.seconds(family, sizes, dtype, (variant, ""))
            total += seconds * (table[0] > 0) if family == "elementwise" else seconds  # without bytes no kernel
        return total

    def source(self, model: DeviceModel) -> Source:
        """Where the seconds are from; of what is no work, the datasheet."""
        found: Source = "roofline"
        for (family, dtype, variant), _ in self.rows:
            found = model.known(family, dtype, (variant, "")).source
        return found
