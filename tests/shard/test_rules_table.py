"""Nothing stands in the table of rules that no trial has shown to hold."""

from __future__ import annotations

import torch

from autopar.shard.check import capture
from autopar.shard.rules import rule_for
from autopar.shard.table import POINTWISE, RULES
from autopar.trace.apart import is_pointwise
from tests.shard import test_rules_images, test_rules_places, test_rules_pointwise, test_rules_sharded

TRIED = [
    call
    for module in (test_rules_images, test_rules_places, test_rules_pointwise, test_rules_sharded)
    for call in module.CALLS
]
ELSEWHERE = {
    "autopar.opaque": "test_opaque: submodules on real processes",
    "aten.batch_norm": "test_batch_norm: statistics of all ranks, on real processes",
    "aten._native_batch_norm_legit_functional": "test_batch_norm",
    "aten.empty": "test_empty_tensors: no values are promised",
    "aten.empty_like": "test_empty_tensors",
}
"""Rules that can't be tried in one process, and the tests that try them."""


MOVING = {"alias", "contiguous", "expand", "lift", "lift_fresh_copy", "broadcast_to", "resolve_conj", "resolve_neg"}
"""Ops with an elementwise rule that only copy."""


def _key(target: str) -> str:
    """The key of the table that serves a call."""
    name = f"aten.{target}"
    return name if name in RULES else name.rpartition(".")[0]


def test_every_rule_is_tried() -> None:
    """Each key of the table serves a call that is run sharded against whole, forward and backward."""
    ours = {key for key in RULES if not key.startswith("autopar_tests.")}
    assert ours - {_key(target if "." in target else f"{target}.") for target, *_ in TRIED} == ELSEWHERE.keys()


def test_elementwise_rules_keep_samples_apart() -> None:
    """What the table takes for elementwise, the judgement of whether the batch may be split in time does, too."""
    overloads = {name: getattr(torch.ops.aten, name).overloads() for name in POINTWISE.split()}
    missing = {name for name, each in overloads.items() if not any(is_pointwise(f"aten.{name}.{o}") for o in each)}
    assert missing <= MOVING


def test_keys_name_operators() -> None:
    """Torch has an operator of each name."""
    assert [key for key in RULES if "aten." in key and not hasattr(torch.ops.aten, key.split(".")[1])] == []


def test_empty_tensors() -> None:
    """Both dims of a tensor without values can be split."""
    for target, arguments in (("empty.memory_format", ([4, 6],)), ("empty_like", (torch.ones(4, 6),))):
        op, layer, _ = capture(f"aten.{target}", arguments)
        rule = rule_for(op, layer)
        assert rule is not None
        assert [rule.results[0].index(f.name) for f in rule.factors] == [0, 1]
