"""The frozen record of a plan: what was asked, what was chosen, what is predicted. Torch-free, versioned JSON.

`autopar.Plan` (in `api.py`) adds explain, timeline and check to `PlanRecord`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

from autopar.errors import PlanError, reason_of
from autopar.files import write_atomically
from autopar.graph import Layout, hashed_once

PLAN_FORMAT = 1
"""Number of the file format; a reader refuses a larger one and migrates a smaller one."""


ZERO_LEVELS, RECOMPUTES = (0, 1, 2, 3), ("none", "light", "selective", "full")


@hashed_once
@dataclass(frozen=True)
class MeshAxis:
    """One axis of a stage's device mesh. Ranks run row-major over the axes: the last axis has neighbouring ranks.

    `name` is `d0`, `d1`, ...; `stride` is the distance in ranks between neighbours on the axis.
    """

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class LayerStrategy:
    """How one layer is run over the mesh of its stage.

    `entry`, `exit`: layouts of the main value of the cut in front and behind. `ops`: for each op by name, the factor
    that each mesh axis splits ('' = none: the axis' ranks do the same work). `relays`: the layout a value (input or op
    result) is put in once, before its consumers read it; values not named stay as produced; for a parameter or buffer,
    the layout it is stored in. `zero`: 0 replicated over the data axes, 1 optimizer state sharded, 2 and gradients,
    3 and parameters. `recompute`: `none`, `full`, `selective` for the cores of attention alone, or `light` for what is
    cheap to make again (shard/regions.py). `offload`: what is kept in the host's memory: `none`, `activations` (what
    is saved for the backward pass) or `optimizer` (parameters as they are stored, and optimizer states). `zero_group`:
    over how many neighbouring ones of the ranks that share the batch ZeRO shards, 0 = all. `roles`: what each mesh
    axis splits, in words (roles.py); () = to be told by the layouts.
    """

    entry: Layout
    exit: Layout
    ops: dict[str, tuple[str, ...]] = field(hash=False)
    relays: dict[str, Layout] = field(hash=False)
    zero: int = 0
    recompute: str = "none"
    offload: str = "none"
    zero_group: int = 0
    roles: tuple[str, ...] = ()

    def data_axes(self, batch_dim: int | None) -> tuple[int, ...]:
        """Axes that split the batch dim of the main value at the layer's entry."""
        return data_axes_of(self.entry, batch_dim)

    def zero_axes(self, batch_dim: int | None, sizes: Sequence[int]) -> tuple[int, ...]:
        """Axes over which ZeRO shards: all data axes, or the inner ones that make a group; `sizes` of the mesh.

        Raises PlanError where none of them make one.
        """
        axes = self.data_axes(batch_dim)
        if not self.zero_group:
            return axes
        for first in range(len(axes) + 1):
            if prod(sizes[a] for a in axes[first:]) == self.zero_group:
                return axes[first:]
        raise PlanError(
            f"ZeRO over groups of {self.zero_group} ranks: the batch is split over axes of sizes "
            f"{[sizes[a] for a in axes]}, of which no inner ones make that. Make the plan anew."
        )


def data_axes_of(layout: Layout, batch_dim: int | None) -> tuple[int, ...]:
    """Axes on which `layout` splits the batch dim."""
    return tuple(i for i, p in enumerate(layout) if p >= 0 and p == batch_dim)


def expanded(layout: Layout, axis_sizes: tuple[int, ...]) -> Layout:
    """`layout` over the prime factors of its axes, row-major: an axis of size 4 is two axes of 2 placed alike.

    Two layouts over the same `prime_sizes` give every position the same shard where their expansions are equal.
    """
    return tuple(placement for placement, size in zip(layout, axis_sizes, strict=True) for _ in prime_sizes((size,)))


def prime_sizes(axis_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Prime factors of the sizes in order, the smaller ones of a size first: axes of these give any of the meshes."""
    return tuple(factor for size in axis_sizes for factor in _prime_factors(size))


def _prime_factors(number: int) -> list[int]:
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            number //= factor
            factors.append(factor)
        factor += 1
    return factors


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage: layers `first_layer` to `first_layer + len(assignment) - 1` on the global ranks `devices`.

    `assignment[i]` is the index in `strategies` of the stage's i-th layer. `devices` is in mesh order (row-major).
    """

    first_layer: int
    devices: tuple[int, ...]
    mesh: tuple[MeshAxis, ...]
    strategies: tuple[LayerStrategy, ...]
    assignment: tuple[int, ...]

    def mistakes(self) -> list[str]:
        """Strategies that are assigned but aren't there or not known, and placements other than one for each axis."""
        count, axes = len(self.strategies), len(self.mesh)
        found = [f"assignment: {i} is none of the {count} strategies" for i in self.assignment if not 0 <= i < count]
        for number, strategy in enumerate(self.strategies):
            placed = {"entry": strategy.entry, "exit": strategy.exit, **strategy.ops, **strategy.relays}
            found += [
                f"strategies.{number}: {name} is placed on {len(placements)} axes, the mesh has {axes}"
                for name, placements in placed.items()
                if len(placements) != axes
            ]
            if strategy.zero not in ZERO_LEVELS or strategy.recompute not in RECOMPUTES:
                found.append(f"strategies.{number}: zero is {strategy.zero}, recompute {strategy.recompute!r}")
        return found


@dataclass(frozen=True)
class DtypePolicy:
    """Names of torch dtypes: of compute, of the stored parameters, of reduced gradients and of optimizer states."""

    compute: str
    parameters: str
    gradients: str
    states: str


POLICIES = {
    "bf16": DtypePolicy("bfloat16", "float32", "float32", "float32"),
    "fp16": DtypePolicy("float16", "float32", "float32", "float32"),
    "fp32": DtypePolicy("float32", "float32", "float32", "float32"),
    "fp64": DtypePolicy("float64", "float64", "float64", "float64"),
}
"""Dtype policies that can be run, by the name users give."""


@dataclass(frozen=True)
class Request:
    """What was asked for. `cluster` is the cluster's name, `device` its device's; limits in bytes; None = not given."""

    model: str
    cluster: str
    device: str
    devices: int
    global_batch: int
    dtype: str
    policy: DtypePolicy
    optimizer: str
    objective: str = "step_time"
    memory_limit_bytes: int | None = None
    seq_len: int | None = None
    constraints: tuple[str, ...] = ()
    config: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Fingerprint:
    """What a plan is checked against before it is used.

    Hashes of the graph (structure and shapes) and of the profile, the kind of device, and the version of torch that
    traced the model ('' in older files).
    """

    graph: str
    profile: str
    device: str
    torch: str = ""


def installed_torch() -> str:
    """Major and minor version of the torch that is installed ('' where none is), without importing it."""
    try:
        return ".".join(version("torch").split(".")[:2])
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class LayerCost:
    """What each of `count` consecutive equal layers of a stage costs one device; `run` numbers runs of equal layers.

    `pass_s`: seconds in every microbatch: `forward`, `backward`, `recompute`, and of exposed communication
    `forward communication` and `backward communication`. `step_s`: seconds once a step, by kind. `memory`: bytes, as
    in cost/memory.py. `work`: what the layer asks a device for, as numbers of the plan's keys
    (formulate/record/carried.py). Of `backward`, gradients of weights that can be made apart take `weight_s`.
    """

    stage: int
    run: int
    count: int
    pass_s: dict[str, float] = field(hash=False)
    step_s: dict[str, float] = field(hash=False)
    memory: dict[str, int] = field(hash=False)
    work: tuple[str, ...] = ()
    weight_s: float = 0.0


@dataclass(frozen=True)
class Between:
    """What the groups of devices of a pipeline send each other.

    `cut_bytes`: of a microbatch from each stage to the next, by each device. Once a step gradients of
    `shared_bytes[i]` are summed over the groups `shared_by[i]`.
    """

    cut_bytes: tuple[int, ...] = ()
    shared_bytes: tuple[int, ...] = ()
    shared_by: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class CarriedCosts:
    """Costs of all layers in their order, and the distinct operator and collective calls that these come from.

    Of a pipeline also what is sent `between` its groups and the seconds that takes: `cut_s` at each cut (a
    microbatch, either way), `shared_s` once a step for each group; and the bytes on a device of each group at its
    peak, by category.
    """

    layers: tuple[LayerCost, ...] = ()
    keys: tuple[str, ...] = ()
    between: Between = Between()
    cut_s: tuple[float, ...] = ()
    shared_s: tuple[float, ...] = ()
    group_memory: tuple[dict[str, int], ...] = field(default=(), hash=False)


NOTHING_CARRIED = (
    "the plan doesn't carry what its layers cost: make it anew with this autopar (estimates under other frameworks "
    "never do)"
)
"""Said where that is needed."""


@dataclass(frozen=True)
class PlanRecord:
    """A plan, or (with `lower_bound_s` null) an estimate. Field names and units are those of the public contract.

    `energy_j` and `step_price` are of a step on the devices used, where their power and price are known.
    """

    request: Request
    fingerprint: Fingerprint
    stages: tuple[StagePlan, ...]
    num_microbatches: int
    microbatch_size: int
    global_microbatch: int
    pp_degree: int
    schedule: str
    step_time_s: float
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    tflops_per_device: float
    mfu: float | None
    peak_memory_bytes: int
    peak_tensor_bytes: int
    memory_by_category: dict[str, int]
    feasible: bool
    runnable: bool
    exact: bool
    masks: bool
    exposed_comm_s: float
    bubble_s: float
    lower_bound_s: float | None
    gap: float | None
    cost_sources: dict[str, float]
    assumptions: tuple[str, ...]
    trace_s: float
    search_s: float
    num_params: int
    energy_j: float | None
    input_s: float | None
    placement: tuple[int, ...]
    layer_names: tuple[str, ...]
    time_by_kind_s: dict[str, float]
    step_price: float | None = None
    costs: CarriedCosts = CarriedCosts()
    alternatives: tuple[PlanRecord, ...] = ()
    autopar_version: str = ""
    plan_format: int = PLAN_FORMAT

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON data; of each stage also the names of its `layers`, of each strategy the `count`."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for record, plan in zip((data, *data["alternatives"]), (self, *self.alternatives), strict=True):
            for stage, source in zip(record["stages"], plan.stages, strict=True):
                stage["layers"] = list(plan.layer_names[source.first_layer :][: len(source.assignment)])
                for i, strategy in enumerate(stage["strategies"]):
                    strategy["count"] = source.assignment.count(i)
        return data

    @classmethod
    def from_json(cls, data: object, origin: str = "plan") -> PlanRecord:
        """Check and build a plan from JSON data; raises PlanError naming `origin` and every field that is wrong."""
        from pydantic import TypeAdapter, ValidationError

        found = data.get("plan_format") if isinstance(data, dict) else None
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= PLAN_FORMAT:
            raise PlanError(
                f"{origin}: plan_format is {found!r}; this autopar reads 1 to {PLAN_FORMAT}. Make the plan anew."
            )
        try:
            record = TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            where = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:8])
            raise PlanError(f"{origin}: not a complete plan: {where}. Make the plan anew.") from None
        for plan in (record, *record.alternatives):
            mistakes = [f"stages.{i}.{m}" for i, stage in enumerate(plan.stages) for m in stage.mistakes()]
            if mistakes:
                raise PlanError(f"{origin}: not a plan: {'; '.join(mistakes[:8])}. Make the plan anew.")
        return record

    def save(self, path: str | Path) -> None:
        """Write the plan to `path` atomically."""
        write_atomically(Path(path), json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> PlanRecord:
        """Read a plan; raises PlanError naming the file when it is absent, unreadable or not a plan."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlanError(
                f"{path}: can't be read as a plan ({reason_of(error)}). Give a file written by `autopar plan -o`."
            ) from None
        return cls.from_json(data, str(path))
