"""The costs of layers as a plan carries them, and back: so that a plan alone can be priced anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from autopar.cost.demand import Demand
from autopar.cost.layer import LayerWork
from autopar.cost.memory import LayerMemory
from autopar.errors import PlanError
from autopar.formulate.record.predict import Layers
from autopar.graph import CollectiveKey, OpKey
from autopar.measure.keys import Key, decode_key, encode_key
from autopar.plan import NOTHING_CARRIED, Between, CarriedCosts, LayerCost

FIELDS = tuple(f.name for f in fields(Demand))
WORK = ("calls", "passing", "micro_sync", "rerun", "step_sync", "optimizer")


def layer_costs(
    stages: Sequence[Sequence[Layers]],
    between: Between = Between(),  # noqa: B008 - frozen
    cut_s: Sequence[float] = (),
    shared_s: Sequence[float] = (),
    memory: Sequence[Mapping[str, int]] = (),
) -> CarriedCosts:
    """Costs of the layers of each stage, and of a pipeline what is between them; `memory` is that of each group."""
    numbers: dict[Key, int] = {}
    costs = tuple(
        LayerCost(
            stage,
            part.run,
            part.count,
            dict(part.figures.pass_s),
            {str(kind): seconds for kind, seconds in part.figures.step_by_kind_s.items()},
            asdict(part.figures.memory),
            tuple(_text(getattr(part.figures.work, name), numbers) for name in WORK),
            part.figures.weight_s,
        )
        for stage, layers in enumerate(stages)
        for part in layers
    )
    keys = tuple(map(encode_key, numbers))
    return CarriedCosts(costs, keys, between, tuple(cut_s), tuple(shared_s), tuple(map(dict, memory)))


def carried_work(carried: CarriedCosts) -> list[LayerWork]:
    """What each of the layers asks for. Raises PlanError where the plan carries nothing of the kind."""
    if not carried.layers:
        raise PlanError(NOTHING_CARRIED)
    keys = [decode_key(text) for text in carried.keys]
    try:
        return [_work(cost, keys) for cost in carried.layers]
    except (ValueError, IndexError, TypeError) as error:
        raise PlanError(f"the costs that the plan carries can't be read ({error}): make it anew") from None


def _work(cost: LayerCost, keys: Sequence[Key]) -> LayerWork:
    demands = {name: _demand(text, keys) for name, text in zip(WORK, cost.work, strict=True)}
    return LayerWork(**demands, memory=LayerMemory(**cost.memory))


def _text(demand: Demand, numbers: dict[Key, int]) -> str:
    """Numbers of the keys a demand asks for, kinds of keys apart."""
    return "|".join(
        " ".join(str(numbers.setdefault(key, len(numbers))) for key in getattr(demand, name)) for name in FIELDS
    )


def _demand(text: str, keys: Sequence[Key]) -> Demand:
    """Inverse of `_text`."""
    parts = [tuple(keys[int(n)] for n in part.split()) for part in text.split("|")]
    if len(parts) != len(FIELDS):
        raise ValueError(f"{text[:40]!r} has {len(parts)} parts, not {len(FIELDS)}")
    for name, part in zip(FIELDS, parts, strict=True):
        wanted = CollectiveKey if name.endswith("collectives") else OpKey
        if not all(isinstance(key, wanted) for key in part):
            raise ValueError(f"{name} must be made of {wanted.__name__}s")
    return Demand(**dict(zip(FIELDS, parts, strict=True)))  # type: ignore[arg-type]
