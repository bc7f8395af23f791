"""Matrix products in bf16 and fp16 with float32 sums. N rows and K columns of a weight, M positions."""

from __future__ import annotations

from typing import Any

import torch

from tscale.kernels.block import Product

_FP16_LARGEST_EXPONENT = 12
"""fp16 operands are scaled to at most 2**12: products of two sum up in float32, and 2**-26 of the largest survives."""


def half_mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` of two bf16 or fp16 matrices in float32.

    On a CPU the operands are widened, which is the same arithmetic; elsewhere than on CUDA the sum is rounded to the
    operands' format on its way out.
    """
    if left.device.type == "cpu":
        return torch.mm(left.to(torch.float32), right.to(torch.float32))
    if left.device.type == "cuda" and torch.version.hip is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).to(torch.float32)


class _HalfLinear(torch.autograd.Function):
    """`y = W x`, `dx = W^T dy`, `dW = dy x^T` of operands rounded to one format."""

    @staticmethod
    def forward(ctx: Any, weight_NK: torch.Tensor, x_KM: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight, weight_scale = _rounded(weight_NK, dtype)
        x, x_scale = _rounded(x_KM, dtype)
        ctx.scales, ctx.half, ctx.dtypes = (weight_scale, x_scale), dtype, (weight_NK.dtype, x_KM.dtype)
        ctx.save_for_backward(weight, x)
        return _unscaled(half_mm(weight, x), weight_scale, x_scale).to(x_KM.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NM: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        weight, x = ctx.saved_tensors
        weight_scale, x_scale = ctx.scales
        grad, grad_scale = _rounded(grad_NM, ctx.half)
        weight_grad = x_grad = None
        if ctx.needs_input_grad[0]:
            weight_grad = _unscaled(half_mm(grad, x.t()), grad_scale, x_scale).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            x_grad = _unscaled(half_mm(weight.t(), grad), weight_scale, grad_scale).to(ctx.dtypes[1])
        return weight_grad, x_grad, None


def half_product(dtype: torch.dtype) -> Product:
    """All three products with operands in bf16 or fp16. fp16 scales each tensor by a power of two."""

    def product(weight_NK: torch.Tensor, x_KM: torch.Tensor) -> torch.Tensor:
        return _HalfLinear.apply(weight_NK, x_KM, dtype)

    return product


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`x` in a half format, divided by the scale that comes with it (None: 1)."""
    if dtype == torch.bfloat16:
        return x.to(dtype), None
    largest = x.abs().amax().to(torch.float32).clamp_min(1e-30)
    _, exponent = torch.frexp(largest)
    scale = torch.ldexp(torch.ones_like(largest), exponent - _FP16_LARGEST_EXPONENT)
    # a NaN stays one; an infinity must not shrink to a number
    scale = torch.where(torch.isfinite(largest), scale, torch.nan)
    return (x / scale).to(dtype), scale


def _unscaled(y: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor:
    return y if left is None or right is None else y.mul_(left * right)
