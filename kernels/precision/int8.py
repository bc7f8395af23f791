"""A matrix product in int8: a scale per token for activations, one per matrix for weights, sums in int32."""

from __future__ import annotations

import torch

LARGEST = 127
_EXACT_FLOAT32_TERMS = (1 << 24) // (LARGEST * LARGEST)
"""So many products of two int8 codes add up to whole numbers that float32 holds, in any order."""

_CUDA_LEAST_ROWS = 17
"""`torch._int_mm` refuses fewer."""


def int8_forward(weight_NK: torch.Tensor, x_KM: torch.Tensor) -> torch.Tensor:
    """`weight @ x` in float32 [N, M] with both operands rounded to int8. Values that are not finite stay visible."""
    weight, weight_scale = quantise_int8(weight_NK)
    x, x_scale_1M = quantise_int8(x_KM, axis=0)
    return int8_mm(weight, x).to(torch.float32) * (weight_scale * x_scale_1M)


def quantise_int8(x: torch.Tensor, axis: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in -127 .. 127 and the scale that brings the largest value to 127: one, or one per slice along `axis`.

    A scale is NaN where a value is not finite.
    """
    x = x.to(torch.float32)
    largest = x.abs().amax() if axis is None else x.abs().amax(axis, keepdim=True)
    scale = torch.where(torch.isfinite(largest), largest.clamp_min(1e-30) / LARGEST, torch.nan)
    return (x / scale).nan_to_num(0.0).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale


def int8_mm(left_NK: torch.Tensor, right_KM: torch.Tensor) -> torch.Tensor:
    """The exact product of two int8 matrices, in whole numbers: int32, or a float type that holds them."""
    if left_NK.device.type == "cuda" and left_NK.shape[0] >= _CUDA_LEAST_ROWS:
        # the matrix units want the right side column-major
        return torch._int_mm(left_NK.contiguous(), right_KM.t().contiguous().t())
    exact = torch.float32 if left_NK.shape[1] <= _EXACT_FLOAT32_TERMS else torch.float64
    return torch.mm(left_NK.to(exact), right_KM.to(exact))
