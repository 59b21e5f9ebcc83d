"""Which devices are alike: generations in order, the class they were made for, and whose attention kernels they run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """A generation: its maker, its place in the maker's order, whether it is made for data centres' training.

    `kernels` names the generation for which the attention kernels that it runs were written.
    """

    maker: str
    place: float
    training: bool
    kernels: str


ARCHITECTURES = {
    "pascal": Architecture("nvidia", 6.0, True, "before tensor cores"),
    "pascal-graphics": Architecture("nvidia", 6.1, False, "before tensor cores"),
    "volta": Architecture("nvidia", 7.0, True, "volta"),
    "turing": Architecture("nvidia", 7.5, False, "volta"),
    "ampere": Architecture("nvidia", 8.0, True, "ampere"),
    "ampere-graphics": Architecture("nvidia", 8.6, False, "ampere"),
    "ada": Architecture("nvidia", 8.9, False, "ampere"),
    "hopper": Architecture("nvidia", 9.0, True, "hopper"),
    "blackwell": Architecture("nvidia", 10.0, True, "blackwell"),
    "blackwell-graphics": Architecture("nvidia", 12.0, False, "ampere"),
    "cdna": Architecture("amd", 1.0, True, "cdna"),
    "cdna2": Architecture("amd", 2.0, True, "cdna"),
    "cdna3": Architecture("amd", 3.0, True, "cdna"),
    "cdna4": Architecture("amd", 4.0, True, "cdna"),
    "xe2": Architecture("intel", 2.0, False, "xe"),
}

OTHER_CLASS, OTHER_KERNELS, OTHER_MAKER = 1.0, 2.0, 4.0
"""How far apart devices are that differ in class, in attention kernels (for attention) or in maker, in generations."""

SAME_KERNELS = 0.25
"""What a generation counts for attention, beside whose kernels run."""


def distance(first: str, second: str, family: str) -> float:
    """How unlike two architectures are for calls of a family: 0 for the same, about 1 for neighbours."""
    a, b = ARCHITECTURES[first], ARCHITECTURES[second]
    if a.maker != b.maker:
        return OTHER_MAKER
    apart = abs(a.place - b.place) + OTHER_CLASS * (a.training != b.training)
    if family == "attention":
        return SAME_KERNELS * apart + OTHER_KERNELS * (a.kernels != b.kernels)
    return apart
