"""A layer under a strategy becomes a Program: local calls, and the layout changes between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.errors import PlanError
from autopar.graph import REPLICATE, LayerClass, Layout, Op, OpGraph, TensorSpec, follow_layout, layout_text
from autopar.plan import LayerStrategy
from autopar.shard import rules
from autopar.shard.factors import Grains
from autopar.shard.program import Call, Program, Relayout, Step, made_by, read_by
from autopar.shard.regions import in_order, rerun_regions
from autopar.shard.relayout import held_layout, plan_moves


def lower_layer(graph: OpGraph, index: int, strategy: LayerStrategy, axis_sizes: tuple[int, ...]) -> Program:
    """Lower layer `index` of a model: `lower` with the main values of the cuts around it."""
    layer, front, behind = graph.layers[index], graph.cuts[index], graph.cuts[index + 1]
    layer_class = graph.classes[layer.class_index]
    inputs = dict(zip(layer.inputs, layer_class.inputs, strict=True))
    outputs = dict(zip(layer.outputs, layer_class.outputs, strict=True))
    return lower(
        layer_class, strategy, axis_sizes, graph.values[front.main], graph.values[behind.main],
        main_input=inputs.get(front.main, ""), main_output=outputs.get(behind.main, inputs.get(behind.main, "")),
    )  # fmt: skip


def lower(
    layer: LayerClass,
    strategy: LayerStrategy,
    axis_sizes: tuple[int, ...],
    entry_main: TensorSpec,
    exit_main: TensorSpec,
    *,
    main_input: str | None = None,
    main_output: str | None = None,
) -> Program:
    """Put every value where the strategy says, and between producer and consumer the moves that this needs.

    `entry_main`, `exit_main` are the specs of the main values of the cuts in front and behind. `main_input` and
    `main_output` are their names in the layer class, '' where the layer does not read or return them; by default the
    first input and the last output of that spec. Values that carry no gradient lie replicated where broadcast is
    asked. Raises PlanError, naming op and layouts, where the strategy does not fit the layer.
    """
    if main_input is None:
        main_input = next((n for n in layer.inputs if _alike(layer.values[n], entry_main)), "")
    if main_output is None:
        main_output = next((n for n in reversed(layer.outputs) if _alike(layer.values[n], exit_main)), "")
    lowering = _Lowering(layer, strategy, axis_sizes)
    for name in layer.inputs:
        spec = layer.values[name]
        follow = strategy.entry if name == main_input else follow_layout(entry_main, strategy.entry, spec)
        lowering.appear(name, follow)
    for name in (*layer.params, *layer.buffers):
        lowering.store(name)
    for op in layer.ops:
        lowering.call(op)
    outputs = []
    for name in layer.outputs:
        follow = follow_layout(exit_main, strategy.exit, layer.values[name])
        wanted = strategy.exit if name == main_output else follow
        outputs.append(lowering.read(name, wanted, f"output {name}"))
    return lowering.program(tuple(outputs))


def with_regions(
    steps: Sequence[Step], regions: Sequence[Collection[str]], light: bool = False
) -> tuple[tuple[Step, ...], tuple[range, ...]]:
    """The steps in an order in which the calls of each region's ops are consecutive, and where they are.

    Layout changes between steps of a region are part of it; those in front of it and behind it are not, unless the
    region is all there is. `light` regions have those behind them, too: what is gathered isn't kept either.
    """
    groups = [_members(steps, region, light) for region in regions]
    order = in_order([read_by(s) for s in steps], [made_by(s) for s in steps], groups)
    if order is None:
        raise ValueError(f"regions {regions!r} can't be run in one piece each")
    place = {old: new for new, old in enumerate(order)}
    starts = [min(place[i] for i in group) for group in groups]
    return tuple(steps[i] for i in order), tuple(range(a, a + len(g)) for a, g in zip(starts, groups, strict=True))


def _members(steps: Sequence[Step], region: Collection[str], light: bool) -> list[int]:
    """Which steps make up the region of some ops."""
    calls = {i for i, step in enumerate(steps) if isinstance(step, Call) and step.op.name in region}
    if len(calls) == sum(isinstance(step, Call) for step in steps):
        return list(range(len(steps)))
    inside = {name for i in calls for name in made_by(steps[i])}
    for step in steps:
        if isinstance(step, Relayout) and step.source in inside:
            inside.add(step.result)
    members, read = set(calls), {name for i in calls for name in read_by(steps[i])}
    for i, step in reversed(list(enumerate(steps))):
        if isinstance(step, Relayout) and step.source in inside and (light or step.result in read):
            members.add(i)
            read.add(step.source)
    return sorted(members)


def _alike(first: TensorSpec, second: TensorSpec) -> bool:
    return (first.shape, first.dtype) == (second.shape, second.dtype)


class _Lowering:
    """The program so far. `ready[name]` is what stands for a value once its relay is applied."""

    def __init__(self, layer: LayerClass, strategy: LayerStrategy, axis_sizes: tuple[int, ...]) -> None:
        self.layer, self.strategy, self.axis_sizes = layer, strategy, axis_sizes
        self.steps: list[Step] = []
        self.layouts: dict[str, Layout] = {}
        self.values: dict[str, TensorSpec] = {}
        self.ready: dict[str, str] = {}
        self.made: dict[tuple[str, Layout], str] = {}
        self._check_names()

    def appear(self, name: str, layout: Layout) -> None:
        """A value comes into being (or into the layer) in `layout`, and is relayed once."""
        self._add(name, layout)
        wanted = self.strategy.relays.get(name, self.layouts[name])
        self.ready[name] = self.read(name, wanted, f"relay of {name}")

    def store(self, name: str) -> None:
        """A parameter or buffer is stored in the layout its relay names."""
        self._add(name, self.strategy.relays.get(name, self._replicated))

    def read(self, name: str, layout: Layout, reader: str) -> str:
        """Name under which a value can be read in `layout`, with a relayout before it where there is none yet."""
        source = self.ready.get(name, name)
        wanted = self._effective(layout, self.layer.values[name])
        if self.layouts[source] == wanted:
            return source
        if (source, wanted) not in self.made:
            self.made[source, wanted] = self._relayout(name, source, wanted, reader)
        return self.made[source, wanted]

    def call(self, op: Op) -> None:
        """Add the local call of `op` with what its operands need before it."""
        factors = self.strategy.ops.get(op.name, ("",) * len(self.axis_sizes))
        operands, results, kernel, grains = self._rule(op, factors)
        reader = f"op {op.name} ({op.target})"
        names = tuple(self.read(n, lay, reader) for n, lay in zip(op.operands, operands, strict=True))
        lie = tuple(self.layouts[n] for n in names)
        made = tuple(self._effective(lay, self.layer.values[r]) for r, lay in zip(op.results, results, strict=True))
        self.steps.append(Call(op, names, lie, made, factors, kernel, grains))
        for name, layout in zip(op.results, results, strict=True):
            self.appear(name, layout)

    def program(self, outputs: tuple[str, ...]) -> Program:
        """The finished program, which returns `outputs`."""
        layer = self.layer
        light = self.strategy.recompute == "light"
        steps, regions = with_regions(self.steps, rerun_regions(layer, self.strategy.recompute), light)
        return Program(
            self.axis_sizes, steps, layer.inputs, layer.params, layer.buffers, outputs, self.layouts, self.values,
            regions, light,
        )  # fmt: skip

    @property
    def _replicated(self) -> Layout:
        return (REPLICATE,) * len(self.axis_sizes)

    def _add(self, name: str, layout: Layout) -> None:
        spec = self.layer.values[name]
        self._check_layout(name, layout, spec)
        self.values[name], self.layouts[name] = spec, self._effective(layout, spec)

    def _effective(self, layout: Layout, spec: TensorSpec) -> Layout:
        return layout if spec.requires_grad else held_layout(layout)

    def _relayout(self, name: str, source: str, wanted: Layout, reader: str) -> str:
        spec, lies = self.layer.values[name], self.layouts[source]
        self._check_layout(name, wanted, spec)
        moves = plan_moves(lies, wanted)
        if "float" not in spec.dtype and any(m.kind == "divide" for m in moves.forward):
            raise PlanError(
                f"{reader}: {name} ({spec.dtype}) lies {layout_text(lies)!r} and can't be put into "
                f"{layout_text(wanted)!r}: whole numbers can't be dealt out as equal summands. Choose other factors."
            )
        result = f"{name}__{layout_text(wanted).replace(' ', '_').lower()}"
        self.values[result], self.layouts[result] = spec, wanted
        backward = moves.backward if spec.requires_grad else ()
        self.steps.append(Relayout(source, result, lies, wanted, moves.forward, backward))
        return result

    def _rule(self, op: Op, factors: tuple[str, ...]) -> tuple[tuple[Layout, ...], tuple[Layout, ...], str, Grains]:
        """Layouts of operands and results of `op`, its kernel and grains."""
        rule = rules.rule_for(op, self.layer)
        known = {"", *(f.name for f in rule.factors)} if rule else {""}
        if len(factors) != len(self.axis_sizes) or not known.issuperset(factors):
            raise PlanError(
                f"op {op.name} ({op.target}): factors {factors!r} on a mesh of {len(self.axis_sizes)} axes; "
                f"one of {sorted(known)} is needed for each axis ('' splits nothing)."
            )
        if rule is None:
            whole = self._replicated
            return (whole,) * len(op.operands), (whole,) * len(op.results), "", ()
        return *rules.layouts_of(rule, op, self.layer, factors), rule.kernel(factors), rule.grains

    def _check_layout(self, name: str, layout: Layout, spec: TensorSpec) -> None:
        if len(layout) != len(self.axis_sizes) or any(p >= len(spec.shape) for p in layout):
            raise PlanError(
                f"layout {layout_text(layout)!r} of {name} does not fit: it needs one placement for each of the "
                f"{len(self.axis_sizes)} mesh axes, splitting dims below {len(spec.shape)}."
            )

    def _check_names(self) -> None:
        ops = {op.name for op in self.layer.ops}
        for what, given, known in (
            ("ops", self.strategy.ops, ops), ("relays", self.strategy.relays, set(self.layer.values)),
        ):  # fmt: skip
            unknown = sorted(set(given) - known)
            if unknown:
                names = ", ".join(unknown[:5])
                raise PlanError(f"strategy.{what} names {names}, which the layer has not. Make the plan anew.")
