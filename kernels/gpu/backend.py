"""The Triton back end of the fp8 linear layer."""

from __future__ import annotations

import torch

from tscale.kernels.gpu.fp8 import Coded, block_product, quantize_dual, quantize_weight
from tscale.kernels.precision.fp8 import BLOCK, Fp8Matrix


class TritonBackend:
    """Blocks of 1x128 and 128x128, quantised and multiplied by this package's kernels; the same codes and scales as the
    emulation's. Sides are multiples of 16. Raises ImportError at the first call where Triton is missing.
    """

    def both_ways(self, x_AB: torch.Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
        """float32 or bfloat16 [A, B] -> for a product over B ([A, B]) and for one over A ([B, A])."""
        rows, columns = quantize_dual(x_AB.contiguous())
        return _matrix(rows, 1), _matrix(columns, 1)

    def weight(self, weight_NK: torch.Tensor) -> tuple[Fp8Matrix, Fp8Matrix]:
        """float32 or bfloat16 [N, K] -> the matrix and its transpose [K, N]."""
        rows, columns = quantize_weight(weight_NK.contiguous())
        return _matrix(rows, BLOCK), _matrix(columns, BLOCK)

    def multiply(self, left_AC: Fp8Matrix, right_BC: Fp8Matrix) -> torch.Tensor:
        """`left @ right.T`, float32 [A, B]."""
        return block_product(left_AC.codes, left_AC.scales, right_BC.codes, right_BC.scales)


def _matrix(coded: Coded, block_rows: int) -> Fp8Matrix:
    return Fp8Matrix(coded.codes.view(torch.float8_e4m3fn), coded.scales, (block_rows, BLOCK))
