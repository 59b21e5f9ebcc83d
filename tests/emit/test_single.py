"""What emission does without torch.distributed: checks, inputs, materialisation, generated code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.emit import materialize, torch_private
from autopar.emit.build import emit
from autopar.emit.layers import LayerModule
from autopar.emit.module import ParallelModule
from autopar.emit.peak import Change, highest_bytes, measured_peak_tensor_bytes
from autopar.errors import EmitError, PlanError
from autopar.plan import PlanRecord, StagePlan, installed_torch
from autopar.trace.capture import trace
from tests.emit.handmade import data_parallel, record_of
from tests.integration.models import example, traced


def record(name: str = "mlp", microbatches: int = 2) -> PlanRecord:
    graph = traced(name)
    return record_of(graph, (), lambda i: data_parallel(graph, i, ()), global_batch=8, num_microbatches=microbatches)


def parallel(name: str = "mlp", microbatches: int = 2) -> ParallelModule:
    return emit(record(name, microbatches), traced(name), example(name)[0], device="cpu")


def mlp_batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    labels = torch.randint(0, 8, (rows,), generator=generator)
    return {"x": torch.randn(rows, 16, generator=generator, dtype=torch.float64), "labels": labels}


@pytest.mark.parametrize("rows", [2, 6, 8])
def test_any_batch_size_that_divides(rows: int) -> None:
    """A batch of another size than planned (a short last one) runs, positional or by keyword, as on the model."""
    pm, model, batch = parallel(), example("mlp")[0], mlp_batch(rows)
    torch.testing.assert_close(pm.train_step(**batch), model(**batch), rtol=1e-12, atol=0)
    torch.testing.assert_close(pm.eval_step(batch["x"], batch["labels"]), model(**batch), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: {"x": b["x"]}, "labels"),
        (lambda b: b | {"extra": b["x"]}, "extra"),
        (lambda b: b | {"x": b["x"][:, :7]}, r"\(8, 7\)"),
        (lambda b: b | {"x": b["x"].long()}, "int64"),
        (lambda b: b | {"labels": b["labels"][:5]}, "same number"),
        (lambda b: {k: v[:5] for k, v in b.items()}, "5 samples"),
        (lambda _: {}, "missing"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_refused(change, words: str) -> None:  # type: ignore[no-untyped-def]
    """Missing, unknown, misshapen or uneven inputs are refused with what was given and what is allowed."""
    with pytest.raises(EmitError, match=words):
        parallel().train_step(**change(mlp_batch(8)))


class Switched(nn.Module):
    """Does what its constants say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, power: int = 2, options: dict[str, Any] | None = None, mask: Tensor | None = None
    ) -> Tensor:
        out: Tensor = self.linear(x) * (options or {}).get("scale", 1.0)
        return (out if mask is None else out * mask).pow(power).mean()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ""),
        ({"power": 3}, ""),
        ({"options": {"scale": 2.0}, "mask": None}, ""),
        ({"power": 2}, "'power' is 2; the model was traced with 3"),
        ({"power": True}, "'power' is True"),
        ({"options": {"scale": 1.0}}, r"'options\.scale' is 1\.0; the model was traced with 2\.0"),
        ({"options": {"shift": 1.0}}, r"'options\.shift' = 1\.0 was not among"),
        ({"options": None}, "'options' = None was not among"),
        ({"mask": "causal"}, "'mask' is 'causal'"),
    ],
)
def test_constants_are_part_of_the_plan(given: dict[str, Any], words: str) -> None:
    """Arguments that are no tensors may be left out, or passed as they were traced; other values are refused."""
    model, x = Switched().double(), torch.randn(8, 4, dtype=torch.float64)
    graph = trace(model, {"x": x, "power": 3, "options": {"scale": 2.0}}, compute_dtype="float64")
    plan = record_of(graph, (), lambda i: data_parallel(graph, i, ()), global_batch=8)
    pm = emit(plan, graph, model, device="cpu")
    if words:
        with pytest.raises(EmitError, match=words):
            pm.train_step(x=x, **given)
    else:
        torch.testing.assert_close(pm.train_step(x=x, **given), model(x, 3, {"scale": 2.0}).detach())


def test_plan_of_another_model_is_refused() -> None:
    """Graph hash, number of processes and the way to weigh losses are checked before anything is built."""
    graph, model = traced("mlp"), example("mlp")[0]
    with pytest.raises(PlanError, match="graph hash"):
        emit(record("gpt"), graph, model, device="cpu")
    wide = replace(record().request, devices=4)
    with pytest.raises(PlanError, match="4 processes"):
        emit(replace(record(), request=wide), graph, model, device="cpu")
    with pytest.raises(EmitError, match="mean_of_means"):
        emit(record(), graph, model, device="cpu", loss="sum")


def test_plan_of_another_torch_is_told() -> None:
    """Where the graphs are equal there is a warning with both versions; where they differ this is a likely reason."""
    graph, model = traced("mlp"), example("mlp")[0]
    old = replace(record(), fingerprint=replace(record().fingerprint, torch="1.9"))
    with pytest.warns(UserWarning, match=f"torch 1.9, this is torch {installed_torch()}"):
        emit(old, graph, model, device="cpu")
    other = replace(old, fingerprint=replace(old.fingerprint, graph="0"))
    with pytest.raises(PlanError, match=r"graph hash 0, .* torch 1\.9, .*may trace it otherwise"):
        emit(other, graph, model, device="cpu")


def _cut(stage: StagePlan) -> StagePlan:
    return replace(stage, assignment=stage.assignment[:-1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda r: replace(r, stages=(_cut(r.stages[0]),)), "end before"),
        (lambda r: replace(r, stages=(replace(r.stages[0], first_layer=9),)), "start at layers"),
        (lambda r: replace(r, stages=(replace(r.stages[0], devices=()),)), "don't hold the devices"),
        (lambda r: replace(r, num_microbatches=3), "3 microbatches of 4 samples for a global batch of 8"),
        (
            lambda r: replace(r, request=replace(r.request, policy=replace(r.request.policy, states="float7"))),
            "dtypes 'float7'",
        ),
    ],
    ids=["layers", "first layer", "devices", "microbatches", "dtype"],
)
def test_plans_that_contradict_themselves_are_refused(damage: Callable[[PlanRecord], PlanRecord], words: str) -> None:
    """Stages that leave out layers or have no devices, and impossible batches and dtypes."""
    with pytest.raises(PlanError, match=words):
        emit(damage(record()), traced("mlp"), example("mlp")[0], device="cpu")


def test_mean_of_means_weighs_microbatches_equally() -> None:
    """`loss="mean_of_means"` is the plain mean of the losses of microbatches."""
    batch, model = mlp_batch(8), example("mlp")[0]
    batch["labels"][:3] = -100
    pm = emit(record(), traced("mlp"), model, device="cpu", loss="mean_of_means")
    halves = [model(batch["x"][i : i + 4], batch["labels"][i : i + 4]) for i in (0, 4)]
    torch.testing.assert_close(pm.train_step(**batch), sum(halves) / 2, rtol=1e-12, atol=0)


def test_profilers_show_layers() -> None:
    """The forward pass of each layer is a range with the layer's name, in every microbatch."""
    pm = emit(record(), traced("mlp"), example("mlp")[0], device="cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pm.train_step(**mlp_batch(8))
    counts = {event.key: event.count for event in profile.key_averages()}
    for layer in traced("mlp").layers:
        assert counts[layer.name] == record().num_microbatches


def test_code_is_shared_by_equal_layers_and_readable() -> None:
    """Equal layers run one generated function, whose text calls the model's operators on named values."""
    (runtime,) = parallel("gpt").runtimes
    first, second = (runtime.stage.get_submodule(f"layers.{i}") for i in (1, 2))
    assert isinstance(first, LayerModule)
    assert isinstance(second, LayerModule)
    assert first.code is second.code
    code = first.code.at(4, True)
    module = getattr(code, "__self__", None)
    assert isinstance(module, fx.GraphModule)
    text = module.code
    assert "torch.ops.aten.scaled_dot_product_attention" in text
    assert "down_proj_weight" in text


class Uninitialised(nn.Module):
    """Owns a parameter that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))


def test_meta_parameters_without_initialiser_are_refused() -> None:
    """A class without `reset_parameters` can't be made real from meta: said by name; the model stays as it was."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), Uninitialised())
    with pytest.raises(EmitError, match=r"1\.scale of Uninitialised"):
        dict(materialize.values(model, torch.device("cpu"), 0))
    assert all(p.is_meta for p in model.parameters())


def test_values_of_meta_modules_are_seeded_by_name() -> None:
    """The same seed gives the same values, another seed others, and equal modules of other names differ."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    first, again, other = (dict(materialize.values(model, torch.device("cpu"), s)) for s in (0, 0, 1))
    assert first["0.weight"].equal(again["0.weight"])
    assert not first["0.weight"].equal(other["0.weight"])
    assert not first["0.weight"].equal(first["1.weight"])


def test_moving_the_module_is_refused() -> None:
    """`.to()` would part the parameters from the code: refused with the remedy."""
    with pytest.raises(EmitError, match="device"):
        parallel().half()


def test_peak_counts_what_is_held_at_once() -> None:
    """Two tensors of 1 MB held together after a freed one of 2 MB peak at 2 MB above what was alive."""
    alive = torch.zeros(1 << 18)

    def work() -> None:
        torch.zeros(1 << 19)
        kept = [torch.zeros(1 << 18) for _ in range(2)]
        del kept

    before = measured_peak_tensor_bytes(lambda: None, "cpu")
    assert measured_peak_tensor_bytes(work, "cpu") - before == 2 << 20
    assert before >= alive.nbytes


def test_buffers_of_collectives_count_while_they_run() -> None:
    """What another thread released, unseen, counts up to the next change; what is left at the end counts on."""
    seen = [Change(1, 10), Change(2, 7), Change(3, 5), Change(1, -10), Change(2, 1), Change(2, -1)]
    assert highest_bytes(seen, alive={3}) == 10 + 7
    assert highest_bytes(seen, alive={2, 3}) == 10 + 7
    assert highest_bytes([*seen[:4], Change(4, 13)], alive={2, 3, 4}) == 7 + 5 + 13


def test_private_names_of_torch_exist() -> None:
    """Every private name of torch that emission uses is there and does what it is used for."""
    values = [torch.ones(2), torch.ones(3)]
    torch_private.scale_all(values, torch.tensor(2.0))
    torch_private.copy_all(values[:1], [values[1][:2]])
    assert [float(n) ** 2 for n in torch_private.norms_of(values, 2.0)] == pytest.approx([8, 12])
    called: list[str] = []
    leaf = torch.ones(1, requires_grad=True)
    product = leaf * 1
    product.register_hook(lambda _: torch_private.at_end_of_backward(lambda: called.append("end")))
    product.backward()
    assert called == ["end"]
    assert torch_private.laid_out_as(leaf, values[0]) is values[0]
