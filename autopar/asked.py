"""What a script asks for: arguments checked all at once, and the model traced as they say."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.choices import DTYPES, OBJECTIVES, listed, optimizer_name, parse_bytes
from autopar.cluster import Cluster
from autopar.errors import ConfigError
from autopar.formulate.config import ManualConfig, parse_constraints
from autopar.plan import POLICIES, DtypePolicy, Request

if TYPE_CHECKING:
    from torch import nn

    from autopar.graph import OpGraph

Inputs = Mapping[str, Any] | tuple[Any, ...] | list[Any]

KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "config": ((ManualConfig,), "an autopar.ManualConfig: ManualConfig.parse reads dp=2,tp=4"),
    "constraints": ((list, tuple), "a list of texts such as tp=4"),
    "dtype_policy": ((DtypePolicy,), "an autopar.plan.DtypePolicy, or name a dtype"),
    "name": ((str,), "a text"),
    "profile": ((str, Path), "the path of a file that `autopar profile -o` wrote"),
    "time_limit_s": ((int, float), "seconds, or None for no limit"),
}
"""Of arguments that may be None: what else they may be, in types and in words."""


@dataclass(frozen=True)
class Asked:
    """The arguments of `plan`, `estimate` or `profile`, as given."""

    model: Any  # an nn.Module; a Dims where another framework is asked about
    cluster: Cluster | str | Path
    global_batch: int
    dtype: str
    dtype_policy: DtypePolicy | None = None
    optimizer: str | type = "adamw"
    memory_limit: str | int | None = None
    objective: str = "step_time"
    constraints: Sequence[str] = ()
    config: ManualConfig | None = None
    seed: int = 0
    name: str | None = None
    top: int = 1
    time_limit_s: float | None = None
    profile: str | Path | None = None

    def checked(self) -> tuple[Request, Cluster]:
        """The request and its cluster; raises ConfigError with every mistake."""
        from autopar.pricing import find_cluster

        mistakes = list(self._mistakes())
        optimizer = _collected(mistakes, lambda: optimizer_name(self.optimizer))
        limit = _collected(mistakes, lambda: parse_bytes(self.memory_limit))
        constraints = tuple(self.constraints) if isinstance(self.constraints, (list, tuple)) else ()
        _collected(mistakes, lambda: parse_constraints(constraints))
        cluster = _collected(mistakes, lambda: find_cluster(self.cluster))
        if mistakes or cluster is None:
            raise ConfigError(*mistakes)
        request = Request(
            model=self.name or type(self.model).__name__,
            cluster=cluster.name,
            device=cluster.device.name,
            devices=cluster.devices,  # of the job: config or constraint may leave some idle
            global_batch=self.global_batch,
            dtype=self.dtype,
            policy=self.dtype_policy or POLICIES[self.dtype],
            optimizer=optimizer or "adamw",
            objective=self.objective,
            memory_limit_bytes=limit,
            constraints=constraints,
            config=str(self.config) if self.config else None,
            seed=self.seed,
        )
        return request, cluster

    def _mistakes(self) -> Iterable[str]:
        for name in ("global_batch", "top"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                yield f"{name}={count!r}: give a whole number of at least 1"
        if not isinstance(self.seed, int):
            yield f"seed={self.seed!r}: give a whole number"
        for name, (kinds, words) in KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                yield f"{name}={value!r}: give {words}"
        if isinstance(self.time_limit_s, (int, float)) and not (0 <= self.time_limit_s < math.inf):
            yield f"time_limit_s={self.time_limit_s!r}: give seconds, or None for no limit"
        if self.dtype_policy is None and self.dtype not in POLICIES:
            yield f"dtype={self.dtype!r}: give {listed(DTYPES)}, or a dtype_policy"
        if self.objective not in OBJECTIVES:
            yield f"objective={self.objective!r}: give {listed(OBJECTIVES)}"


def traced(asked: Asked, example_inputs: Inputs, loss_fn: Callable[..., Any] | None) -> tuple[OpGraph, float]:
    """The graph of the model in the compute dtype asked for, and the CPU seconds that took."""
    began = time.process_time()
    policy = asked.dtype_policy or POLICIES[asked.dtype]
    graph = trace_model(asked.model, example_inputs, policy, loss_fn)
    return graph, time.process_time() - began


def trace_model(
    model: nn.Module, example_inputs: Inputs, policy: DtypePolicy, loss_fn: Callable[..., Any] | None
) -> OpGraph:
    """The graph of a model that computes in `policy.compute`; raises ConfigError on what is no model or no inputs."""
    from torch import nn

    from autopar.trace import trace

    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {model!r}: give a torch.nn.Module (an object, not its class)")
    if not isinstance(example_inputs, (Mapping, tuple, list)):
        kind = type(example_inputs).__name__
        raise ConfigError(f"example_inputs is a {kind}: give a dict of keyword arguments, or a tuple")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn={loss_fn!r}: give a function of the model's output, or None")
    given = dict(example_inputs) if isinstance(example_inputs, Mapping) else tuple(example_inputs)
    return trace(model, given, compute_dtype=policy.compute, loss_fn=loss_fn)


def _collected(mistakes: list[str], read: Callable[[], Any]) -> Any:
    """What `read` returns; its ConfigError joins the mistakes."""
    try:
        return read()
    except ConfigError as error:
        mistakes.extend(error.mistakes)
        return None
