"""Arguments of other kinds than those there are: each is refused in words, all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConfigError

INPUTS = {"input": torch.zeros(2, 4)}
ASKED: dict[str, Any] = {"cluster": "8xa100-80gb", "global_batch": 8, "dtype": "fp32"}


def call(function: Callable[..., Any], **changed: Any) -> str:
    """What the function refuses, for a layer in place of a model."""
    arguments: dict[str, Any] = {"model": nn.Linear(4, 4), "example_inputs": INPUTS} | changed
    with pytest.raises(ConfigError) as refused:
        function(**arguments)
    return str(refused.value)


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("config", "dp=2", "config='dp=2': give an autopar.ManualConfig"),
        ("constraints", "pp=2", "constraints='pp=2': give a list"),
        ("constraints", [3], "constraint '3': key '3' can't be pinned"),
        ("dtype_policy", "bf16", "dtype_policy='bf16': give"),
        ("name", 3, "name=3: give a text"),
        ("profile", 3, "profile=3: give the path"),
        ("seed", "a", "seed='a': give a whole number"),
        ("time_limit_s", "a", "time_limit_s='a': give seconds"),
        ("optimizer", torch.optim.SGD(nn.Linear(1, 1).parameters()), "optimizer='SGD': give adamw"),
        ("model", nn.Linear, "model is <class 'torch.nn.modules.linear.Linear'>: give a torch.nn.Module"),
        ("example_inputs", torch.zeros(2, 4), "example_inputs is a Tensor: give a dict"),
        ("loss_fn", 3, "loss_fn=3: give a function"),
    ],
)
def test_arguments_of_plan(argument: str, value: Any, words: str) -> None:
    """The message has the value and what to give in its place."""
    assert words in call(autopar.plan, **ASKED | {argument: value})


def test_every_argument_is_told() -> None:
    """Of several mistakes none waits for the others to be mended."""
    said = call(autopar.plan, **ASKED | {"config": "dp=2", "seed": None, "constraints": "tp=2"})
    assert all(f"{name}=" in said for name in ("config", "seed", "constraints"))


def test_arguments_of_the_others() -> None:
    """An estimate needs a configuration; what runs a plan needs one that was read, and options by name."""
    for config in ("dp=2", None):
        assert f"config={config!r}: give an autopar.ManualConfig" in call(autopar.estimate, **ASKED, config=config)
    for function in (autopar.optimize, autopar.verify):
        assert "plan='plan.json': give an autopar.Plan; Plan.load reads" in call(function, plan="plan.json")
    assert "compile='max-autotune': give True" in call(autopar.optimize, compile="max-autotune")
