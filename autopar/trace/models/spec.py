"""A model from its specification: dims, a shipped name, a transformers configuration or a function in a file."""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, ConfigError, reason_of
from autopar.trace.inputs import ExampleInputs
from autopar.trace.models.decoder import Decoder
from autopar.trace.models.dimspec import FAMILIES, parse_dims
from autopar.trace.models.shipped import SHIPPED
from autopar.trace.models.spec_text import function_mistakes, unknown_model

BATCH = 2
"""Batch of the example inputs made here; traces do not depend on it."""


@dataclass(frozen=True)
class LoadedModel:
    """A model on the meta device and example inputs for it, under the name it was asked for."""

    name: str
    model: nn.Module = field(compare=False)
    inputs: ExampleInputs = field(compare=False)


def load_model(spec: str, *, seq_len: int | None = None) -> LoadedModel:
    """Build what `spec` names; nothing is allocated and no weights are read.

    `spec`: `gpt:` or `llama:` with dims, a shipped name, `hf:DIR_OR_CONFIG.json`, or `FILE.py:function` (a function
    that returns a model and its example inputs). `seq_len`: tokens a sample, over what the specification says.
    Raises ConfigError with every mistake in the specification.
    """
    family, _, rest = spec.partition(":")
    if spec in SHIPPED:
        return LoadedModel(spec, *_from_dims(SHIPPED[spec], seq_len))
    if family in FAMILIES:
        return LoadedModel(spec, *_from_dims(spec, seq_len))
    if family == "hf":
        return LoadedModel(spec, *_from_transformers(rest, seq_len))
    if ".py" in spec:
        return LoadedModel(spec, *_from_function(spec, seq_len))
    raise ConfigError(unknown_model(spec))


def _from_dims(spec: str, seq_len: int | None) -> tuple[nn.Module, ExampleInputs]:
    dims = parse_dims(spec, seq_len)
    with torch.device("meta"):
        model = Decoder(dims)
    return model, {"input_ids": _tokens(dims.seq), "labels": _tokens(dims.seq)}


def _tokens(*shape: int) -> Tensor:
    return torch.zeros(BATCH, *shape, dtype=torch.int64, device="meta")


# --- a function in a file ------------------------------------------------------------------------------------------


def _from_function(spec: str, seq_len: int | None) -> tuple[nn.Module, ExampleInputs]:
    mistakes = function_mistakes(spec, seq_len)
    if mistakes:
        raise ConfigError(*mistakes)
    path, _, name = spec.rpartition(":")
    function = _function(Path(path), name)
    try:
        with torch.device("meta"):
            made = function()
    except AutoparError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{spec}: failed with {type(error).__name__}: {error}. It is called without arguments."
        ) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ConfigError(f"{spec}: returned {type(made).__name__}; return (module, example inputs)")
    return made


_neighbours: set[str] = set()
"""Names of modules that model files have imported from their folders."""


def _as_a_script(folder: Path) -> None:
    """Let files of the folder be imported, and forget those of the same names that other model files imported."""
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    for name in [n for n in _neighbours if not _lies_in(folder, n)]:
        sys.modules.pop(name, None)
        _neighbours.discard(name)


def _lies_in(folder: Path, name: str) -> bool:
    """Whether a module is a file of the folder, installed packages and this one apart."""
    file = getattr(sys.modules.get(name), "__file__", None)
    foreign = name.partition(".")[0] == "autopar" or "site-packages" in str(file)
    return file is not None and not foreign and folder in Path(file).resolve().parents


def _function(path: Path, name: str) -> Any:
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{path}: is no Python file; give FILE.py:function")
    module = importlib.util.module_from_spec(module_spec)
    _as_a_script(path.resolve().parent)
    before = {*sys.modules}
    if path.stem not in before:
        sys.modules[path.stem] = module  # dataclasses look their module up there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path}: can't be imported ({type(error).__name__}: {error})") from error
    finally:
        _neighbours.update(name for name in {*sys.modules} - before if _lies_in(path.resolve().parent, name))
    found = getattr(module, name, None)
    if not callable(found):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(f"{path}: has no function {name!r}; it has {', '.join(functions) or 'none'}")
    return found


# --- transformers --------------------------------------------------------------------------------------------------


def _from_transformers(where: str, seq_len: int | None) -> tuple[nn.Module, ExampleInputs]:
    config = _config(Path(where))
    import transformers

    named = (getattr(config, "architectures", None) or [None])[0]
    head = getattr(transformers, named or "", None)
    if head is None:
        raise ConfigError(
            f"hf:{where}: architectures[0] is {named!r}, which transformers does not have; name a model class"
        )
    try:
        with torch.device("meta"):
            model = head(config)
    except Exception as error:
        raise ConfigError(f"hf:{where}: {named} can't be built ({type(error).__name__}: {error})") from error
    model.train()
    return model, _inputs_for(model, config, named, seq_len)


def _config(where: Path) -> Any:
    file = where / "config.json" if where.is_dir() else where
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"hf:{where}: no such file ({file}); give a configuration file or the folder that has config.json"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"hf:{where}: can't be read as JSON ({reason_of(error)})") from None
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        raise ConfigError(f"hf:{where}: needs transformers; pip install 'autopar[hf]'") from None
    kind = str(data.get("model_type")) if isinstance(data, dict) else "None"
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()), 3)
        raise ConfigError(
            f"hf:{where}: model_type is {kind!r}, which transformers does not know; near: {', '.join(near) or 'none'}"
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(data)
    except Exception as error:
        raise ConfigError(f"hf:{where}: not a valid {kind} configuration ({type(error).__name__}: {error})") from error


def _inputs_for(model: nn.Module, config: Any, head: str, seq_len: int | None) -> dict[str, Tensor]:
    """Inputs by the model's main input: tokens, or an image; labels by the head."""
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        pixels = torch.zeros(BATCH, config.num_channels, side, side, device="meta")
        return {"pixel_values": pixels} | ({"labels": _tokens()} if "Classification" in head else {})
    if main != "input_ids":
        raise ConfigError(
            f"hf:{head}: takes {main!r}; only tokens and images can be made here. Use FILE.py:function instead."
        )
    longest = getattr(config, "max_position_embeddings", None) or 2048
    if seq_len is not None and seq_len > longest:
        raise ConfigError(f"sequence length {seq_len} is over the {longest} positions of {head}; give a smaller one")
    seq = seq_len or min(longest, 2048)
    return {"input_ids": _tokens(seq)} | _labels(head, seq)


def _labels(head: str, seq: int) -> dict[str, Tensor]:
    if head.endswith(
        ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
    ):
        return {"labels": _tokens(seq)}
    if head.endswith(("ForSequenceClassification", "ForMultipleChoice")):
        return {"labels": _tokens()}
    if head.endswith("ForQuestionAnswering"):
        return {"start_positions": _tokens(), "end_positions": _tokens()}
    return {}
