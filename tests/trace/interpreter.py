"""Runs an OpGraph op by op on real tensors with a module's own parameters: the independent check of a trace.

A layer sees only what the cut in front of it lists, so wrong cuts fail, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from torch import Tensor, nn

from autopar.graph import OpGraph
from autopar.trace.run import run_op


def run_graph(graph: OpGraph, module: nn.Module, inputs: Mapping[str, Tensor], batch: int) -> dict[str, Tensor]:
    """Values behind the last cut at `batch` samples; checks shapes, dtypes and gradient flow of every value."""
    alive = {name: inputs[name] for name in graph.cuts[0].values}
    for layer, cut in zip(graph.layers, graph.cuts[1:], strict=True):
        kind = graph.classes[layer.class_index]
        env = {local: alive[name] for local, name in zip(kind.inputs, layer.inputs, strict=True)}
        stored = zip((*kind.params, *kind.buffers), (*layer.params, *layer.buffers), strict=True)
        env |= {local: attrgetter(name)(module) for local, name in stored}
        for op in kind.ops:
            env |= dict(zip(op.results, run_op(op, env, batch, "cpu"), strict=True))
            for name in op.results:
                spec = kind.values[name]
                assert tuple(env[name].shape) == spec.shape_at(batch), (op, env[name].shape)
                assert str(env[name].dtype) == f"torch.{spec.dtype}", op
                assert env[name].requires_grad == spec.requires_grad, op
        alive |= {name: env[local] for local, name in zip(kind.outputs, layer.outputs, strict=True)}
        alive = {name: alive[name] for name in cut.values}
        assert cut.main in alive
    return alive


def largest_difference(graph: OpGraph, module: nn.Module, inputs: dict[str, Tensor], loss: Tensor, batch: int) -> float:
    """Largest relative difference of the loss and of every gradient between the graph and the module's own `loss`."""
    names = [n for n, p in module.named_parameters() if p.requires_grad]
    module.zero_grad(set_to_none=True)
    loss.backward()
    wanted = {n: module.get_parameter(n).grad for n in names}
    module.zero_grad(set_to_none=True)
    found = run_graph(graph, module, inputs, batch)[graph.loss or graph.outputs[-1]]
    found.backward()
    pairs = [(loss.detach(), found.detach())]
    for name in names:
        got, want = module.get_parameter(name).grad, wanted[name]
        assert (got is None) == (want is None), name
        if got is not None and want is not None:
            pairs.append((want, got))
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in pairs)
