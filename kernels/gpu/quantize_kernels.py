"""Block quantization: a tile of 128 x 128 values is written twice, as it lies and transposed.

The tile is read from memory once; the second pass over it finds it in the cache. Strips of rows keep it out of the
registers, where it spills. A scale is the block's largest magnitude / 448, never less than 2^-100 / 448. Divisions are
IEEE (`div_rn`; Triton's plain one is not), so that codes and scales are those of a plain division.
Importing this module needs Triton.
"""

import triton
import triton.language as tl

from tscale.kernels.gpu.e4m3_kernels import load_float32, to_bfloat16, to_bits, to_codes

SIDE = tl.constexpr(128)
STRIP = tl.constexpr(32)
SMALLEST_BITS = tl.constexpr((127 - 100) << 23)  # float32 bits of 2^-100
LARGEST_CODE = tl.constexpr(448.0)


@triton.jit
def scale_of(magnitude_bits):
    """Bits of blocks' largest magnitudes (compared as integers, so that NaN wins) -> float32 scales."""
    return tl.div_rn(tl.maximum(magnitude_bits, SMALLEST_BITS).to(tl.float32, bitcast=True), LARGEST_CODE)


@triton.jit
def quantize_dual(
    values,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    rows,
    columns,
    BFLOAT16: tl.constexpr,
    SQUARE: tl.constexpr,
):
    """values [N, M] -> row_codes [N, M] and column_codes [M, N] (transposed).

    SQUARE: one scale per tile, row_scales [N/128, M/128], column_scales its transpose. Else 1 x 128 blocks along either
    axis: row_scales [N, M/128], column_scales [M, N/128]. N/128 and M/128 are rounded up. A side runs over the tile's
    columns.
    """
    row_tile, column_tile = tl.program_id(0), tl.program_id(1)
    row_tiles, column_tiles = tl.cdiv(rows, SIDE), tl.cdiv(columns, SIDE)
    side = column_tile * SIDE + tl.arange(0, SIDE)
    side_inside = side < columns
    side_max = tl.zeros((SIDE,), tl.int32)
    for strip in range(SIDE // STRIP):
        n = row_tile * SIDE + strip * STRIP + tl.arange(0, STRIP)
        at = n[:, None].to(tl.int64) * columns + side[None, :]
        inside = (n < rows)[:, None] & side_inside[None, :]
        part = load_float32(values + at, inside, BFLOAT16)
        magnitude = part.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        side_max = tl.maximum(side_max, tl.max(magnitude, axis=0))
        if not SQUARE:
            scale = scale_of(tl.max(magnitude, axis=1))
            tl.store(row_scales + n.to(tl.int64) * column_tiles + column_tile, scale, mask=n < rows)
            tl.store(row_codes + at, to_codes(tl.div_rn(part, scale[:, None])), mask=inside)
    if SQUARE:
        scale = scale_of(tl.max(side_max, axis=0))
        tl.store(row_scales + row_tile * column_tiles + column_tile, scale)
        tl.store(column_scales + column_tile * row_tiles + row_tile, scale)
        side_scale = tl.zeros((SIDE,), tl.float32) + scale
    else:
        side_scale = scale_of(side_max)
        tl.store(column_scales + side.to(tl.int64) * row_tiles + row_tile, side_scale, mask=side_inside)
    for strip in range(SIDE // STRIP):
        n = row_tile * SIDE + strip * STRIP + tl.arange(0, STRIP)
        at = n[:, None].to(tl.int64) * columns + side[None, :]
        inside = (n < rows)[:, None] & side_inside[None, :]
        codes = to_codes(tl.div_rn(load_float32(values + at, inside, BFLOAT16), side_scale[None, :]))
        if SQUARE:
            tl.store(row_codes + at, codes, mask=inside)
        across = side[:, None].to(tl.int64) * rows + n[None, :]
        tl.store(column_codes + across, tl.trans(codes), mask=side_inside[:, None] & (n < rows)[None, :])


@triton.jit
def dequantize(codes, scales, values, rows, columns, scale_rows):
    """codes [R, K], scales [R / scale_rows, K/128] -> bits of code * scale in bfloat16, int16 [R, K]."""
    row_tile, column_tile, side = tl.program_id(0), tl.program_id(1), tl.arange(0, SIDE)
    n = row_tile * SIDE + side
    inside = (n < rows)[:, None] & (column_tile * SIDE + side < columns)[None, :]
    first = row_tile.to(tl.int64) * SIDE * columns + column_tile * SIDE
    at = first + (side[:, None] * columns + side[None, :])
    bits = to_bits(tl.load(codes + at, mask=inside, other=0))
    scale_at = (n // scale_rows).to(tl.int64) * tl.cdiv(columns, SIDE) + column_tile
    scale = tl.load(scales + scale_at, mask=n < rows, other=0.0)
    scaled = bits.to(tl.float32, bitcast=True) * scale[:, None]
    tl.store(values + at, to_bfloat16(scaled.to(tl.uint32, bitcast=True)), mask=inside)
