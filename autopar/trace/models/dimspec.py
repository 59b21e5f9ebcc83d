"""Reading `gpt:layers=12,hidden=768,...` and `llama:...`: every mistake is found before any is reported. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.dims import Dims
from autopar.errors import ConfigError

REQUIRED = ("layers", "hidden", "heads", "vocab")
OPTIONAL = ("ffn", "kv_heads", "head_dim", "tied", "gated", "experts", "topk", "moe_ffn", "seq")
EXPERT_KEYS = ("experts", "topk", "moe_ffn")
FAMILIES = {
    "gpt": {"tied": True, "gated": False, "bias": True, "positions": True},
    "llama": {"tied": False, "gated": True, "bias": False, "positions": False},
}
DEFAULT_SEQ = 2048


def parse_dims(spec: str, seq_len: int | None = None, *, experts: bool = False) -> Dims:
    """Dimensions from a specification, with those of `experts` where they are allowed; `seq_len` wins over its `seq`.

    Raises ConfigError with every unknown key, value that is no positive whole number, missing key and misfit.
    """
    family, _, text = spec.partition(":")
    mistakes: list[str] = []
    given = _numbers(spec, text, mistakes)
    if family not in FAMILIES:
        mistakes.append(f"{spec}: family {family!r} is unknown; one of {', '.join(FAMILIES)}")
    missing = [k for k in REQUIRED if k not in given]
    if missing:
        mistakes.append(f"{spec}: {', '.join(missing)} missing; give {', '.join(f'{k}=N' for k in missing)}")
    mixed = () if experts else [k for k in EXPERT_KEYS if k in given]
    mistakes += [f"{spec}: {k}= is predicted only (`estimate` with a framework); leave it out" for k in mixed]
    if experts and "experts" not in given:
        mistakes += [f"{spec}: {k}= needs experts=; give it, or leave {k} out" for k in EXPERT_KEYS if k in given]
    if seq_len is not None and seq_len < 1:
        mistakes.append(f"sequence length {seq_len}: must be at least 1")
    if missing or family not in FAMILIES:
        raise ConfigError(*mistakes)
    found = _filled(family, given, seq_len)
    mistakes += [f"{spec}: {m}" for m in _misfits(found, given)]
    if mistakes:
        raise ConfigError(*mistakes)
    return found


def _numbers(spec: str, text: str, mistakes: list[str]) -> dict[str, int]:
    """Keys and whole numbers of `text`; what can't be read goes to `mistakes`."""
    given: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        key, _, value = (p.strip() for p in part.partition("="))
        lowest = 0 if key in ("tied", "gated") else 1
        if key not in (*REQUIRED, *OPTIONAL):
            mistakes.append(f"{spec}: unknown key {key!r}; allowed: {', '.join((*REQUIRED, *OPTIONAL))}")
        elif not value.isdigit() or int(value) < lowest or (not lowest and int(value) > 1):
            allowed = "a whole number from 1 up" if lowest else "0 or 1"
            mistakes.append(f"{spec}: {key}={value!r} must be {allowed}")
            given[key] = 1
        elif key in given:
            mistakes.append(f"{spec}: {key} is given twice; keep one")
        else:
            given[key] = int(value)
    return given


def _filled(family: str, given: Mapping[str, int], seq_len: int | None) -> Dims:
    hidden, heads, experts = given["hidden"], given["heads"], given.get("experts", 0)
    flags = FAMILIES[family] | {k: bool(given[k]) for k in ("tied", "gated") if k in given}
    ffn = given.get("ffn", 4 * hidden if family == "gpt" else -(-(8 * hidden) // (3 * 256)) * 256)
    ffn = given.get("moe_ffn", ffn) if experts else ffn
    several = experts > 1  # a single one is a plain feed-forward
    return Dims(
        layers=given["layers"], hidden=hidden, heads=heads, kv_heads=given.get("kv_heads", heads),
        head_dim=given.get("head_dim", max(hidden // heads, 1)), ffn=ffn, vocab=given["vocab"],
        seq=seq_len or given.get("seq", DEFAULT_SEQ), **flags,
        experts=experts if several else 0, topk=given.get("topk", 2) if several else 0,
    )  # fmt: skip


def _misfits(found: Dims, given: Mapping[str, int]) -> list[str]:
    misfits = []
    if found.hidden % found.heads and "head_dim" not in given:
        misfits.append(f"hidden={found.hidden} is no multiple of heads={found.heads}; change one, or give head_dim=")
    if found.heads % found.kv_heads:
        misfits.append(f"heads={found.heads} is no multiple of kv_heads={found.kv_heads}; change one")
    if "topk" in given and given["topk"] > given.get("experts", given["topk"]):
        misfits.append(f"topk={given['topk']} is above experts={given['experts']}; give at most that")
    if not found.positions and found.head_dim % 2:
        misfits.append(f"head_dim={found.head_dim} is odd; rotary positions need an even one")
    return misfits
