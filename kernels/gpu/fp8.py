"""What the rest of tscale calls: e4m3 codes, block quantization, the fp8 product. Shapes are checked here.

Shapes below: N rows, M columns, K the summed dimension, P and Q the product's sides. All are multiples of 16, so that
rows start at multiples of 16 bytes, which the fp8 units' loads need; `_scaled_mm` has the same rule.
"""

from typing import NamedTuple

import torch

from tscale.kernels.gpu.builds import (
    BLOCK,
    ELEMENTS,
    decode_build,
    dequantize_build,
    encode_build,
    product_build,
    quantize_build,
)

ALIGNMENT = 16
LARGEST_NUMEL = 2**31 - 1  # rows and columns are int32 in the kernels


class ShapeError(ValueError):
    """Operands that the kernels don't take: shape, dtype or layout."""


class Coded(NamedTuple):
    """A matrix in e4m3: codes uint8 [R, K], scales float32 [R or ceil(R / 128), ceil(K / 128)]."""

    codes: torch.Tensor
    scales: torch.Tensor


class DualCoded(NamedTuple):
    """One matrix [N, M] in e4m3 twice: `rows` [N, M] has its blocks along M, `columns` [M, N], transposed, along N."""

    rows: Coded
    columns: Coded


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float32, any shape -> uint8 codes of the same shape; the bits of `values.to(torch.float8_e4m3fn)`.

    Nearest, ties to even; saturates at 448, infinity too; NaN stays NaN.
    """
    if values.dtype != torch.float32 or not values.is_contiguous():
        raise ShapeError("values must be contiguous float32")
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    if values.numel():
        encode_build().launch((_blocks(values.numel(), ELEMENTS),), values, codes, values.numel())
    return codes


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Codes (uint8 or float8_e4m3fn), any shape -> their exact float32 values."""
    codes = _as_codes(codes)
    values = torch.empty(codes.shape, dtype=torch.int32, device=codes.device)
    if codes.numel():
        decode_build().launch((_blocks(codes.numel(), ELEMENTS),), codes, values, codes.numel())
    return values.view(torch.float32)


def quantize_dual(values: torch.Tensor) -> DualCoded:
    """float32 or bfloat16 [N, M] -> codes in 1 x 128 blocks along either axis, read once.

    rows: [N, M], scales [N, ceil(M / 128)]. columns: [M, N], scales [M, ceil(N / 128)]. A block's scale is its largest
    magnitude / 448 (at least 2^-100 / 448). A block with a value that isn't finite becomes NaN as a whole.
    """
    return _quantize(values, square=False)


def quantize_weight(weight: torch.Tensor) -> DualCoded:
    """float32 or bfloat16 [N, M] -> codes in 128 x 128 blocks, as they lie and transposed (the same codes and scales).

    rows: [N, M], scales [ceil(N / 128), ceil(M / 128)]. columns: [M, N] and the transposed scales.
    """
    return _quantize(weight, square=True)


def dequantize(coded: Coded) -> torch.Tensor:
    """code * scale in float32, rounded to the nearest bfloat16 [R, K]. Scales per row or per square block."""
    codes = _as_codes(coded.codes)
    scale_rows = _scale_rows(codes, coded.scales, "codes")
    rows, columns = codes.shape
    values = torch.empty(codes.shape, dtype=torch.int16, device=codes.device)
    dequantize_build().launch(_tiles(rows, columns), codes, coded.scales, values, rows, columns, scale_rows)
    return values.view(torch.bfloat16)


def block_product(
    a_codes: torch.Tensor, a_scales: torch.Tensor, b_codes: torch.Tensor, b_scales: torch.Tensor
) -> torch.Tensor:
    """The matrix product a b^T of block-scaled e4m3 matrices, float32 [P, Q].

    a_codes [P, K] and b_codes [Q, K], uint8 or float8_e4m3fn, both with K contiguous. b's scales are per row and block
    of 128 ([Q, ceil(K / 128)]); a's are too, or per square block ([ceil(P / 128), ceil(K / 128)]).
    Codes are multiplied exactly; 128 products are summed in the fp8 unit, then scaled and added in float32.
    Needs a card with fp8 units, or the interpreter.
    """
    a_codes, b_codes = _as_codes(a_codes), _as_codes(b_codes)
    a_rows = _scale_rows(a_codes, a_scales, "a")
    if _scale_rows(b_codes, b_scales, "b") != 1:
        raise ShapeError("b: needs a scale per row; let the operand with square blocks be a")
    (p, k), q = a_codes.shape, b_codes.shape[0]
    if b_codes.shape[1] != k:
        raise ShapeError(f"a has {k} columns and b has {b_codes.shape[1]}: the summed dimension must be the same")
    product = torch.empty((p, q), dtype=torch.float32, device=a_codes.device)
    a_fp8, b_fp8 = a_codes.view(torch.float8_e4m3fn), b_codes.view(torch.float8_e4m3fn)
    grid = (_blocks(p, BLOCK) * _blocks(q, BLOCK),)
    product_build(a_rows).launch(grid, a_fp8, a_scales, b_fp8, b_scales, product, p, q, k)
    return product


def _quantize(values: torch.Tensor, square: bool) -> DualCoded:
    values, bfloat16 = _as_input(values)
    rows, columns = _sides(values, "values")
    row_blocks, column_blocks = _blocks(rows, BLOCK), _blocks(columns, BLOCK)
    codes = {"dtype": torch.uint8, "device": values.device}
    scales = {"dtype": torch.float32, "device": values.device}
    by_row = Coded(
        torch.empty((rows, columns), **codes), torch.empty((row_blocks if square else rows, column_blocks), **scales)
    )
    by_column = Coded(
        torch.empty((columns, rows), **codes), torch.empty((column_blocks if square else columns, row_blocks), **scales)
    )
    quantize_build(bfloat16, square).launch(_tiles(rows, columns), values, *by_row, *by_column, rows, columns)
    return DualCoded(by_row, by_column)


def _as_input(values: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The values as the kernels take them (bfloat16 as int16 bits), and whether they are bfloat16."""
    if values.dtype not in (torch.float32, torch.bfloat16):
        raise ShapeError(f"values must be float32 or bfloat16, not {values.dtype}")
    if not values.is_contiguous():
        raise ShapeError("values must be contiguous")
    bfloat16 = values.dtype == torch.bfloat16
    return (values.view(torch.int16) if bfloat16 else values), bfloat16


def _as_codes(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ShapeError(f"codes must be uint8 or float8_e4m3fn, not {codes.dtype}")
    if not codes.is_contiguous():
        raise ShapeError("codes must be contiguous")
    return codes.view(torch.uint8)


def _sides(matrix: torch.Tensor, what: str) -> tuple[int, int]:
    if matrix.dim() != 2 or not matrix.numel() or any(size % ALIGNMENT for size in matrix.shape):
        raise ShapeError(
            f"{what}: need a matrix with sides that are multiples of {ALIGNMENT}, not {tuple(matrix.shape)}"
        )
    if max(matrix.shape) > LARGEST_NUMEL // BLOCK:
        raise ShapeError(f"{what}: {tuple(matrix.shape)} is too large")
    return matrix.shape[0], matrix.shape[1]


def _scale_rows(codes: torch.Tensor, scales: torch.Tensor, what: str) -> int:
    """Rows that share a scale: 1, or 128 for square blocks."""
    rows, columns = _sides(codes, what)
    if scales.dtype != torch.float32 or not scales.is_contiguous() or scales.device != codes.device:
        raise ShapeError(f"{what}: scales must be contiguous float32 on the codes' device")
    across = _blocks(columns, BLOCK)
    if scales.shape == (rows, across):
        return 1
    if scales.shape == (_blocks(rows, BLOCK), across):
        return BLOCK
    raise ShapeError(f"{what}: scales of {tuple(scales.shape)} don't fit codes of {tuple(codes.shape)}")


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return _blocks(rows, BLOCK), _blocks(columns, BLOCK)
