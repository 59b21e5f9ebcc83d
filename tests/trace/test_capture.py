"""Tracing: graphs compute what the modules compute."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import ConfigError, TraceError
from autopar.trace import load_model, trace
from autopar.trace.inputs import bind
from tests.trace.interpreter import largest_difference, run_graph
from tests.trace.models import CASES, Mlp, TiedBlocks, TwoHeads

LLAMA70 = "hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=32000,seq=4096"


def _loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    loss: Tensor = sum(p.sum() for p in output.parts) if hasattr(output, "parts") else output["loss"]
    return loss


@pytest.mark.parametrize("name", CASES)
def test_graph_equals_module(name: str) -> None:
    """Loss and all gradients at batch 5 equal the module's, from a trace at batch 3, values only through cuts."""
    case = CASES[name]
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = case.model().double().train()
    graph = trace(model, case.batch_of(3))
    batch = case.batch_of(5)
    bound = bind(model, batch)
    inputs = dict(zip(bound.names, bound.tensors, strict=True))
    assert not [a for a in graph.assumptions if "batch" in a]
    assert largest_difference(graph, model, inputs, _loss(model(**batch)), 5) < case.tolerance


@pytest.mark.parametrize("name", ["gpt", "llama", "residual", "hf gpt2", "hf llama", "tied"])
def test_equal_blocks_share_a_class(name: str) -> None:
    """All blocks of a model are one class; the first residual block reads one tensor twice and is another."""
    graph = trace(CASES[name].model().double(), CASES[name].batch_of(2))
    blocks = [x for x in graph.layers if x.name.rpartition(".")[2].isdigit()]
    assert len(blocks) >= 3
    assert len({x.class_index for x in blocks}) == (2 if name == "residual" else 1)
    named = dict.fromkeys(p for x in blocks for p in x.params)
    assert set(named) <= set(graph.params)


def test_module_is_left_alone() -> None:
    """Tracing changes neither parameters, hooks, mode nor forward, and leaves real parameters where they are."""
    model = CASES["residual"].model().double().eval()
    before = {n: (id(p), p.device.type, p.dtype) for n, p in model.named_parameters()}
    trace(model, CASES["residual"].batch_of(2), compute_dtype="bfloat16")
    assert {n: (id(p), p.device.type, p.dtype) for n, p in model.named_parameters()} == before
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not model.training


def test_compute_dtype_casts_parameters_and_inputs() -> None:
    """Floating parameters and inputs take the compute dtype, buffers keep theirs."""
    graph = trace(CASES["residual"].model(), CASES["residual"].batch_of(2), compute_dtype="bfloat16")
    assert {s.dtype for s in graph.params.values()} == {"bfloat16"}
    assert {s.dtype for s in graph.buffers.values()} == {"float32"}
    assert graph.values["x"].dtype == "bfloat16"


def test_digests_are_the_same_in_another_process() -> None:
    """Hashes depend on the model alone: equal across processes and runs."""
    code = (
        "from tests.trace.models import CASES; from autopar.trace import trace\n"
        "for n in ('residual', 'llama'): print(trace(CASES[n].model(), CASES[n].batch_of(2)).digest)"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    trace(CASES["mlp"].model().double(), CASES["mlp"].batch_of(2))
    assert other == [trace(CASES[n].model(), CASES[n].batch_of(4)).digest for n in ("residual", "llama")]


def test_ties_and_unread_parameters() -> None:
    """A tied parameter has its first name everywhere; parameters nobody reads stay listed."""
    graph = trace(TiedBlocks(), CASES["tied"].batch_of(2))
    assert graph.aliases["head.weight"] == "embed.weight"
    assert graph.aliases["blocks.2.1.weight"] == "blocks.0.1.weight"
    assert "embed.weight" in graph.layers[0].params
    assert "embed.weight" in graph.layers[-1].params
    assert all("blocks.0.1.weight" in x.params for x in graph.layers[1:-1])
    assert "unused.weight" in graph.params
    assert not any("unused.weight" in x.params for x in graph.layers)


def test_narrow_points() -> None:
    """Without repeated blocks each linear layer is its own, activations with it, equal ones of one class."""
    graph = trace(Mlp().double(), CASES["mlp"].batch_of(2))
    assert [x.name for x in graph.layers] == ["net.0", "net.2", "net.4", "net.6"]
    assert graph.layers[1].class_index == graph.layers[2].class_index
    assert all("y" in cut.values for cut in graph.cuts[:-1])
    assert graph.cuts[1].main == "net.0/relu"


class _Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.linear(x)}


def test_loss_function() -> None:
    """A loss function gets the output and, by name, inputs that forward does not take."""
    model, target = _Scores().double(), torch.randn(4, 3, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)

    def squared(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output["scores"], target)

    graph = trace(model, {"x": x[:2], "target": target[:2]}, loss_fn=squared)
    assert graph.inputs == ("x", "target")
    assert graph.loss is not None
    found = run_graph(graph, model, {"x": x, "target": target}, 4)[graph.loss]
    torch.testing.assert_close(found, F.mse_loss(model.linear(x), target))


def test_no_loss_is_planned_on_the_sum() -> None:
    """Without a scalar there is no loss, the sum of the outputs is built in, and the assumptions say so."""
    graph = trace(TwoHeads().double(), CASES["two heads"].batch_of(2))
    assert graph.loss is None
    assert graph.values[graph.outputs[-1]].shape == ()
    assert any("sum of its float outputs" in a for a in graph.assumptions)
    assert graph.inputs == ("batch.x", "batch.mask")


def test_tuple_inputs_have_parameter_names() -> None:
    """Positional inputs are named by the parameters of forward; one tensor given twice stays two inputs."""
    x = torch.zeros(2, 3)
    graph = trace(_Difference(), (x, x))
    assert graph.inputs == ("left", "right")
    assert graph.cuts[0].values == ("left", "right")


class _Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return ((left - right) * self.weight).pow(2).mean()


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Chooser()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean()  # type: ignore[no-any-return]


class _Chooser(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_what_stands_as_one_operator_is_named_with_its_line() -> None:
    """A branch on data makes its module one operator: the graph says so with module, file and line."""
    (note,) = trace(_Branching(), (torch.zeros(2, 3),)).assumptions
    assert re.match(r"inner runs as one operator.*inner, .*test_capture\.py:\d+: can't be traced", note)


def test_a_forward_that_fails_by_itself_is_told_so() -> None:
    """Inputs that the model refuses are named as such, with the place, and not as something that can't be traced."""
    with pytest.raises(TraceError, match=r"forward fails on these example_inputs \(RuntimeError: .*5") as said:
        trace(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(5, 4), nn.ReLU())), (torch.zeros(2, 4),))
    assert "can't be traced" not in str(said.value)
    with pytest.raises(TraceError, match=r"forward fails on these example_inputs \(TypeError: .*'right'"):
        trace(_Difference(), {"left": torch.zeros(2, 3)})


def test_a_loss_function_that_is_not_called_is_told_so() -> None:
    """A model that returns a scalar has its loss; a loss_fn given beside it is not called, which is said."""
    x = torch.zeros(2, 3)
    graph = trace(_Difference(), (x, x), loss_fn=lambda out: out * 2)
    assert graph.assumptions == (
        "loss_fn is not called: the model returns a scalar (its only output), which is the loss",
    )


class _FixedSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).reshape(4, -1, 3).sum()


def test_fixed_batch_is_an_assumption() -> None:
    """A model that bakes in its batch size is traced at the size given, and says so."""
    graph = trace(_FixedSize(), (torch.zeros(4, 3),))
    assert any("traced at batch 4 only" in a for a in graph.assumptions)
    assert graph.values["x"].batch_dim is None


def test_bad_arguments() -> None:
    """No tensors, another type of inputs and an unknown dtype are configuration errors that show the value."""
    with pytest.raises(ConfigError, match="no tensor"):
        trace(_Difference(), {})
    with pytest.raises(ConfigError, match="str"):
        trace(_Difference(), "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'bf17'"):
        trace(_Difference(), (torch.zeros(2, 3), torch.zeros(2, 3)), compute_dtype="bf17")


def _trace_seconds(layers: int) -> tuple[float, int]:
    """CPU seconds of tracing that many layers of the 70-billion dims, and how many classes they have."""
    loaded = load_model(f"llama:layers={layers},{LLAMA70}")
    start = time.process_time()
    graph = trace(loaded.model, loaded.inputs, compute_dtype="bfloat16")
    return time.process_time() - start, len(graph.classes)


def test_deep_model_is_traced_soon() -> None:
    """80 layers of the 70-billion dims are traced in under 3 s of CPU time, and have as many classes as 8."""
    _, classes = _trace_seconds(8)
    seconds, classes_deep = min(_trace_seconds(80) for _ in range(2))
    assert seconds < 3
    assert classes == classes_deep == 3


@pytest.mark.slow
def test_depth_costs_little() -> None:
    """80 layers cost at most twice the CPU time of 8 (the least of three runs each)."""
    _trace_seconds(2)
    least = {layers: min(_trace_seconds(layers)[0] for _ in range(3)) for layers in (8, 80)}
    assert least[80] <= 2 * least[8]


class _ClassWeights(nn.CrossEntropyLoss):
    """A loss that is a module with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


@pytest.mark.parametrize("bound", [False, True], ids=["module", "closure"])
def test_small_tensors_of_a_loss(bound: bool) -> None:
    """A loss may bring a few numbers, as its buffer or from around it, and takes keywords by its forward's names."""
    torch.manual_seed(0)
    weights = _ClassWeights()
    loss_fn: Any = (lambda out, target: F.cross_entropy(out, target, weights.weight)) if bound else weights
    model = nn.Linear(4, 3).double()
    batch = {"input": torch.randn(6, 4, dtype=torch.float64), "target": torch.randint(0, 3, (6,))}
    graph = trace(model, batch, loss_fn=loss_fn)
    assert largest_difference(graph, model, batch, weights(model(batch["input"]), batch["target"]), 6) < 1e-12


class _Clamping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x).pow(2).mean()


def test_parameters_are_not_changed_by_forward() -> None:
    """A forward that changes a parameter in place is refused by name: its gradient would be lost."""
    with pytest.raises(TraceError, match=r"changes parameters \(weight\)"):
        trace(_Clamping(4, 3), (torch.zeros(2, 4),))


class _Dice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2).mean() * random.random()


def test_random_numbers_of_python_are_said() -> None:
    """A forward that draws outside of torch is traced with what it drew, and the plan says so."""
    assert any("drew once" in said for said in trace(_Dice(4, 3), (torch.zeros(2, 4),)).assumptions)
