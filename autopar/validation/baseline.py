"""What a constant share of the datasheet's peak says: the prediction that any model has to beat."""

from __future__ import annotations

from autopar.validation.calls import Call, base_device

FLOPS_SHARE = {"gemm": 0.8, "attention": 0.5}
"""Share of peak FLOP/s."""

BANDWIDTH_SHARE = 0.8
"""Share of the memory's bandwidth, and of a link's."""


def baseline_s(call: Call) -> float:
    """Seconds at a constant share of peak FLOP/s, memory bandwidth or link bandwidth."""
    sizes, device = call.sizes, base_device(call.device)
    if call.family == "gemm":
        flops = 2 * sizes["m"] * sizes["n"] * sizes["k"] * sizes["batch"]
    elif call.family == "attention":
        scores = sizes["batch"] * sizes["heads"] * sizes["seq_q"] * sizes["seq_kv"] * (1 - sizes["causal"] / 2)
        flops = 4 * scores * sizes["head_dim"] * (1.0 if sizes["passes"] == 1 else sizes["passes"] - 0.5)
    elif call.family == "elementwise":
        return sizes["bytes"] / (BANDWIDTH_SHARE * device.memory_bytes_per_s)
    else:
        return sizes["link_s"] / BANDWIDTH_SHARE
    return flops / (FLOPS_SHARE[call.family] * device.peak_flops_per_s[call.dtype])
