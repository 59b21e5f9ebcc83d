"""A hand-written plan (`ManualConfig`) and planning constraints: read, and checked with every mistake at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase

from autopar.errors import ConfigError
from autopar.schedules import V_SHAPED

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb", "zbv", "dualpipev")
FRAMEWORKS = ("autopar", "megatron", "fsdp", "deepspeed")
LAYER_KEYS = ("tp", "sp", "zero", "recompute")
PIPELINE_KEYS = ("schedule", "virtual_stages", "stage_layers")


def microbatch_count(global_batch: int, ways: int, size: int) -> int | None:
    """How many microbatches give each of `ways` replicas at most `size` sequences, the largest replica just that many.

    The fewest where there are several; None where there are none, or a replica for which there is no sequence.
    """
    counts = (n for n in range(1, global_batch // ways + 1) if global_batch % n == 0)
    return next((n for n in counts if -(-global_batch // (n * ways)) == size), None)


def nearest(counts: Sequence[int], count: int) -> list[int]:
    """Of some numbers, a number itself, the next smaller and the next larger one, as far as they are there."""
    ordered = sorted({*counts, count})
    place = ordered.index(count)
    return [n for n in ordered[max(0, place - 1) : place + 2] if n in counts]


@dataclass(frozen=True)
class ManualConfig:
    """A plan as people write it. Degrees multiply to `devices` (0 = all of the cluster).

    `recompute` is none, light, selective, full or `full:N` (the last N blocks);
    `layers` overrides keys for ranges of blocks: `0-5:tp=4+zero=0;6-11:zero=3`.
    """

    devices: int = 0
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    sp: int = 0
    virtual_stages: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    zero_group: str = "all"
    microbatch_size: int = 1
    recompute: str = "none"
    stage_layers: str = ""
    layers: str = ""
    offload: str = "none"
    framework: str = "autopar"

    def __post_init__(self) -> None:
        mistakes = [m for f in fields(self) if (m := _mistake(f.name, getattr(self, f.name)))]
        if mistakes:
            raise ConfigError(*mistakes)

    @property
    def chunks(self) -> int:
        """Stages of a group of devices: two under schedules that go there and back."""
        return 2 if self.schedule in V_SHAPED else self.virtual_stages

    @property
    def named_schedule(self) -> str:
        """The schedule: `1f1b` with several chunks is `interleaved`."""
        return "interleaved" if self.virtual_stages > 1 and self.schedule == "1f1b" else self.schedule

    def __str__(self) -> str:
        """What `parse` reads: the keys that differ from their defaults."""
        return ",".join(f"{f.name}={v}" for f in fields(self) if (v := getattr(self, f.name)) != f.default)

    @classmethod
    def parse(cls, text: str) -> ManualConfig:
        """Read `dp=4,tp=2,...`; raises ConfigError listing every unknown key and bad value."""
        known = {f.name: f for f in fields(cls)}
        values: dict[str, int | str] = {}
        mistakes: list[str] = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = item.partition("=")
            if key not in known:
                mistakes.append(f"config: unknown key {key!r}; allowed: {', '.join(known)}")
            elif known[key].type == "int":
                values[key] = int(value) if re.fullmatch(r"-?\d+", value) else value
            else:
                values[key] = value
        mistakes += [m for k, v in values.items() if (m := _mistake(k, v))]
        if mistakes:
            raise ConfigError(*mistakes)
        return cls(**values)  # type: ignore[arg-type]

    def for_block(self, index: int, devices: int) -> ManualConfig:
        """The configuration of block `index`: `layers` overrides applied, `dp` following from what is left."""
        changes: dict[str, int | str] = {}
        for first, last, keys in layer_ranges(self.layers):
            if first <= index <= last:
                changes |= keys
        if "tp" in changes:
            changes["dp"] = devices // (int(changes["tp"]) * self.cp * self.pp)
        return replace(self, layers="", **changes) if changes else replace(self, layers="")  # type: ignore[arg-type]

    def grouped(self, node_devices: int) -> ManualConfig:
        """The configuration with `zero_group` as a number of ranks, `all` where these are all replicas.

        Raises ConfigError where they don't divide the replicas, or nothing is sharded.
        """
        if self.zero_group == "all":
            return self
        ranks = (
            min(self.dp, max(1, node_devices // (self.tp * self.cp)))
            if self.zero_group == "node"
            else int(self.zero_group)
        )
        if self.dp % ranks:
            raise ConfigError(f"zero_group={self.zero_group}: must divide dp = {self.dp}; give such a number, or all")
        if not self.zero and not any(int(keys.get("zero", 0)) for _, _, keys in layer_ranges(self.layers)):
            raise ConfigError(f"zero_group={self.zero_group}: only where states are sharded; give zero=1, 2 or 3, too")
        return replace(self, zero_group="all" if ranks == self.dp else str(ranks))

    def fit(self, devices: int, global_batch: int, blocks: int) -> ManualConfig:
        """The configuration with `devices` filled in.

        Raises ConfigError where it can't be run on the cluster's `devices`, or on a model of so many `blocks`.
        """
        used = self.devices or devices
        product = self.dp * self.tp * self.cp * self.pp
        mistakes = []
        if used > devices:
            mistakes.append(f"devices={used}: the cluster has {devices}; give at most that")
        if product != used:
            mistakes.append(
                f"dp*tp*cp*pp = {self.dp}*{self.tp}*{self.cp}*{self.pp} = {product}, but {used} devices are used; "
                "change a degree or set devices"
            )
        if (self.dp * self.cp) % self.ep:
            mistakes.append(f"ep={self.ep} must divide dp*cp = {self.dp * self.cp}")
        if microbatch_count(global_batch, self.dp, self.microbatch_size) is None:
            mistakes.append(
                f"global batch {global_batch} can't be cut into equal global microbatches that dp={self.dp} replicas "
                f"share with at most microbatch_size={self.microbatch_size} sequences each; {self._sizes(global_batch)}"
            )
        mistakes += [*self._misplaced(), *self._beyond(blocks), *self._undealt(used)]
        if mistakes:
            raise ConfigError(*mistakes)
        return replace(self, devices=used)

    def _sizes(self, global_batch: int) -> str:
        """What sizes of microbatches there are."""
        each = [-(-global_batch // (count * self.dp)) for count in range(1, global_batch // self.dp + 1)]
        sizes = sorted({n for n in each if microbatch_count(global_batch, self.dp, n)})
        return f"give one of {', '.join(map(str, sizes[:12]))}" if sizes else "give at most that many replicas"

    def _misplaced(self) -> list[str]:
        """Keys of pipelines where there is none."""
        if self.pp > 1:
            two = self.schedule in V_SHAPED and self.virtual_stages not in (1, 2)
            wrong = f"virtual_stages={self.virtual_stages}: schedule={self.schedule} has 2 a group; leave it out"
            return [wrong] if two else []
        return [
            f"{f.name}={value}: only for pipelines, and pp is 1; give pp=2 or more, or leave {f.name} out"
            for f in fields(self)
            if f.name in PIPELINE_KEYS and (value := getattr(self, f.name)) != f.default
        ]

    def offload_mistakes(self) -> list[str]:
        """What offloading can't be combined with."""
        found = []
        if self.offload == "activations" and self.pp > 1:
            found.append(f"offload=activations with pp={self.pp}: give pp=1, or recompute=full in its place")
        if self.offload == "activations" and (self.recompute != "none" or "recompute=" in self.layers):
            found.append("offload=activations with recomputation: what runs again isn't kept; give recompute=none")
        sharded = self.zero > 1 or any(f"zero={level}" in self.layers for level in (2, 3))
        if self.offload == "optimizer" and sharded:
            found.append("offload=optimizer with zero=2 or 3: FSDP2 keeps parameters on the device; give zero=1")
        return found

    def _beyond(self, blocks: int) -> list[str]:
        """Blocks counted or named that the model doesn't have."""
        found = [
            f"layers={first}-{last}: the model has the blocks 0 to {blocks - 1}; give a range among them"
            for first, last, _ in layer_ranges(self.layers)
            if last >= blocks
        ]
        count = self.recompute.partition(":")[2]
        if count and int(count) > blocks:
            found.append(f"recompute={self.recompute}: the model has {blocks} blocks; give at most full:{blocks}")
        return found

    def _undealt(self, used: int) -> list[str]:
        """Tensor degrees of `layers` that the devices of a stage can't be dealt by."""
        each = used // (self.cp * self.pp)
        return [
            f"layers={first}-{last}:tp={keys['tp']}: must divide the {each} devices of a stage; give such a degree"
            for first, last, keys in layer_ranges(self.layers)
            if each % int(keys.get("tp", 1))
        ]


def layer_ranges(text: str) -> list[tuple[int, int, dict[str, int | str]]]:
    """Parse `0-5:tp=4+zero=0;6:zero=3` into (first, last, overrides); raises ConfigError."""
    found, mistakes = [], []
    for part in filter(None, text.split(";")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?:(.+)", part.strip())
        pairs = [p.partition("=") for p in match.group(3).split("+")] if match else []
        if match is None or any(k not in LAYER_KEYS or not v for k, _, v in pairs):
            mistakes.append(
                f"layers={part}: not allowed; give FIRST-LAST:KEY=VALUE+KEY=VALUE with keys {', '.join(LAYER_KEYS)}"
            )
            continue
        first = int(match.group(1))
        last = int(match.group(2) or first)
        keys = {k: int(v) if v.isdecimal() else v for k, _, v in pairs}
        mistakes += [f"layers={part}: {m}" for k, v in keys.items() if (m := _mistake(k, v))]
        if last < first:
            mistakes.append(f"layers={part}: the range ends before it begins; give {last}-{first}")
        found.append((first, last, keys))
    if mistakes:
        raise ConfigError(*mistakes)
    return found


def _mistake(key: str, value: object) -> str:
    """What is wrong with one key's value, or ''."""
    if key == "layers":
        return _mistake_of_layers(str(value))
    allowed, test = _ALLOWED[key]
    return "" if test(value) else f"{key}={value}: not allowed; give {allowed}"


def _mistake_of_layers(text: str) -> str:
    try:
        layer_ranges(text)
    except ConfigError as error:
        return "; ".join(error.mistakes)
    return ""


def _among(*names: str) -> tuple[str, Callable[[object], bool]]:
    return " or ".join(names), lambda v: v in names


def _at_least(low: int) -> tuple[str, Callable[[object], bool]]:
    return f"a whole number of at least {low}", lambda v: isinstance(v, int) and v >= low


def _matches(pattern: str, words: str) -> tuple[str, Callable[[object], bool]]:
    return words, lambda v: re.fullmatch(pattern, str(v)) is not None


_ALLOWED: dict[str, tuple[str, Callable[[object], bool]]] = {
    "devices": _at_least(0),
    **{key: _at_least(1) for key in ("dp", "tp", "cp", "ep", "pp", "virtual_stages", "microbatch_size")},
    "sp": ("0 or 1", lambda v: v in (0, 1)),
    "zero": ("0, 1, 2 or 3", lambda v: v in (0, 1, 2, 3)),
    "schedule": _among(*SCHEDULES),
    "zero_group": _matches(r"all|node|[1-9]\d*", "all, node or a number of ranks"),
    "recompute": _matches(r"none|light|selective|full(:[1-9]\d*)?", "none, light, selective, full, full:N (N > 0)"),
    "stage_layers": _matches(r"|\d+(/\d+)*", "layer counts such as 12/12/11/13"),
    "offload": _among("none", "optimizer", "activations"),
    "framework": _among(*FRAMEWORKS),
}


# --- constraints on the search ------------------------------------------------------------------------------------

PINNABLE = ("devices", "dp", "tp", "pp", "sp", "zero", "microbatch_size", "recompute", "schedule", "virtual_stages")
EXCLUDABLE = ("tp", "sp", "zero", "recompute", "pp", "cp", "ep", "offload")
"""What may be left out. Searches set no axes aside for cp or ep: splits of sequence and experts are sp or tp there."""


@dataclass(frozen=True)
class Constraint:
    """One `[PATTERN:](KEY=VALUE | replicate)`: `pattern` over module names ('' = the whole plan)."""

    pattern: str
    key: str
    value: str

    def covers(self, module: str) -> bool:
        """Whether `module` (a dotted path) or one that holds it matches the pattern."""
        parts = module.split(".")
        return any(fnmatchcase(".".join(parts[:n]), self.pattern) for n in range(1, len(parts) + 1))


def parse_constraints(texts: tuple[str, ...] | list[str]) -> tuple[Constraint, ...]:
    """Read constraints; raises ConfigError listing every one that is not understood."""
    found, mistakes = [], []
    for text in map(str, texts):
        pattern, _, body = text.rpartition(":")
        key, _, value = body.partition("=")
        problem = _constraint_mistake(pattern, key, value)
        mistakes += [f"constraint {text!r}: {problem}"] if problem else []
        found.append(Constraint(pattern, key, value))
    if mistakes:
        raise ConfigError(*mistakes)
    return tuple(found)


def _constraint_mistake(pattern: str, key: str, value: str) -> str:
    if pattern:
        if key == "replicate" and not value:
            return ""
        if key == "tp":
            return _mistake("tp", int(value) if value.isdigit() else value)
        return f"after a pattern give `replicate` or `tp=N`, not {key!r}"
    if key == "exclude":
        return "" if value in EXCLUDABLE else f"exclude={value}: give one of {', '.join(EXCLUDABLE)}"
    if key == "recompute" and value.startswith("full:"):
        return f"recompute={value}: not allowed as a constraint; give none, light, selective or full, or a config"
    if key not in PINNABLE:
        return f"key {key!r} can't be pinned; give one of {', '.join(PINNABLE)} or exclude=..."
    return _mistake(key, int(value) if re.fullmatch(r"\d+", value) else value)
