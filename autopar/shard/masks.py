"""Random masks that are a function of seed and place: every layout of a tensor draws the same ones.

Each dim's global position is mixed into a 64-bit state (finaliser of splitmix64, Steele et al., OOPSLA 2014), the last
dim with 32-bit arithmetic (finaliser of MurmurHash3), as that is done for every element.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

from autopar.shard.localize import CallInfo

CHUNK_ELEMENTS = 1 << 20
"""How many elements are drawn at a time: bounds the transient memory."""
_WORD = 1 << 32


def keep_mask(info: CallInfo, draw: Tensor, p: float) -> Tensor:
    """This rank's shard of the mask over the first operand of a call: true with probability 1 - `p`.

    `draw` (1 + samples,) int64: a seed, then the number in the global batch of each sample that the operand holds.
    """
    places = [_places(info, dim, draw) for dim in range(len(info.shape))] or [draw.new_zeros(1)]
    state = _mix(draw[:1] + (crc32(info.salt.encode()) - _WORD // 2) * _WORD)
    for position in places[:-1]:
        state = _mix(state.unsqueeze(1) + position * 0x1000193).flatten()
    columns = _int32(places[-1] * 0x9E3779B1)
    keep = torch.empty((len(state), len(columns)), dtype=torch.bool, device=draw.device)
    step = max(1, CHUNK_ELEMENTS // max(1, len(columns)))
    for first in range(0, len(state), step):
        rows = slice(first, first + step)
        torch.ge(_scramble(state[rows], columns), round((p - 0.5) * _WORD), out=keep[rows])
    return keep.view([len(position) for position in places] if info.shape else [])


def _places(info: CallInfo, dim: int, draw: Tensor) -> Tensor:
    """Positions along `dim` of the elements this rank holds; along the batch dim those of the global batch."""
    share = info.dims[dim]
    position = torch.arange(share.first, share.first + share.length, device=draw.device)
    if dim != info.batch_dim:
        return position
    per_sample = info.shape[dim] // info.samples
    return draw[1 + position // per_sample] * per_sample + position % per_sample


def _mix(state: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64, shifts being arithmetic."""
    state = (state ^ (state >> 30)) * -0x40A7B892E31B1A47
    state = (state ^ (state >> 27)) * -0x6B2FB644ECCEEE15
    return state ^ (state >> 31)


def _scramble(rows: Tensor, columns: Tensor) -> Tensor:
    """A 32-bit number for each row state and column, compared by its high bits."""
    x = _int32(rows).unsqueeze(1) ^ columns
    x.bitwise_xor_(x >> 16).mul_(-0x7A143595)
    x.bitwise_xor_(_int32(rows >> 32).unsqueeze(1))
    return x.bitwise_xor_(x >> 15).mul_(-0x3D4D51CB)


def _int32(x: Tensor) -> Tensor:
    """The low 32 bits, as a signed number."""
    return x.to(torch.int32)
