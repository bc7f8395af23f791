"""Who quantises to e4m3 and multiplies: emulation in float32, torch's `_scaled_mm`, or Triton kernels."""

from __future__ import annotations

from typing import Protocol

import torch

from tscale.kernels.precision.fp8 import BLOCK, Fp8Matrix, quantise
from tscale.kernels.precision.shapes import UNIT


class Fp8Backend(Protocol):
    """The three operations of a linear layer in e4m3. Suffixes: A, B, C sizes, the last one contiguous."""

    def both_ways(self, x_AB: torch.Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
        """Activations or gradients, quantised for a product over B ([A, B]) and for one over A ([B, A])."""

    def weight(self, weight_NK: torch.Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
        """A weight matrix [N, K] and its transpose [K, N], with the same values."""

    def multiply(self, left_AC: Fp8Matrix, right_BC: Fp8Matrix) -> torch.Tensor:
        """`left @ right.T`, float32 [A, B]."""


class BlockEmulation:
    """Blocks of 1x128 and 128x128, multiplied as float32. The sums are more exact than a tensor core's."""

    def both_ways(self, x_AB: torch.Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
        return quantise(x_AB, (1, BLOCK)), quantise(x_AB.t(), (1, BLOCK))

    def weight(self, weight_NK: torch.Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
        matrix = quantise(weight_NK, (BLOCK, BLOCK))
        return matrix, matrix.transposed()

    def multiply(self, left_AC: Fp8Matrix, right_BC: Fp8Matrix) -> torch.Tensor:
        return torch.mm(left_AC.values(), right_BC.values().t())


class TensorEmulation:
    """One scale a tensor, multiplied as float32."""

    def both_ways(self, x_AB: torch.Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
        matrix = quantise(x_AB, (x_AB.shape[0], x_AB.shape[1]))
        return matrix, matrix.transposed()

    def weight(self, weight_NK: torch.Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
        return self.both_ways(weight_NK)

    def multiply(self, left_AC: Fp8Matrix, right_BC: Fp8Matrix) -> torch.Tensor:
        return torch.mm(left_AC.values(), right_BC.values().t())


class ScaledMM(TensorEmulation):
    """One scale a tensor, multiplied by torch's `_scaled_mm`."""

    def multiply(self, left_AC: Fp8Matrix, right_BC: Fp8Matrix) -> torch.Tensor:
        """Raises ValueError for what CUDA would refuse, also on a CPU, which is laxer."""
        require_cuda_rules(left_AC.codes, right_BC.codes)
        return torch._scaled_mm(
            left_AC.codes,
            right_BC.codes.t(),
            scale_a=left_AC.scales.view(()),
            scale_b=right_BC.scales.view(()),
            out_dtype=torch.float32,
            use_fast_accum=False,
        )


def require_cuda_rules(left_AC: torch.Tensor, right_BC: torch.Tensor) -> None:
    """CUDA's rules for `_scaled_mm(left, right.t())`: C and B multiples of 16, both sides contiguous over C.

    Raises ValueError.
    """
    if left_AC.shape[1] % UNIT or right_BC.shape[0] % UNIT:
        raise ValueError(f"_scaled_mm needs multiples of {UNIT}, not {tuple(left_AC.shape)} x {tuple(right_BC.shape)}")
    if not left_AC.is_contiguous() or not right_BC.is_contiguous():
        raise ValueError("_scaled_mm needs its left side row-major and its right side column-major")
