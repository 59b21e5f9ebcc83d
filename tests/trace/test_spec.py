"""Model specifications."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.errors import ConfigError
from autopar.trace import load_model, trace
from autopar.trace.models.shipped import SHIPPED

PTDP = [  # Narayanan et al. 2021, table 1: billions of parameters, heads, hidden, layers (vocabulary 51200)
    (1.7, 24, 2304, 24), (3.6, 32, 3072, 30), (7.5, 32, 4096, 36), (18.4, 48, 6144, 40), (39.1, 64, 8192, 48),
    (76.1, 80, 10240, 60), (145.6, 96, 12288, 80), (310.1, 128, 16384, 96), (529.6, 128, 20480, 105),
    (1008.0, 160, 25600, 128),
]  # fmt: skip


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers"), PTDP)
def test_published_parameter_counts(billions: float, heads: int, hidden: int, layers: int) -> None:
    """The gpt family has the published numbers of parameters to the digits printed."""
    model = load_model(f"gpt:layers={layers},hidden={hidden},heads={heads},vocab=51200,seq=2048").model
    assert round(_parameters(model) / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2", 124.4), ("gpt2-xl", 1557.6), ("llama-7b", 6738.4), ("llama2-70b", 68976.6), ("llama3-8b", 8030.3)],
)
def test_shipped_models_have_their_size(name: str, millions: float) -> None:
    """Shipped names have the parameters of the models they are named after, on meta."""
    loaded = load_model(name)
    assert loaded.name == name
    assert round(_parameters(loaded.model) / 1e6, 1) == millions
    assert all(p.is_meta for p in loaded.model.parameters())


def test_every_shipped_model_loads() -> None:
    """The table holds a dozen names, and each can be built."""
    assert len(SHIPPED) >= 12
    for name in SHIPPED:
        assert load_model(name, seq_len=16).inputs["input_ids"].shape == (2, 16)  # type: ignore[index, call-overload]


def test_all_mistakes_at_once() -> None:
    """Unknown keys, bad values and missing keys are all named, with what is allowed."""
    with pytest.raises(ConfigError) as caught:
        load_model("llama:layers=-1,hidden=64,colour=red,tied=2,vocab=100")
    text = str(caught.value)
    for said in ("'colour'", "kv_heads", "layers='-1'", "tied='2'", "0 or 1", "heads missing"):
        assert said in text
    assert len(caught.value.mistakes) == 4


def test_misfits_and_unsupported() -> None:
    """Dims that don't fit together, and expert layers, are refused with the values."""
    with pytest.raises(ConfigError, match=r"hidden=65.*heads=4"):
        load_model("gpt:layers=1,hidden=65,heads=4,vocab=10")
    with pytest.raises(ConfigError, match=r"heads=4.*kv_heads=3"):
        load_model("llama:layers=1,hidden=64,heads=4,kv_heads=3,vocab=10")
    with pytest.raises(ConfigError, match="experts= is predicted only"):
        load_model("llama:layers=1,hidden=64,heads=4,vocab=10,experts=8")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gpt9", "gpt2"),
        ("hf:nowhere/config.json", "nowhere/config.json"),
        ("none.py:make", "none.py"),
        ("none.py", "FILE.py:f"),
    ],
)
def test_absent_things_are_named(spec: str, said: str) -> None:
    """An unknown name shows near ones; an absent file is named."""
    with pytest.raises(ConfigError, match=said):
        load_model(spec)


def test_function_in_a_file(tmp_path: Path) -> None:
    """A function's model comes on meta without its code knowing; a function that fails or is missing is named."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def make():\n    return torch.nn.Linear(3, 2), (torch.zeros(4, 3),)\n"
        "def broken():\n    raise ValueError('no data')\n"
    )
    loaded = load_model(f"{file}:make")
    assert next(loaded.model.parameters()).is_meta
    assert trace(loaded.model, loaded.inputs).layers
    with pytest.raises(ConfigError, match="no data"):
        load_model(f"{file}:broken")
    with pytest.raises(ConfigError, match="make, broken"):
        load_model(f"{file}:other")


def test_transformers_configuration(tmp_path: Path) -> None:
    """A configuration file gives its head with labels; wrong kinds and heads are named."""
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    data = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": 50,
    }
    file.write_text(json.dumps(data | {"n_positions": 24, "bos_token_id": 0, "eos_token_id": 0}))
    loaded = load_model(f"hf:{tmp_path}", seq_len=12)
    assert isinstance(loaded.inputs, dict)
    assert loaded.inputs["labels"].shape == (2, 12)
    assert trace(loaded.model, loaded.inputs).loss is not None
    with pytest.raises(ConfigError, match="24 positions"):
        load_model(f"hf:{file}", seq_len=48)
    file.write_text(json.dumps(data | {"model_type": "gpt22"}))
    with pytest.raises(ConfigError, match="gpt22"):
        load_model(f"hf:{file}")
    file.write_text(json.dumps(data | {"architectures": ["Nothing"]}))
    with pytest.raises(ConfigError, match="Nothing"):
        load_model(f"hf:{file}")


def test_decoder_learns() -> None:
    """The dims models train for real: the loss starts at the logarithm of the vocabulary and falls."""
    from autopar.trace.models.decoder import Decoder
    from autopar.trace.models.dimspec import parse_dims

    torch.manual_seed(0)
    model = Decoder(parse_dims("llama:layers=2,hidden=32,heads=4,kv_heads=2,vocab=20,seq=12,tied=1"))
    tokens = torch.randint(0, 20, (4, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(tokens, tokens)["loss"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert abs(losses[0] - torch.tensor(20.0).log().item()) < 0.3
    assert losses[-1] < losses[0] / 2


def test_neighbours_of_the_same_name(tmp_path: Path) -> None:
    """Two model files that import a `parts.py` beside them get their own, in whichever order they are loaded."""
    for folder, width in (("a", 3), ("b", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "parts.py").write_text(f"WIDTH = {width}\n")
        (tmp_path / folder / "model.py").write_text(
            "import torch\nfrom torch import nn\nfrom parts import WIDTH\n"
            "def make():\n    return nn.Linear(WIDTH, 1), {'input': torch.zeros(2, WIDTH)}\n"
        )
    found = [load_model(f"{tmp_path / folder / 'model.py'}:make").model.in_features for folder in "aba"]
    assert found == [3, 5, 3]
