"""e4m3 matrices with scales per block: quantised, and back.

Suffixes: R rows, K the contracted axis, which lies contiguous because the matrix units want it so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 128
LARGEST = 448.0
"""The largest e4m3 value."""
SMALLEST_LARGEST = 2.0**-100
"""A block with smaller values only is scaled as if this were its largest, so that no scale is zero."""


@dataclass(frozen=True)
class Fp8Matrix:
    """`codes` e4m3 [R, K], K contiguous; value = code * scale of its block, float32 [ceil(R/block), ceil(K/block)].

    `block` is (rows, columns): (1, 128) for activations and gradients, (128, 128) for weights, the whole shape for
    one scale a tensor. Blocks at the edges are cut off.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def transposed(self) -> Fp8Matrix:
        """The transpose with the same codes, in memory of its own."""
        rows, columns = self.block
        return Fp8Matrix(self.codes.t().contiguous(), self.scales.t().contiguous(), (columns, rows))

    def values(self) -> torch.Tensor:
        """float32 [R, K]."""
        return self.codes.to(torch.float32) * _spread(self.scales, self.block, self.codes.shape)


def quantise(x_RK: torch.Tensor, block: tuple[int, int]) -> Fp8Matrix:
    """Round to e4m3 with one scale a block, which brings its largest value to 448.

    A block with a value that is not finite becomes NaN as a whole: a diverging step is seen and not saturated away.
    """
    x = x_RK.to(torch.float32)
    scales = _largest(x, block).clamp_min(SMALLEST_LARGEST) / LARGEST
    codes = (x / _spread(scales, block, x.shape)).to(torch.float8_e4m3fn)
    return Fp8Matrix(codes.contiguous(), scales, block)


def _largest(x_RK: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = block
    padded = F.pad(x_RK.abs(), (0, -x_RK.shape[1] % columns, 0, -x_RK.shape[0] % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns).amax((1, 3))


def _spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The scales at every value, [R, K], or a shape that broadcasts to it."""
    for axis in (0, 1):
        if scales.shape[axis] > 1:
            scales = scales.repeat_interleave(block[axis], axis).narrow(axis, 0, shape[axis])
    return scales
