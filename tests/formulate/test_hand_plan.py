"""The search is never above the plan of a large transformer that people write by hand, in the same costs."""

from __future__ import annotations

from functools import cache
from math import prod

import pytest

from autopar.cost.roofline import RooflinePricer
from autopar.formulate.chains.columns import Budget
from autopar.formulate.chains.known import Known
from autopar.formulate.layers.tables import Setting
from autopar.formulate.mesh import mesh_of
from autopar.formulate.pins import Pins
from autopar.formulate.scenario import StageScenario
from autopar.graph import OpGraph
from autopar.plan import POLICIES
from autopar.trace import trace
from autopar.trace.models.spec import load_model
from tests.formulate.cases import cluster_of

LAYER = "llama:layers=1,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=32000"
FREE = Pins()


def megatron(*tensor_axes: int) -> Pins:
    """Samples over the other axes, columns and rows over these, the sequence over these between blocks."""
    return Pins(tensor_axes=frozenset(tensor_axes), sequence=1)


@cache
def layer() -> OpGraph:
    """One block with its embedding and head, 4096 tokens a sample."""
    loaded = load_model(LAYER, seq_len=4096)
    return trace(loaded.model, loaded.inputs, compute_dtype="bfloat16")


def seconds(sizes: tuple[int, ...], pins: Pins) -> float:
    """The fastest step of 256 samples over a mesh, as far as the pins leave a choice."""
    pricer = RooflinePricer(cluster_of("32x8xh100-80gb"))
    known = Known(pricer)
    runs = known.runs(layer(), [pins] * len(layer().layers))
    scenario = StageScenario(
        runs, Setting(mesh_of(sizes), 256, 1), pricer, Budget(None, POLICIES["bf16"], "adamw"), known
    )
    return scenario.solve().solution.objective_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "axes"), [((32, 8), [(1,)]), ((8, 8, 4), [(2,), (1, 2)])], ids=["32 x 8", "8 x 8 x 4"]
)
def test_not_above_columns_rows_and_sequence(sizes: tuple[int, ...], axes: list[tuple[int, ...]]) -> None:
    """Nor above them at other degrees of the mesh; all are printed."""
    found = seconds(sizes, FREE)
    by_hand = {prod(sizes[a] for a in own): seconds(sizes, megatron(*own)) for own in axes}
    print(f"{' x '.join(map(str, sizes))}: searched {1e3 * found:.2f} ms, by hand (tensor ways: ms)",
          {ways: round(1e3 * s, 2) for ways, s in by_hand.items()})  # fmt: skip
    assert found <= min(by_hand.values()) * (1 + 1e-9)
