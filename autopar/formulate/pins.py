"""What a hand-written configuration or a constraint leaves to choose: roles of mesh axes, and filters on labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from autopar.errors import ConfigError
from autopar.formulate.config import Constraint, ManualConfig
from autopar.formulate.mesh import inner_axes
from autopar.graph import REPLICATE, LayerClass, Layout, Op, OpGraph, TensorSpec
from autopar.plan import MeshAxis
from autopar.shard.experts import expert_factors, expert_parameters
from autopar.shard.regions import activation_products
from autopar.shard.rules import OpRule

RECOMPUTE = ("none", "selective", "full")
ZERO = (0, 1, 2, 3)


@dataclass(frozen=True)
class ModulePin:
    """A constraint on some modules of a layer: its ops by name, which axes split their weights; None = none does."""

    ops: frozenset[str]
    tensor_axes: frozenset[int] | None


@dataclass(frozen=True)
class Pins:
    """Limits on the choices of one layer.

    `tensor_axes`: axes that must split something other than the batch, all others split the batch; None = every axis is
    free but `data_axes`, which must split the batch. `sequence`: 1 = what doesn't split the batch splits the sequence
    between blocks, 0 = nothing splits it anywhere, None = free. `zero`, `recompute`: what may be chosen. `modules`:
    constraints on some modules. `zero_axes`: the only ones over which ZeRO may shard; None = all that split the batch.
    `sequence_axes` split the sequence between layers and, where `tokens_inside`, tokens or heads in all that computes,
    never parameters. `expert_axes` split experts in what computes with them, and elsewhere what they'd split anyway.
    """

    tensor_axes: frozenset[int] | None = None
    sequence: int | None = None
    zero: tuple[int, ...] = ZERO
    recompute: tuple[str, ...] = RECOMPUTE
    modules: tuple[ModulePin, ...] = ()
    data_axes: frozenset[int] = frozenset()
    zero_axes: frozenset[int] | None = None
    sequence_axes: frozenset[int] = frozenset()
    tokens_inside: bool = True
    expert_axes: frozenset[int] = frozenset()

    def allows_state(self, spec: TensorSpec, layout: Layout) -> bool:
        """Whether the main value of a cut may lie in `layout`."""
        return all(self._state_allowed(i, p, spec) for i, p in enumerate(layout))

    def _state_allowed(self, axis: int, placement: int, spec: TensorSpec) -> bool:
        batch = spec.batch_dim
        if axis in self.sequence_axes:
            return placement == (_sequence_dim(spec) if has_sequence(spec) else REPLICATE)
        if self.tensor_axes is None and axis not in self.data_axes:
            if self.sequence == 1 and has_sequence(spec):
                return placement in (batch, _sequence_dim(spec))
            return self.sequence != 0 or not _splits_sequence(spec, placement)
        if self.tensor_axes is None or axis not in self.tensor_axes:
            return placement == (REPLICATE if batch is None else batch)
        between_blocks = self.sequence == 1 and has_sequence(spec)
        return placement == (_sequence_dim(spec) if between_blocks else REPLICATE)

    def allows_layout(self, spec: TensorSpec, layout: Layout, main: TensorSpec) -> bool:
        """Whether a value inside a layer may be relaid to `layout`: without sequence splits, not along the tokens."""
        token_like = len(spec.shape) >= 2 and len(main.shape) >= 2 and spec.shape[:2] == main.shape[:2]
        others = [placement for axis, placement in enumerate(layout) if axis not in self.sequence_axes]
        return self.sequence != 0 or not (token_like and _sequence_dim(spec) in others)

    def violations(self, op: Op, rule: OpRule | None, factors: tuple[str, ...], layer: LayerClass) -> int:
        """How far an assignment is from what the pins ask of this op; 0 = as asked.

        Choices with the fewest violations are kept, so an op that can't be split as asked (a vocabulary that doesn't
        divide) is run whole instead of making the plan impossible.
        """
        if rule is None:
            return 0
        roles = self._roles(op, len(factors), layer)
        return sum(_violation(r, f, op, rule, layer) for r, f in zip(roles, factors, strict=True))

    def _roles(self, op: Op, axes: int, layer: LayerClass) -> list[str]:
        """`batch`, `tensor`, `tokens`, `experts`, `replicate` or `free` for each axis, for this op."""
        roles = ["batch" if i in self.data_axes else "free" for i in range(axes)]
        if self.tensor_axes is not None:
            roles = ["tensor" if i in self.tensor_axes else "batch" for i in range(axes)]
        for i in self.sequence_axes:
            roles[i] = "tokens" if self.tokens_inside else "free"
        for i in self.expert_axes:
            if op.name in expert_factors(layer):
                roles[i] = "experts"
            elif op.name in expert_parameters(layer):
                roles[i] = "free"
        for pin in self.modules:
            if op.name in pin.ops:
                if pin.tensor_axes is None:
                    roles = ["replicate" if r in ("tensor", "free") else r for r in roles]
                else:
                    roles = ["tensor" if i in pin.tensor_axes else "batch" for i in range(axes)]
        return roles


def has_sequence(spec: TensorSpec) -> bool:
    """Whether a value between layers has tokens beside samples and width."""
    return len(spec.shape) == 3 and spec.requires_grad and spec.batch_dim in (0, 1)


def sequence_length(spec: TensorSpec) -> int:
    """Tokens of a value that has them."""
    return spec.shape[_sequence_dim(spec)].fixed


def _splits_sequence(spec: TensorSpec, placement: int) -> bool:
    return len(spec.shape) == 3 and placement == _sequence_dim(spec)


def _sequence_dim(spec: TensorSpec) -> int:
    """The dim of tokens: beside that of the samples, which is the first or, in models that turn them inside, second."""
    return 0 if spec.batch_dim == 1 else 1


def _violation(role: str, factor: str, op: Op, rule: OpRule, layer: LayerClass) -> int:
    """0 if an op may split `factor` on an axis of that role, 1 if it should not, 2 if that would be something else."""
    batch = {f.name for f in rule.factors if f.extent.is_batch}
    if role == "free":
        return 0
    if role == "experts":
        return int(factor not in expert_factors(layer)[op.name])
    if role == "tokens":
        return _violation_of_tokens(factor, op, rule, layer)
    if role == "batch":
        return int(factor not in batch) if batch else 2 * int(factor != "")
    weights = _weight_factors(op, rule, layer)
    if role == "replicate":
        return 2 * int(factor in weights)
    if factor in batch:
        return 2
    return int(bool(weights) and factor not in weights)


def _violation_of_tokens(factor: str, op: Op, rule: OpRule, layer: LayerClass) -> int:
    """0 where tokens, or what isn't a parameter's, are split; 2 where samples or parameters are.

    What has samples and tokens in one dim is split in that. Products are never run whole where they needn't be.
    """
    weights = _weight_factors(op, rule, layer)
    if factor in weights or factor in _samples(op, rule, layer):
        return 2
    return int(not factor and (bool(weights) or op.name in activation_products(layer)))


def _samples(op: Op, rule: OpRule, layer: LayerClass) -> set[str]:
    """Factors that are the samples alone, in all operands and results that have them."""
    pairs = [*zip(op.operands, rule.operands, strict=True), *zip(op.results, rule.results, strict=True)]
    rows = {
        (factor, extent.per_sample)
        for name, dims in pairs
        for factor, extent in zip(dims, layer.values[name].shape, strict=True)
        if factor and extent.is_batch
    }
    return {factor for factor, _ in rows} - {factor for factor, count in rows if count > 1}


def _weight_factors(op: Op, rule: OpRule, layer: LayerClass) -> set[str]:
    """Factors of the matrix-shaped parameters an op reads: what tensor parallelism splits."""
    return {
        factor
        for name, dims in zip(op.operands, rule.operands, strict=True)
        if name in layer.params and len(layer.values[name].shape) >= 2
        for factor in dims
        if factor
    }


def pins_of(config: ManualConfig, block: int | None, mesh: tuple[MeshAxis, ...], blocks: int) -> Pins:
    """Pins of one layer under a hand-written plan; `block` is its place among the blocks, None outside them."""
    own = config if block is None else config.for_block(block, config.devices)
    mode, _, count = own.recompute.partition(":")
    here = block is not None and (not count or block >= blocks - int(count))
    tensor = inner_axes(mesh, own.tp)
    replica = inner_axes(mesh, own.tp * own.cp)
    return Pins(
        tensor_axes=tensor,
        sequence=own.sp if own.tp > 1 else 0,
        zero=(own.zero if own.dp > 1 and own.zero_group != "1" else 0,),
        recompute=(mode if here else "none",),
        zero_axes=None if own.zero_group == "all" else inner_axes(mesh, own.tp * own.cp * int(own.zero_group)),
        sequence_axes=replica - tensor,
        tokens_inside=block is not None,
        expert_axes=inner_axes(mesh, own.tp * own.ep) - tensor,
    )


def pins_of_constraints(
    constraints: tuple[Constraint, ...], mesh: tuple[MeshAxis, ...], graph: OpGraph
) -> list[Pins] | None:
    """Pins of each layer under search constraints; None when this mesh can't satisfy them."""
    pinned = {c.key: c.value for c in constraints if not c.pattern and c.key != "exclude"}
    excluded = {c.value for c in constraints if c.key == "exclude"}
    devices = prod(axis.size for axis in mesh)
    degrees = {1} if "tp" in excluded else {int(pinned["tp"])} if "tp" in pinned else set()
    if "dp" in pinned:
        rest, left = divmod(devices, int(pinned["dp"]))
        if left:
            return None
        degrees.add(rest)
    modules = {c: None if c.key == "replicate" else int(c.value) for c in constraints if c.pattern}
    axes = {degree: _inner_axes(mesh, degree) for degree in (*degrees, *modules.values()) if degree is not None}
    if len(degrees) > 1 or None in axes.values():
        return None
    sequence = int(pinned["sp"]) if "sp" in pinned else 0 if "sp" in excluded else None
    zero = (int(pinned["zero"]),) if "zero" in pinned else (0,) if "zero" in excluded else ZERO
    recompute = (pinned["recompute"].split(":")[0],) if "recompute" in pinned else RECOMPUTE
    if "recompute" in excluded:
        recompute = ("none",)
    pins = Pins(axes[degrees.pop()] if degrees else None, sequence=sequence, zero=zero, recompute=recompute)
    return [
        replace(
            pins,
            modules=tuple(
                ModulePin(ops, None if degree is None else axes[degree])
                for c, degree in modules.items()
                if (ops := covered_ops(c, graph, index))
            ),
        )
        for index in range(len(graph.layers))
    ]


def covered_ops(constraint: Constraint, graph: OpGraph, index: int) -> frozenset[str]:
    """Ops of layer `index` in modules that the constraint names.

    A class knows the modules of the first layer it was seen in: those of other layers have the layer's own path.
    """
    layer = graph.layers[index]
    seen = next(x.name for x in graph.layers if x.class_index == layer.class_index)
    return frozenset(
        op.name for op in graph.classes[layer.class_index].ops if constraint.covers(_moved(op.module, seen, layer.name))
    )


def _moved(module: str, seen: str, here: str) -> str:
    inside = module == seen or module.startswith(f"{seen}.")
    return here + module.removeprefix(seen) if inside else module


def _inner_axes(mesh: tuple[MeshAxis, ...], degree: int) -> frozenset[int] | None:
    """Innermost axes whose sizes multiply to `degree`, or None."""
    try:
        return inner_axes(mesh, degree)
    except ConfigError:
        return None
