"""When what was sent is known to have arrived."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings

from autopar.cost.arrivals import arrivals, gradients_under_way
from autopar.cost.orders import Kind, Shape, Work, works
from tests.cost.test_orders import shapes

Place = tuple[int, int]
"""A group and the number of one of its operations."""


class Dependences:
    """Which operations have begun before another one begins, by following all that it waits for."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.orders = shape, [works(shape, g) for g in range(shape.groups)]
        self.place: dict[tuple[int, int, bool], Place] = {
            (w.stage, w.microbatch, w.kind.is_forward): (g, n)
            for g, own in enumerate(self.orders)
            for n, w in enumerate(own)
            if w.kind != Kind.WEIGHT
        }
        self.begun = cache(self._begun)
        for g, own in enumerate(self.orders):  # not to recurse too deeply
            for n in range(len(own)):
                self._waits(g, n)

    def neighbour(self, work: Work, step: int) -> Place | None:
        """Where the operation is that makes the input (-1), or takes the result (1), of one; none at the ends."""
        stage = work.stage + (step if work.kind.is_forward else -step)
        return None if work.kind == Kind.WEIGHT else self.place.get((stage, work.microbatch, work.kind.is_forward))

    def _waits(self, group: int, number: int) -> list[Place]:
        source = self.neighbour(self.orders[group][number], -1)
        before = [(group, number - 1)] if number else []
        return [*before, *([source] if source else [])]

    def _begun(self, place: Place) -> tuple[int, ...]:
        """By group, how many operations must have begun once this one has, itself among them."""
        stack, found = [place], [0] * self.shape.groups
        while stack:
            group, number = stack.pop()
            if number + 1 > found[group]:
                done, found[group] = found[group], number + 1
                for n in range(done, number + 1):
                    source = self.neighbour(self.orders[group][n], -1)
                    stack += [source] if source else []
        return tuple(found)


@settings(max_examples=30)
@given(shapes())
def test_what_has_arrived_was_needed_before(shape: Shape) -> None:
    """An operation at whose start something is known to have arrived can't begin before the one that needs it has; and
    activations have arrived by the time their gradients come."""
    all_of_them = Dependences(shape)
    for group, own in enumerate(all_of_them.orders):
        sent = arrivals(shape, group)
        for made, arrived, gradient in zip(*map(list, sent), strict=True):
            target = all_of_them.neighbour(own[made], 1)
            assert target is not None
            assert target[0] != group
            assert made < arrived <= len(own)
            assert gradient == (not own[made].kind.is_forward)
            if arrived < len(own):
                assert all_of_them.begun((group, int(arrived)))[target[0]] > target[1]
            if not gradient:
                assert arrived <= all_of_them.place[own[made].stage, own[made].microbatch, False][1]


@settings(max_examples=30)
@given(shapes())
def test_gradients_under_way_are_counted(shape: Shape) -> None:
    """They are those made by earlier operations that have not arrived by the start of this one."""
    for group, own in enumerate(works(shape, g) for g in range(shape.groups)):
        sent = arrivals(shape, group)
        gradients = [(m, a) for m, a, back in zip(*map(list, sent), strict=True) if back]
        counted = gradients_under_way(shape, group)
        for n in range(len(own)):
            for c, stage in enumerate(shape.stages_of(group)):
                assert counted[n, c] == sum(m < n < a and own[m].stage == stage for m, a in gradients)


def test_few_are_under_way() -> None:
    """Between two groups of interleaved 1F1B never more than the pipeline is deep, whatever many microbatches."""
    for count in (8, 64):
        shape = Shape("interleaved", 4, 2, count)
        assert max(gradients_under_way(shape, g).max() for g in range(4)) <= 8
