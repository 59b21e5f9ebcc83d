"""A layer's strategy in words, derived from its layouts: what each mesh axis does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.graph import layout_text
from autopar.plan import LayerStrategy, MeshAxis, PlanRecord
from autopar.roles import ways


def strategy_words(strategy: LayerStrategy, mesh: Sequence[MeshAxis]) -> str:
    """For example `batch 4 ways, tensor 2 ways, ZeRO-1, full recomputation`."""
    words = [
        f"{role} {count} ways" if role != "nothing" else f"{count} doing the same"
        for role, count in ways(strategy, mesh).items()
    ]
    words = words or ["whole on one device"]
    if strategy.zero:
        words.append(f"ZeRO-{strategy.zero}" + (f" in groups of {strategy.zero_group}" if strategy.zero_group else ""))
    if strategy.recompute != "none":
        words.append(f"{strategy.recompute} recomputation")
    if strategy.offload != "none":
        words.append(f"{strategy.offload} on the host")
    return ", ".join(words)


def strategy_text(strategy: LayerStrategy, mesh: Sequence[MeshAxis]) -> str:
    """The words, and the layouts at entry and exit by mesh axis."""
    words = strategy_words(strategy, mesh)
    return f"{words} [{layout_text(strategy.entry)} -> {layout_text(strategy.exit)}]" if mesh else words


def most_common(record: PlanRecord) -> str:
    """What most layers do, and how many of them."""
    words = Counter(
        strategy_words(stage.strategies[index], stage.mesh) for stage in record.stages for index in stage.assignment
    )
    (first, layers), *others = words.most_common()
    if not others:
        return f"{first} (all {layers} layers)"
    rest = f"{len(others)} more strategies" if len(others) > 1 else "another strategy"
    return f"{first} ({layers} of {words.total()} layers, {rest} for the others)"


def name_span(names: Sequence[str]) -> str:
    """Neighbouring layers by the names of the first and the last."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} layers)"
