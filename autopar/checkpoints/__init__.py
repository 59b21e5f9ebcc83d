"""Checkpoints of training runs: saved under one plan, loaded under any other or into the plain model."""

from autopar.checkpoints.folder import Checkpoints
from autopar.checkpoints.weights import load_safetensors

__all__ = ["Checkpoints", "load_safetensors"]
