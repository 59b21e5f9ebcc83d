"""Device files: what `profiles/devices` and a user's own folder hold."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from autopar.architecture import ARCHITECTURES
from autopar.cluster.records import HOST_BYTES_PER_S, Device, Fabric, Link
from autopar.settings import Settings

GIB = 1 << 30
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float4_e2m1fn_x2")
"""Dtypes a device file may give rates for, by the names torch has for them."""


Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1, strict=False)]
Count: TypeAlias = Annotated[int, Field(ge=1)]


class LinkFile(Settings):
    """A link in a file: GB/s (1e9 bytes) per device one way by datasheet, the share reached, and microseconds.

    The rest is as in `Fabric`; what isn't given is a link of which no more is known.
    """

    name: str
    gb_per_s: Positive
    efficiency: Share
    latency_us: Positive
    in_switch: bool = False
    rails: bool = False
    pod_nodes: Count | None = None
    spine_share: Share = 1.0

    @model_validator(mode="after")
    def _pods(self) -> LinkFile:
        if self.spine_share < 1 and self.pod_nodes is None:
            raise ValueError(f"spine_share={self.spine_share} is of pods' rate; add pod_nodes, or leave it out")
        return self

    def link(self) -> Link:
        """The link at the rate it reaches."""
        plain = (self.name, self.gb_per_s * 1e9 * self.efficiency, self.latency_us * 1e-6)
        if not (self.in_switch or self.rails or self.pod_nodes):
            return Link(*plain)
        return Fabric(*plain, self.in_switch, self.rails, self.pod_nodes or 0, self.spine_share)


class DeviceFile(Settings):
    """A file of `profiles/devices`: datasheet figures, their sources, and the links of the usual node."""

    name: str
    aliases: tuple[str, ...] = Field(default=(), strict=False)
    backend: Literal["cuda", "cpu"] = "cuda"
    memory_gib: Positive
    usable_gib: Positive
    reserve_gib: Positive
    memory_gb_per_s: Positive
    host_gb_per_s: Positive | None = None
    launch_us: Positive
    architecture: str = ""
    units: Annotated[int, Field(ge=0)] = 0
    overlap: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    power_w: Positive | None = None
    price_per_hour: Positive | None = None
    peak_tflops: dict[str, Positive]
    efficiency: dict[str, Share]
    intra: LinkFile
    inter: LinkFile
    sources: dict[str, str]

    @field_validator("peak_tflops", "efficiency")
    @classmethod
    def _known_dtypes(cls, table: dict[str, float]) -> dict[str, float]:
        unknown = [key for key in table if key not in DTYPES and key != "memory"]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is no dtype; give {', '.join(DTYPES)} (efficiency: memory, too)")
        return table

    @field_validator("architecture")
    @classmethod
    def _known_architecture(cls, name: str) -> str:
        if name and name not in ARCHITECTURES:
            raise ValueError(f"one of {', '.join(ARCHITECTURES)}, or nothing")
        return name

    def device(self) -> Device:
        """The device in base units."""
        return Device(
            name=self.name,
            backend=self.backend,
            memory_bytes=int(self.memory_gib * GIB),
            usable_bytes=int(self.usable_gib * GIB),
            reserve_bytes=int(self.reserve_gib * GIB),
            peak_flops_per_s={dtype: float(round(tflops * 1e12)) for dtype, tflops in self.peak_tflops.items()},
            memory_bytes_per_s=self.memory_gb_per_s * 1e9,
            efficiency=dict(self.efficiency),
            launch_s=self.launch_us * 1e-6,
            host_bytes_per_s=self.host_gb_per_s * 1e9 if self.host_gb_per_s else HOST_BYTES_PER_S,
            overlap=self.overlap,
            aliases=self.aliases,
            power_w=self.power_w,
            price_per_hour=self.price_per_hour,
            sources=tuple(f"{field}: {source}" for field, source in self.sources.items()),
            architecture=self.architecture,
            units=self.units,
            fits=self.name,
        )
