"""Plans on meshes of up to two axes, and what is found next to them: three axes, ZeRO inside nodes.

python -m benchmarks.three_axes
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cluster import load_cluster
from autopar.cost.roofline import RooflinePricer
from autopar.formulate.finer import refined
from autopar.formulate.searched import Searched, searched
from autopar.formulate.space import Space
from autopar.plan import POLICIES, Request
from autopar.trace import load_model, trace
from benchmarks.search_time import LLAMA_8B


class Block(nn.Module):
    """Attention, and experts that each take their best tokens (Zhou et al. 2022), with the dimensions of Mixtral."""

    def __init__(self, width: int, heads: int, kv_heads: int, experts: int, inner: int, topk: int) -> None:
        super().__init__()
        self.counts, self.size, self.topk = (heads, kv_heads, kv_heads), width // heads, topk
        self.qkv = nn.ModuleList(nn.Linear(width, n * self.size, bias=False) for n in self.counts)
        self.out, self.gate = nn.Linear(width, width, bias=False), nn.Linear(width, experts, bias=False)
        self.norm, self.again = nn.RMSNorm(width), nn.RMSNorm(width)
        shapes = ((experts, width, inner), (experts, width, inner), (experts, inner, width))
        self.up, self.beside, self.down = (nn.Parameter(torch.empty(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm(x))
        return x + self._choose(self.again(x))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            lin(x).unflatten(2, (n, self.size)).transpose(1, 2) for lin, n in zip(self.qkv, self.counts, strict=True)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _choose(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        room = self.topk * x.shape[1] // scores.shape[-1]
        weight, index = scores.transpose(1, 2).topk(room, -1)
        places = index.flatten(1).unsqueeze(-1).expand(-1, -1, x.shape[2])
        inside = x.gather(1, places).unflatten(1, (scores.shape[-1], room))
        hidden = F.silu(torch.einsum("becd,edf->becf", inside, self.up))
        made = torch.einsum("becf,efd->becd", hidden * torch.einsum("becd,edf->becf", inside, self.beside), self.down)
        return torch.zeros_like(x).scatter_add(1, places, (made * weight.unsqueeze(-1)).flatten(1, 2))


class Mixture(nn.Module):
    """Such blocks between an embedding and a head."""

    def __init__(self, layers: int, vocab: int = 32000, width: int = 4096) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.layers = nn.ModuleList(Block(width, 32, 8, 8, 14336, 2) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Case(NamedTuple):
    """What to plan: `spec` of a model, or '' for a mixture of experts of eight layers."""

    name: str
    spec: str
    seq_len: int
    cluster: str
    batch: int
    constraints: tuple[str, ...] = ()


CASES = (
    Case("8B, 128k tokens, 64 H100", LLAMA_8B.format(layers=32), 1 << 17, "8x8xh100-80gb", 4),
    Case("experts, 64 H100, one stage", "", 4096, "8x8xh100-80gb", 64, ("exclude=pp",)),
)


def space_of(case: Case) -> Space:
    """The plans there are."""
    if case.spec:
        loaded = load_model(case.spec, seq_len=case.seq_len)
        model, inputs = loaded.model, loaded.inputs
    else:
        with torch.device("meta"):
            model = Mixture(8)
            inputs = {name: torch.zeros(2, case.seq_len, dtype=torch.long) for name in ("ids", "labels")}
    graph, cluster = trace(model, inputs, compute_dtype="bfloat16"), load_cluster(case.cluster)
    request = Request(
        case.name, cluster.name, cluster.device.name, cluster.devices, case.batch, "bf16", POLICIES["bf16"], "adamw",
        constraints=case.constraints,
    )  # fmt: skip
    return Space(graph, cluster, RooflinePricer(cluster), request)


def measure(case: Case) -> dict[str, Any]:
    """Seconds of a step and CPU seconds of the search, on few axes and then next to that."""
    space = space_of(case)
    began = time.process_time()
    scenarios = tuple(space.searched(space.request.devices, space.cluster.device.limit_bytes(None)))
    few = Searched(space.request.devices, scenarios, searched(scenarios, 1))
    between = time.process_time()
    more = refined(few, space)
    best = more.answer.best
    return {
        "few_s": few.best_s, "more_s": more.best_s,
        "few_cpu_s": between - began, "more_cpu_s": time.process_time() - between,
        "name": best.name if best else "nothing",
    }  # fmt: skip


def main() -> None:
    """Print a line a case, or for the one numbered."""
    for case in CASES[int(sys.argv[1]) :][:1] if len(sys.argv) > 1 else CASES:
        found = measure(case)
        print(
            f"{case.name}: {found['few_s']:.4g} s on up to two axes ({found['few_cpu_s']:.1f} CPU s of search), "
            f"{found['more_s']:.4g} s next to it ({found['more_cpu_s']:.1f} CPU s more), {found['name']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
