"""What can be chosen inside a layer, as labels of variables: independent of any price.

Variables are: the layouts at the cut in front (`entry`) and behind (`exit`); the factor assignment of each *anchor*
op; the layout that a value is relaid to before its consumers (`relay`); the layout a parameter is stored in, where
several layers (`tied`) or ops (`stored`) use it. All other ops are *followers*: elementwise and view ops with one
operand that matters take the layout of that operand, so their assignment is a function of the variable it hangs on.
That leaves a few dozen variables for a transformer block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.engine.label_graph import classes_of
from autopar.formulate.layers.runs import Surroundings
from autopar.formulate.layers.states import combine, dealt
from autopar.graph import BROADCAST, PARTIAL, REPLICATE, LayerClass, Layout, Op, TensorSpec, follow_layout
from autopar.plan import LayerStrategy, data_axes_of
from autopar.shard.lower import lower
from autopar.shard.program import Call, Program
from autopar.shard.relayout import held_layout
from autopar.shard.rules import OpRule, assignments, layouts_of, rule_for

Assignment: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Option:
    """One way to run an op: the factor each axis splits, and the layouts that follow."""

    factors: Assignment
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True)
class Variable:
    """Something to choose: one of the `options` (kind `op`), else one of the `layouts`."""

    kind: Literal["entry", "exit", "op", "relay", "tied", "stored"]
    name: str
    layouts: tuple[Layout, ...] = ()
    options: tuple[Option, ...] = ()

    def __len__(self) -> int:
        return len(self.options if self.kind == "op" else self.layouts)


@dataclass(frozen=True)
class Home:
    """Where a value is: its layout for each label of variable `variable` (None = illegal under that label)."""

    variable: int
    layouts: tuple[Layout | None, ...]


@dataclass(frozen=True)
class Edge:
    """A change of layout of `value`, from source to target layout by label.

    It is made in front of the op numbered `place` in the layer; `readers` are ops that read its result.
    """

    value: str
    source: Home
    target: Home
    place: int = field(default=0, compare=False)
    readers: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class Placed:
    """An op whose option is a function of a variable's label (None = illegal under that label)."""

    op: Op
    variable: int
    options: tuple[Option | None, ...]
    rule: OpRule | None = field(compare=False)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The lowered form of the op under each of the distinct options."""
        op, rule = self.op, self.rule
        return tuple(
            Call(
                op, op.operands, o.operands, o.results, o.factors,
                "" if rule is None else rule.kernel(o.factors), () if rule is None else rule.grains,
            )
            for o in self.distinct
        )  # fmt: skip

    @cached_property
    def distinct(self) -> tuple[Option, ...]:
        """The legal options, each once."""
        return tuple(dict.fromkeys(option for option in self.options if option is not None))

    @cached_property
    def which(self) -> NDArray[np.intp]:
        """Which of the distinct options each label has; as many as there are where it is illegal."""
        numbers: dict[Option | None, int] = {option: i for i, option in enumerate(self.distinct)}
        numbers[None] = len(numbers)
        return np.array([numbers[option] for option in self.options], dtype=np.intp)


@dataclass(frozen=True)
class Stored:
    """A parameter whose storage layout is a function of a variable's label."""

    param: str
    home: Home


@dataclass(eq=False)
class LabelSpace:
    """Variables of one layer class, how ops and stored parameters hang on them, and where layouts change."""

    layer: LayerClass
    sizes: tuple[int, ...]
    around: Surroundings
    variables: list[Variable] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    homes: dict[str, Home] = field(default_factory=dict)
    produced: dict[str, Home] = field(default_factory=dict)
    _legal: dict[tuple[str, int], list[bool]] = field(default_factory=dict)

    @property
    def entry(self) -> int:
        """Index of the entry variable."""
        return 0

    @property
    def exit(self) -> int:
        """Index of the exit variable."""
        return 1

    @property
    def tied(self) -> tuple[int, ...]:
        """Indices of the variables of tied parameters."""
        return tuple(i for i, v in enumerate(self.variables) if v.kind == "tied")

    @cached_property
    def alike(self) -> dict[tuple[int, int], tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """For each pair of variables between which layouts change, classes of labels with equal changes."""
        keys: dict[tuple[int, int], tuple[list[tuple[Layout | None, ...]], list[tuple[Layout | None, ...]]]] = {}
        for edge in self.edges:
            sides = keys.setdefault((edge.source.variable, edge.target.variable), ([], []))
            trained = self.layer.values[edge.value].requires_grad
            for side, home in zip(sides, (edge.source, edge.target), strict=True):
                side.append(tuple(x if trained or x is None else held_layout(x) for x in home.layouts))
        return {
            (i, j): (classes_of(zip(*keys[i, j][0], strict=True))[0], classes_of(zip(*keys[i, j][1], strict=True))[0])
            for i, j in keys
            if i != j
        }

    def legal(self, placed: Placed, batch: int) -> list[bool]:
        """Whether an op may be run as each of its distinct options says at another batch than it was laid out for."""
        if placed.rule is None or batch % prod(self.sizes) == 0:
            return [True] * len(placed.distinct)
        key = placed.op.name, batch
        if key not in self._legal:
            there = _assignments(placed.rule, placed.op, self.layer, self.sizes, batch)
            self._legal[key] = [option.factors in there for option in placed.distinct]
        return self._legal[key]

    def serves(self, batch: int) -> bool:
        """Whether every op has a legal option at another batch."""
        return all(any(self.legal(placed, batch)) for placed in self.placed)

    def dealt(self, name: str, home: Home, batch: int) -> tuple[Layout | None, ...]:
        """The layouts of a value at home, None where one leaves ranks out at another batch."""
        return dealt_layouts(self.layer.values[name], home.layouts, self.sizes, batch)

    def strategy(self, labels: Mapping[int, int], zero: int, recompute: str) -> LayerStrategy:
        """The strategy that a choice of labels stands for."""
        ops = {}
        for placed in self.placed:
            option = placed.options[labels[placed.variable]]
            if option is not None and any(option.factors):
                ops[placed.op.name] = option.factors
        relays: dict[str, Layout] = {}
        for i, variable in enumerate(self.variables):
            if variable.kind == "relay":
                produced = self.produced[variable.name]
                layout = variable.layouts[labels[i]]
                if produced.layouts[labels[produced.variable]] != layout:
                    relays[variable.name] = layout
        for stored in self.stored:
            kept = stored.home.layouts[labels[stored.home.variable]]
            if kept is not None:
                relays[stored.param] = kept
        entry, leave = (self.variables[v].layouts[labels[v]] for v in (self.entry, self.exit))
        axes, every = self.around.zero_axes(entry), data_axes_of(entry, self.around.entry.batch_dim)
        group = prod(self.sizes[a] for a in axes) if zero and axes != every else 0
        return LayerStrategy(entry, leave, ops, relays, zero, recompute, zero_group=group)

    def lowered(self, labels: Sequence[int], recompute: str) -> Program:
        """The layer lowered under a choice of labels: the same at every batch for which that is legal."""
        strategy, around = self.strategy(dict(enumerate(labels)), 0, recompute), self.around
        return lower(
            self.layer, strategy, self.sizes, around.entry, around.leave,
            main_input=around.main_input, main_output=around.main_output,
        )  # fmt: skip


def _assignments(rule: OpRule, op: Op, layer: LayerClass, sizes: tuple[int, ...], batch: int) -> frozenset[Assignment]:
    return frozenset(assignments(rule, op, layer, sizes, batch))


def dealt_layouts(
    spec: TensorSpec, layouts: tuple[Layout | None, ...], sizes: tuple[int, ...], batch: int
) -> tuple[Layout | None, ...]:
    """Layouts of a value that was laid out for a batch that all devices share evenly: None where it leaves some out."""
    return layouts if batch % prod(sizes) == 0 else _dealt(spec, layouts, sizes, batch)


@lru_cache(maxsize=1 << 14)
def _dealt(
    spec: TensorSpec, layouts: tuple[Layout | None, ...], sizes: tuple[int, ...], batch: int
) -> tuple[Layout | None, ...]:
    return tuple(x if x is not None and dealt(spec, x, sizes, batch) else None for x in layouts)


def at_cut(spec: TensorSpec, main: TensorSpec, states: tuple[Layout, ...], is_main: bool) -> tuple[Layout, ...]:
    """Layouts of a value of `spec` at a cut, for each layout of the cut's main value."""
    return states if is_main else tuple(follow_layout(main, state, spec) for state in states)


def label_space(layer: LayerClass, around: Surroundings, sizes: tuple[int, ...], batch: int) -> LabelSpace:
    """Lay out the choices of `layer` at a global microbatch of `batch` over mesh axes of `sizes`.

    The storage of parameters that other layers use, too, is a variable of its own. Of an op's assignments those with
    the fewest violations of the pins are kept.
    """
    return _Builder(layer, around, sizes, batch).build()


def _storable(layout: Layout) -> Layout:
    """Where a parameter is stored that is needed in `layout`: a partial one (a bias of a sum) whole."""
    return tuple(REPLICATE if placement == PARTIAL else placement for placement in layout)


class _Builder:
    """Walks the ops once, in order, and fills a LabelSpace."""

    def __init__(self, layer: LayerClass, around: Surroundings, sizes: tuple[int, ...], batch: int) -> None:
        self.layer, self.around, self.sizes, self.batch = layer, around, sizes, batch
        self.space = LabelSpace(layer, sizes, around)
        self.replicated: Layout = (REPLICATE,) * len(sizes)
        self.options = {op.name: self._options(op) for op in layer.ops}
        self.followers = {op.name for op in layer.ops if self._can_follow(op)}
        self.number = {op.name: i for i, op in enumerate(layer.ops)}

    def build(self) -> LabelSpace:
        before, behind = self.around.states(self.sizes, self.batch)
        entry, leave = (self.around.entry, before), (self.around.leave, behind)
        self._add(Variable("entry", "", before))
        self._add(Variable("exit", "", behind))
        for name in self.layer.inputs:
            spec = self.layer.values[name]
            home = Home(0, at_cut(spec, entry[0], entry[1], name == self.around.main_input))
            self._settle(name, home, relay=len(self._anchors_of(name)) > 1)
        self._store_parameters()
        for op in self.layer.ops:
            self._place(op)
        for name in self.layer.outputs:
            spec = self.layer.values[name]
            target = Home(1, at_cut(spec, leave[0], leave[1], name == self.around.main_output))
            self.space.edges.append(Edge(name, self.space.homes[name], target, len(self.layer.ops)))
        return self.space

    def _add(self, variable: Variable) -> int:
        self.space.variables.append(variable)
        return len(self.space.variables) - 1

    def _options(self, op: Op) -> tuple[Option, ...]:
        """All ways to run an op, doing the same work everywhere first."""
        rule = rule_for(op, self.layer)
        nothing = ("",) * len(self.sizes)
        choices = (nothing,) if rule is None else assignments(rule, op, self.layer, self.sizes, self.batch)
        if rule is None:
            return (Option(nothing, (self.replicated,) * len(op.operands), (self.replicated,) * len(op.results)),)
        faults = [self.around.pins.violations(op, rule, c, self.layer) for c in choices]
        kept = [c for c, n in zip(choices, faults, strict=True) if n == min(faults)]
        return tuple(Option(c, *layouts_of(rule, op, self.layer, c)) for c in kept)

    def _anchors_of(self, name: str) -> list[Op]:
        return [op for op in self.layer.consumers[name] if op.name not in self.followers]

    # --- parameters -----------------------------------------------------------------------------------------------

    def _store_parameters(self) -> None:
        """Give buffers and parameters a home: stored as their one consumer wants them, else by a variable.

        A variable it is, too, where the consumer knows no batch (position embeddings): it wants them whole on the data
        axes, but only what is broadcast there can be sharded by ZeRO 2 and 3.
        """
        constant = Home(self._add(Variable("stored", "", (self.replicated,))), (self.replicated,))
        self.space.homes.update(dict.fromkeys(self.layer.buffers, constant))
        if self.around.tied:
            specs = [self.layer.values[name] for name in self.around.tied]
            self._store_by_variable("tied", self.around.tied, self._tied_layouts(specs))
        for name in self.layer.params:
            users = self.layer.consumers[name]
            once = len(users) == 1 and users[0].operands.count(name) == 1 and name not in self.layer.outputs
            if name not in self.around.tied and not (once and self._splits_batch(users[0])):
                self._store_by_variable("stored", (name,), self._storage_layouts(self.layer.values[name], split=True))

    def _splits_batch(self, op: Op) -> bool:
        """Whether the op can split the batch."""
        rule = rule_for(op, self.layer)
        return rule is not None and any(f.extent.is_batch for f in rule.factors)

    def _store_by_variable(
        self, kind: Literal["tied", "stored"], names: tuple[str, ...], layouts: tuple[Layout, ...]
    ) -> None:
        home = Home(self._add(Variable(kind, names[0], layouts)), layouts)
        self.space.homes.update(dict.fromkeys(names, home))
        self.space.stored.extend(Stored(name, home) for name in names)

    def _tied_layouts(self, specs: list[TensorSpec]) -> tuple[Layout, ...]:
        """One layout for all parameters shared between layers: any for a single one, unsplit for several."""
        trained = next((s for s in specs if s.requires_grad), specs[0])
        return self._storage_layouts(trained, split=self.around.tied_split)

    def _storage_layouts(self, spec: TensorSpec, split: bool) -> tuple[Layout, ...]:
        whole = [BROADCAST, REPLICATE] if spec.requires_grad else [REPLICATE]
        dims = range(len(spec.shape)) if split else ()
        return combine(spec, [[*dims, *whole]] * len(self.sizes), self.sizes, self.batch)

    # --- ops ------------------------------------------------------------------------------------------------------

    def _can_follow(self, op: Op) -> bool:
        """Elementwise and view ops: every factor of the leading operand reaches every result, nothing is stored.

        An op that needs samples whole, or makes them so, chooses for itself: following, it would forbid splitting the
        batch upstream, and those that follow it downstream.
        """
        rule = rule_for(op, self.layer)
        if rule is None or rule.kernels or not op.operands or any(n in self.layer.params for n in op.operands):
            return False
        position = self._lead_position(op)
        samples = [(op.operands[position], rule.operands[position]), *zip(op.results, rule.results, strict=True)]
        for name, dims in samples:
            batch_dim = self.layer.values[name].batch_dim
            if batch_dim is not None and not dims[batch_dim]:
                return False
        lead = {f for f in rule.operands[position] if f}
        used = {f for dims in (*rule.operands, *rule.results) for f in dims if f}
        return used <= lead and all(lead <= set(dims) for dims in rule.results) and self._others_are_minor(op)

    def _lead_position(self, op: Op) -> int:
        """Position of the operand that decides: the first through which a gradient flows, else the first."""
        flows = [i for i, n in enumerate(op.operands) if self.layer.values[n].requires_grad]
        return flows[0] if flows else 0

    def _others_are_minor(self, op: Op) -> bool:
        """Whether only one operand carries a gradient (the others may be relaid for little)."""
        return len({n for n in op.operands if self.layer.values[n].requires_grad}) <= 1

    def _place(self, op: Op) -> None:
        if op.name in self.followers:
            self._place_follower(op)
        else:
            self._place_anchor(op)

    def _place_follower(self, op: Op) -> None:
        position = self._lead_position(op)
        lead = self.space.homes[op.operands[position]]
        by_layout: dict[Layout, Option] = {}
        for option in self.options[op.name]:
            by_layout.setdefault(option.operands[position], option)
        options = tuple(None if layout is None else by_layout.get(layout) for layout in lead.layouts)
        self.space.placed.append(Placed(op, lead.variable, options, rule_for(op, self.layer)))
        for i, name in enumerate(op.operands):
            if i != position:
                needed = tuple(None if o is None else o.operands[i] for o in options)
                self._read(name, Home(lead.variable, needed), op)
        for i, name in enumerate(op.results):
            home = Home(lead.variable, tuple(None if o is None else o.results[i] for o in options))
            self._settle(name, home, relay=len(self._anchors_of(name)) > 1)

    def _place_anchor(self, op: Op) -> None:
        options = self.options[op.name]
        variable = self._add(Variable("op", op.name, options=options))
        self.space.placed.append(Placed(op, variable, options, rule_for(op, self.layer)))
        for i, name in enumerate(op.operands):
            needed = Home(variable, tuple(o.operands[i] for o in options))
            if name in self.layer.params and name not in self.space.homes:
                home = Home(variable, tuple(_storable(layout) for layout in needed.layouts if layout is not None))
                self.space.homes[name] = home
                self.space.stored.append(Stored(name, home))
            if self.space.homes[name] != needed:
                self._read(name, needed, op)
        for i, name in enumerate(op.results):
            home = Home(variable, tuple(o.results[i] for o in options))
            users = self.layer.consumers[name]
            shared = len(users) + (name in self.layer.outputs) > 1
            self._settle(name, home, relay=shared or any(u.name in self.followers for u in users))

    def _read(self, name: str, needed: Home, op: Op) -> None:
        """`op` reads `name` in the layouts `needed`."""
        edge = Edge(name, self.space.homes[name], needed, self.number[op.name], frozenset({op.name}))
        if edge in self.space.edges:
            i = self.space.edges.index(edge)
            known = self.space.edges[i]
            self.space.edges[i] = replace(known, readers=known.readers | edge.readers)
        else:
            self.space.edges.append(edge)

    def _settle(self, name: str, home: Home, relay: bool) -> None:
        """Make `home` the place where consumers find `name`, through a relay variable if asked."""
        self.space.produced[name] = home
        layouts = self._relay_layouts(name, home) if relay else ()
        if not layouts:
            self.space.homes[name] = home
            return
        relayed = Home(self._add(Variable("relay", name, layouts)), layouts)
        place = self.number[self.layer.producer[name].name] + 1 if name in self.layer.producer else 0
        readers = frozenset(op.name for op in self.layer.consumers[name])
        self.space.edges.append(Edge(name, home, relayed, place, readers))
        self.space.homes[name] = relayed

    def _relay_layouts(self, name: str, home: Home) -> tuple[Layout, ...]:
        """Layouts worth relaying to: on each axis what the producer gives or a consumer wants, never partial."""
        spec = self.layer.values[name]
        seen: list[set[int]] = [{REPLICATE} for _ in self.sizes]
        wanted = [layout for layout in home.layouts if layout is not None]
        for op in self.layer.consumers[name]:
            positions = [i for i, n in enumerate(op.operands) if n == name]
            wanted += [o.operands[i] for o in self.options[op.name] for i in positions]
        for layout in wanted:
            for axis, placement in enumerate(layout):
                seen[axis] |= {placement} - {PARTIAL}
        layouts = combine(spec, seen, self.sizes, self.batch)
        return tuple(x for x in layouts if self.around.pins.allows_layout(spec, x, self.around.entry))
