"""Commands that list what there is: devices (and add one), clusters, models."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.answer import Answer
from autopar.cli.options import Json


def devices(context: typer.Context, as_json: Json = False) -> Answer | None:
    """List the known devices, or add one."""
    if context.invoked_subcommand:
        return None
    from autopar.cluster import all_devices

    known = all_devices()
    lines = [f"{'device':<20}{'memory':>10}{'bandwidth':>12}{'bf16':>10}{'fp16':>10}{'fp32':>10}"]
    lines += [f"{'':<20}{'GiB':>10}{'GB/s':>12}" + f"{'TFLOP/s':>10}" * 3]
    for d in known:
        rates = (f"{d.peak_tflops.get(key, '-'):>10}" for key in ("bfloat16", "float16", "float32"))
        lines.append(f"{d.name:<20}{d.memory_gib:>10g}{d.memory_gb_per_s:>12g}{''.join(rates)}")
    return Answer("\n".join(lines), [d.model_dump() for d in known], as_json)


def devices_add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the device.")],
    tflops: Annotated[float, typer.Option("--tflops", help="Dense bf16 and fp16 TFLOP/s by datasheet.")],
    bandwidth_gbs: Annotated[float, typer.Option("--bandwidth-gbs", help="Memory bandwidth in GB/s.")],
    memory_gib: Annotated[float, typer.Option("--memory-gib", help="Memory in GiB.")],
    fp32_tflops: Annotated[
        float | None, typer.Option("--fp32-tflops", help="Dense fp32 TFLOP/s (default a sixteenth of --tflops).")
    ] = None,
    link_gbs: Annotated[float, typer.Option("--link-gbs", help="GB/s one way between devices of a node.")] = 32.0,
    network_gbs: Annotated[float, typer.Option("--network-gbs", help="GB/s one way a device between nodes.")] = 12.5,
    architecture: Annotated[
        str, typer.Option("--architecture", help="Generation, such as hopper: the constants of its devices are taken.")
    ] = "",
    units: Annotated[int, typer.Option("--units", help="Multiprocessors or cores (0: not known).")] = 0,
) -> Answer:
    """Add a device by its datasheet figures; an earlier one of the name is replaced."""
    from autopar.cluster import add_device, device_from_figures

    device = device_from_figures(
        name,
        tflops=tflops,
        fp32_tflops=tflops / 16 if fp32_tflops is None else fp32_tflops,
        bandwidth_gbs=bandwidth_gbs,
        memory_gib=memory_gib,
        link_gbs=link_gbs,
        network_gbs=network_gbs,
        architecture=architecture,
        units=units,
    )
    path = add_device(device)
    return Answer(f"{name} is in {path}; use it as 8x{name}.", {"name": name, "file": str(path)})


def clusters(as_json: Json = False) -> Answer:
    """List the shipped clusters."""
    from autopar.cluster import shipped_clusters

    lines = [f"{'cluster':<18}{'nodes':>7}{'a node':>8}  {'device':<20}{'GB/s in/out of node':>20}"]
    for file in shipped_clusters():
        c = file.cluster()
        rates = f"{c.intra.bytes_per_s / 1e9:.4g} / {c.inter.bytes_per_s / 1e9:.4g}"
        lines.append(f"{c.name:<18}{c.nodes:>7}{c.devices_per_node:>8}  {c.device.name:<20}{rates:>20}")
    lines += ["", "Any other: [NODESx]DEVICESxDEVICE, such as 16x8xh100-80gb, or a TOML file."]
    return Answer("\n".join(lines), [c.model_dump() for c in shipped_clusters()], as_json)


def models(as_json: Json = False) -> Answer:
    """List the shipped models."""
    from autopar.trace.models.shipped import SHIPPED

    keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    lines = [f"{'model':<14}{'family':<8}" + "".join(f"{key.removesuffix('_heads'):>8}" for key in keys)]
    for name, spec in SHIPPED.items():
        family, _, rest = spec.partition(":")
        dims = dict(item.split("=") for item in rest.split(","))
        lines.append(f"{name:<14}{family:<8}" + "".join(f"{dims.get(key, '-'):>8}" for key in keys))
    lines += [
        "",
        "Others: hf:DIR_OR_CONFIG.json, FILE.py:function, or dims such as",
        "gpt:layers=12,hidden=768,heads=12,vocab=50257",
    ]
    return Answer("\n".join(lines), dict(SHIPPED), as_json)
