"""Matrix products with their derivatives in short formats. N rows and K columns of a weight, M positions."""

from __future__ import annotations

from typing import Any

import torch

from tscale.kernels.block import Product
from tscale.kernels.precision.backends import Fp8Backend
from tscale.kernels.precision.fp8 import BLOCK, Fp8Matrix, quantise
from tscale.kernels.precision.half import half_mm, half_product
from tscale.kernels.precision.int8 import int8_forward
from tscale.kernels.precision.shapes import fits

Grads = tuple[torch.Tensor | None, torch.Tensor | None, None]


class _Fp8Linear(torch.autograd.Function):
    """`y = W x`, `dx = W^T dy`, `dW = dy x^T`, all in e4m3. What is kept for the way back is in e4m3 too."""

    @staticmethod
    def forward(ctx: Any, weight_NK: torch.Tensor, x_KM: torch.Tensor, backend: Fp8Backend) -> torch.Tensor:
        weight, weight_t = backend.weight(weight_NK)
        x_over_m, x_over_k = backend.both_ways(x_KM)
        ctx.backend, ctx.dtypes = backend, (weight_NK.dtype, x_KM.dtype)
        ctx.blocks = (weight_t.block, x_over_m.block)
        ctx.save_for_backward(weight_t.codes, weight_t.scales, x_over_m.codes, x_over_m.scales)
        return backend.multiply(weight, x_over_k).to(x_KM.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NM: torch.Tensor) -> Grads:
        backend, saved = ctx.backend, ctx.saved_tensors
        grad_over_m, grad_over_n = backend.both_ways(grad_NM)
        weight_grad = x_grad = None
        if ctx.needs_input_grad[0]:
            x_over_m = Fp8Matrix(saved[2], saved[3], ctx.blocks[1])
            weight_grad = backend.multiply(grad_over_m, x_over_m).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            weight_t = Fp8Matrix(saved[0], saved[1], ctx.blocks[0])
            x_grad = backend.multiply(weight_t, grad_over_n).to(ctx.dtypes[1])
        return weight_grad, x_grad, None


class _Int8Linear(torch.autograd.Function):
    """`y = W x` in int8; the derivatives in bf16, of the weights and activations as they were before rounding."""

    @staticmethod
    def forward(ctx: Any, weight_NK: torch.Tensor, x_KM: torch.Tensor) -> torch.Tensor:
        ctx.dtypes = (weight_NK.dtype, x_KM.dtype)
        ctx.save_for_backward(weight_NK.to(torch.bfloat16), x_KM.to(torch.bfloat16))
        return int8_forward(weight_NK, x_KM).to(x_KM.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NM: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        weight, x = ctx.saved_tensors
        grad = grad_NM.to(torch.bfloat16)
        weight_grad = half_mm(grad, x.t()).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        x_grad = half_mm(weight.t(), grad).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return weight_grad, x_grad


class _Straight(torch.autograd.Function):
    """A weight rounded to e4m3 as it is stored; its gradient goes to the weight before rounding."""

    @staticmethod
    def forward(ctx: Any, weight_NK: torch.Tensor) -> torch.Tensor:
        return quantise(weight_NK, (BLOCK, BLOCK)).values().to(weight_NK.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NK: torch.Tensor) -> torch.Tensor:
        return grad_NK


def fp8_product(backend: Fp8Backend) -> Product:
    """All three products in e4m3 by `backend`, in bf16 where the shapes do not fit."""
    bf16 = half_product(torch.bfloat16)

    def product(weight_NK: torch.Tensor, x_KM: torch.Tensor) -> torch.Tensor:
        if not fits(weight_NK.shape, x_KM.shape):
            return bf16(weight_NK, x_KM)
        return _Fp8Linear.apply(weight_NK, x_KM, backend)

    return product


def int8_product() -> Product:
    """Forward in int8, both derivatives in bf16; all in bf16 where the shapes do not fit."""
    bf16 = half_product(torch.bfloat16)

    def product(weight_NK: torch.Tensor, x_KM: torch.Tensor) -> torch.Tensor:
        if not fits(weight_NK.shape, x_KM.shape):
            return bf16(weight_NK, x_KM)
        return _Int8Linear.apply(weight_NK, x_KM)

    return product


def fp8_storage_product() -> Product:
    """Weights as they are when stored in e4m3 with 128x128 scales; all three products in bf16."""
    bf16 = half_product(torch.bfloat16)

    def product(weight_NK: torch.Tensor, x_KM: torch.Tensor) -> torch.Tensor:
        return bf16(_Straight.apply(weight_NK), x_KM)

    return product
