"""Weights stored in bfloat16 that still take updates smaller than their last bit.

Two ways. With a residual: the weight is the nearest bfloat16 value and an int16 beside it holds what is missing, four
bytes together, and no bit of the float32 is lost. Without: the float32 result of a step is rounded up or down by
chance, so that the mean is right. Chance is a hash of a seed and of the value's place: the same on every device,
however the weights are cut into parts.
"""

from __future__ import annotations

import torch

_LOW = 0xFFFF


def split_float32(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest bfloat16 values (halves away from zero) and int16 residuals of finite float32 below 3.38e38."""
    bits = x.view(torch.int32)
    high = (bits + 0x8000) & ~_LOW
    return high.view(torch.float32).to(torch.bfloat16), (bits - high).to(torch.int16)


def join_float32(high: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The float32 values that were split."""
    return (high.to(torch.float32).view(torch.int32) + residual).view(torch.float32)


def round_stochastically(x: torch.Tensor, seed: int, first: int = 0) -> torch.Tensor:
    """float32 to bfloat16, up or down with the probability that makes the mean right.

    The first value is number `first` of its vector; `seed` should differ between steps. Infinities and NaN stay.
    """
    bits = x.contiguous().view(torch.int32)
    noise = _hash(torch.arange(first, first + x.numel(), device=x.device), seed) & _LOW
    rounded = ((bits + noise.view(x.shape)) & ~_LOW).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _hash(index: torch.Tensor, seed: int) -> torch.Tensor:
    """32 well mixed bits of every int64 index as int32: lowbias32 (Wellons, hash-prospector) over place and seed."""
    key = (seed * 0x9E3779B97F4A7C15 >> 16) & 0xFFFFFFFF
    x = _int32((index ^ (index >> 32) * 0x9E3779B1 ^ key) & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ _shifted(x, shift)) * (factor - (factor >> 31 << 32))
    return x ^ _shifted(x, 16)


def _int32(unsigned: torch.Tensor) -> torch.Tensor:
    return (unsigned - (unsigned >> 31 << 32)).to(torch.int32)


def _shifted(x: torch.Tensor, places: int) -> torch.Tensor:
    """Logical shift to the right of int32."""
    return (x >> places) & ((1 << (32 - places)) - 1)
