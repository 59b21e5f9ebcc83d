"""Plans that keep activations or optimizer states in the host's memory: values on real processes, bytes and copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.cost.activations import activations
from autopar.cost.host import saved_demand
from autopar.emit.build import check, emit
from autopar.emit.offload import offloading
from autopar.emit.peak import step_peak_tensor_bytes
from autopar.errors import ConfigError, EmitError, InfeasibleError
from autopar.formulate.config import ManualConfig
from autopar.measure.ops import time_op
from autopar.plan import LayerStrategy
from autopar.shard import host
from autopar.shard.lower import lower
from autopar.trace.inputs import bind
from autopar.verify import verify
from benchmarks.byte_limits import load
from tests.checkpoints.runs import Case, case, step, whole
from tests.formulate.cases import planner, traced
from tests.integration.models import example
from tests.pool import Pool

PLANS = (
    ("odd gpt", "dp=2,tp=2,zero=1,offload=optimizer"), ("skips", "dp=2,tp=2,zero=3,offload=activations"),
    ("gpt", "pp=2,dp=2,zero=1,offload=optimizer"), ("gpt", "dp=4,offload=optimizer"),
    ("gpt", "dp=4,offload=activations"), ("llama", "tp=4,sp=1,offload=activations"),
    ("odd gpt", "dp=4,zero=2,offload=activations"),
)  # fmt: skip


def verified(case: Case) -> float:
    model, inputs = example(case.name)
    return verify(case.plan, model, inputs, graph=case.graph).largest


@pytest.mark.parametrize(
    ("name", "text"), [*PLANS[:3], *(pytest.param(*plan, marks=pytest.mark.slow) for plan in PLANS[3:])]
)
def test_values_are_those_of_one_device(pool: Pool, name: str, text: str) -> None:
    """Loss, gradients and parameters after three steps agree with the model on one device in float64."""
    assert max(pool.run(4, verified, case(name, text))) < 1e-9


def stepped(case: Case) -> dict[str, Tensor]:
    """Parameters after two clipped steps, whole."""
    pm = emit(case.plan, case.graph, example(case.name)[0], device="cpu")
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.01)

    def clip(*_: Any) -> None:
        pm.clip_grad_norm_(0.5)

    optimizer.register_step_pre_hook(clip)
    for seed in range(2):
        step(pm, optimizer, case, seed)
    return {n: whole(p) for n, p in pm.named_parameters()}


def test_steps_are_the_same_bit_for_bit(pool: Pool) -> None:
    """Where states lie changes nothing: float64 steps with and without the host are equal."""
    with_host, without = (
        pool.run(4, stepped, case("gpt", f"dp=2,tp=2,zero=1{more}")) for more in (",offload=optimizer", "")
    )
    for one, other in zip(with_host, without, strict=True):
        assert all(torch.equal(one[n], other[n]) for n in other)


def test_activations_leave_the_device() -> None:
    """The measured peak of a step is what is predicted, to 3 %, and far below that without offloading."""
    model = load("gpt", "gpt:layers=4,hidden=64,heads=4,vocab=512,seq=32")
    tensors = bind(model.loaded.model, model.loaded.inputs).tensors
    usual = model.planner(1).estimate(ManualConfig(microbatch_size=16))
    for size in (4, 16):
        plan = model.planner(1).plan(ManualConfig(microbatch_size=size, offload="activations"))
        assert all(strategy.offload == "activations" for strategy in plan.stages[0].strategies)
        measured = step_peak_tensor_bytes(plan, model.graph, model.loaded.model, tensors)
        assert plan.peak_tensor_bytes == pytest.approx(measured, rel=0.03)
        assert plan.peak_tensor_bytes < 0.5 * usual.peak_tensor_bytes


class Reader(nn.Module):
    """Several products of one value, a view of part of it, a mask and an index."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.table = nn.Embedding(8, 16)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        y = self.table(ids) * x
        made = [linear(y) for linear in self.maps]
        left, right = made[0].chunk(2, dim=-1)
        halves = (left * right.sigmoid()).pow(2).sum()
        total: Tensor = (made[1].relu() * made[2]).sum() + halves + made[2][:1].exp().sum()
        return total


def test_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each storage is copied once however many ops save views of it, comes back once, and gradients are the same;
    parameters and indices stay. A second backward pass brings it back again."""
    model, counts = Reader().double(), {"there": 0, "back": 0}
    ids, x = torch.arange(8), torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    model(ids, x).backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr("autopar.emit.offload.to_host", counted("there", host.to_host))
    monkeypatch.setattr("autopar.emit.offload.from_host", counted("back", host.from_host))
    with offloading(list(model.parameters())):
        loss = model(ids, x)
    once = dict(counts)
    loss.backward(retain_graph=True)
    assert counts["there"] == once["there"] > 0
    assert counts["back"] == counts["there"]
    assert all(torch.equal(p.grad, wanted[n]) for n, p in model.named_parameters() if p.grad is not None)
    loss.backward()
    assert all(torch.equal(p.grad, 2 * wanted[n]) for n, p in model.named_parameters() if p.grad is not None)


def test_bytes_and_seconds_in_closed_form() -> None:
    """All that a layer saves goes over the link once each way; states on the host cost their gradients, parameters and
    seven passes of the update on it, and leave the device a copy to compute with and the gradients."""
    maker = planner("gpt", "1xa100-80gb", 8)
    usual, saved, states = (
        maker.estimate(ManualConfig(microbatch_size=8, offload=kind)) for kind in ("none", "activations", "optimizer")
    )
    rate = maker.cluster.device.host_bytes_per_s
    graph, main = maker.graph, maker.graph.values[maker.graph.cuts[1].main]
    copied = 0
    for layer in graph.layers:
        program = lower(graph.classes[layer.class_index], LayerStrategy((), (), {}, {}), (), main, main)
        copied += sum(activations(program, 8, offloaded=True).to_host)
    more_s = saved.step_time_s - usual.step_time_s
    assert more_s == pytest.approx(2 * copied / rate, rel=0.1)  # beside the starts of copies
    elements = usual.num_params
    assert states.memory_by_category["optimizer"] == 0
    assert states.memory_by_category["parameters"] == 2 * elements  # bfloat16
    update_s = states.time_by_kind_s["optimizer"]
    assert update_s == pytest.approx(elements * (4 + 2 + 7 * 4) / rate, rel=0.05)


def test_copies_can_be_timed() -> None:
    """What a saved tensor costs is an operator like others: timed both ways, priced by the link where it isn't."""
    (key,) = saved_demand([1 << 22]).ops
    timing = time_op(key, torch.device("cpu"))
    assert not timing.failed
    assert timing.forward_s > 0
    assert timing.backward_s > 0
    pricer = planner("gpt", "1xa100-80gb").pricer
    times, device = pricer.ops([key]), pricer.cluster.device
    assert times.forward_s[0] == times.backward_s[0] == device.launch_s + (1 << 22) / device.host_bytes_per_s


def test_limits_and_mistakes() -> None:
    """A plan that fits a limit only with the host is found; what doesn't even so is refused, as are combinations."""
    maker = planner("gpt", "1xa100-80gb", 8)
    usual = maker.estimate(ManualConfig(microbatch_size=8))
    tight = replace(maker, request=replace(maker.request, memory_limit_bytes=usual.peak_tensor_bytes - 1))
    with pytest.raises(InfeasibleError):
        tight.plan(ManualConfig(microbatch_size=8))
    plan = tight.plan(ManualConfig(microbatch_size=8, offload="optimizer"))
    assert plan.feasible
    least = replace(maker, request=replace(maker.request, memory_limit_bytes=1 << 20))
    with pytest.raises(InfeasibleError, match="memory is the binding limit"):
        least.plan(ManualConfig(microbatch_size=8, offload="optimizer"))
    for text, words in (
        ("dp=2,offload=activations,recompute=full", "give recompute=none"),
        ("pp=2,offload=activations", "give pp=1"),
        ("dp=2,offload=optimizer,zero=3", "give zero=1"),
    ):
        with pytest.raises(ConfigError, match=words):
            planner("gpt", "2xa100-80gb", 8).estimate(ManualConfig.parse(text))
    stage = plan.stages[0]
    strategies = tuple(replace(s, offload="activations", recompute="full") for s in stage.strategies)
    with pytest.raises(EmitError, match="offloads activations"):
        check(replace(plan, stages=(replace(stage, strategies=strategies),)), traced("gpt"), "global")
