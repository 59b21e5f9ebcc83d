"""Dimensions of public models, by the names that sources give them: what fills columns that a row leaves empty.

From the models' own configuration files.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.validation.words import longest

COLUMNS = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "gated_mlp", "tied_embeddings")

MODELS: Mapping[str, tuple[int, ...]] = {
    "bloom 176b": (70, 14336, 112, 112, 57344, 250880, 0, 1),
    "baichuan2 13b": (40, 5120, 40, 40, 13696, 125696, 1, 0),
    "falcon 7b": (32, 4544, 71, 1, 18176, 65024, 0, 1),
    "falcon 40b": (60, 8192, 128, 8, 32768, 65024, 0, 1),
    "gemma 2b": (18, 2048, 8, 1, 16384, 256000, 1, 1),
    "gemma 7b": (28, 3072, 16, 16, 24576, 256000, 1, 1),
    "gpt neox 20b": (44, 6144, 64, 64, 24576, 50432, 0, 0),
    "gpt2 xl": (48, 1600, 25, 25, 6400, 50257, 0, 1),
    "gpt3 175b": (96, 12288, 96, 96, 49152, 51200, 0, 1),
    "internlm 7b": (32, 4096, 32, 32, 11008, 103168, 1, 0),
    "internlm 20b": (60, 5120, 40, 40, 13824, 103168, 1, 0),
    "llama 7b": (32, 4096, 32, 32, 11008, 32000, 1, 0),
    "llama 13b": (40, 5120, 40, 40, 13824, 32000, 1, 0),
    "llama 65b": (80, 8192, 64, 64, 22016, 32000, 1, 0),
    "llama 2 7b": (32, 4096, 32, 32, 11008, 32000, 1, 0),
    "llama 2 13b": (40, 5120, 40, 40, 13824, 32000, 1, 0),
    "llama 2 70b": (80, 8192, 64, 8, 28672, 32000, 1, 0),
    "llama 3 8b": (32, 4096, 32, 8, 14336, 128256, 1, 0),
    "llama 3 70b": (80, 8192, 64, 8, 28672, 128256, 1, 0),
    "llama 3.1 8b": (32, 4096, 32, 8, 14336, 128256, 1, 0),
    "llama 3.1 70b": (80, 8192, 64, 8, 28672, 128256, 1, 0),
    "llama 3.1 405b": (126, 16384, 128, 8, 53248, 128256, 1, 0),
    "llama 3.2 1b": (16, 2048, 32, 8, 8192, 128256, 1, 1),
    "llama 3.2 3b": (28, 3072, 24, 8, 8192, 128256, 1, 1),
    "mistral 7b": (32, 4096, 32, 8, 14336, 32000, 1, 0),
    "mpt 7b": (32, 4096, 32, 32, 16384, 50432, 0, 1),
    "mpt 30b": (48, 7168, 64, 64, 28672, 50432, 0, 1),
    "opt 175b": (96, 12288, 96, 96, 49152, 50272, 0, 1),
    "phi 2": (32, 2560, 32, 32, 10240, 51200, 0, 0),
    "phi 3 mini": (32, 3072, 32, 32, 8192, 32064, 1, 0),
    "pythia 12b": (36, 5120, 40, 40, 20480, 50688, 0, 0),
    "qwen2 7b": (28, 3584, 28, 4, 18944, 152064, 1, 0),
    "qwen2.5 7b": (28, 3584, 28, 4, 18944, 152064, 1, 0),
    "qwen2.5 32b": (64, 5120, 40, 8, 27648, 152064, 1, 0),
    "qwen2.5 72b": (80, 8192, 64, 8, 29568, 152064, 1, 0),
    "qwen3 8b": (36, 4096, 32, 8, 12288, 151936, 1, 0),
    "stablelm base alpha 3b": (16, 4096, 32, 32, 16384, 50432, 0, 0),
    "tiny llama": (22, 2048, 32, 4, 5632, 32000, 1, 0),
    "tinyllama 1.1b": (22, 2048, 32, 4, 5632, 32000, 1, 0),
    "vicuna 7b": (32, 4096, 32, 32, 11008, 32000, 1, 0),
}  # fmt: skip


def dims_of(name: str) -> dict[str, int]:
    """Columns of the public model whose name stands in a text; {} where there is none."""
    spaced = name.lower().replace("llama1", "llama").replace("llama2", "llama 2").replace("llama3", "llama 3")
    found = longest(spaced, MODELS)
    return dict(zip(COLUMNS, found[1], strict=True)) if found else {}
