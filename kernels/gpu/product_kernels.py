"""The block-scaled fp8 matrix product.

Importing this module needs Triton. Both operands lie with the summed dimension contiguous, which is what the fp8 units
of all targets read. The products of 128 values along it are summed by the unit and then scaled and added in float32:
Hopper's unit alone keeps too few bits for a long sum.
"""

import triton
import triton.language as tl

DEPTH = tl.constexpr(128)


@triton.jit
def block_product(
    a_codes,
    a_scales,
    b_codes,
    b_scales,
    product,
    P,
    Q,
    K,
    A_ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    BAND: tl.constexpr,
):
    """a_codes [P, K] e4m3, a_scales [P/A_ROWS, K/128], b_codes [Q, K], b_scales [Q, K/128] -> float32 [P, Q].

    A_ROWS is 1, or SIDE for weights. Tiles are taken in bands of BAND rows of tiles, so that neighbours in time share
    operands in the cache.
    """
    p_tiles, q_tiles, blocks = tl.cdiv(P, SIDE), tl.cdiv(Q, SIDE), tl.cdiv(K, DEPTH)
    band, within = tl.program_id(0) // (BAND * q_tiles), tl.program_id(0) % (BAND * q_tiles)
    band_rows = tl.minimum(p_tiles - band * BAND, BAND)
    p_tile, q_tile = band * BAND + within % band_rows, within // band_rows
    # rows past the end read row 0 on: cheaper than a mask, and never stored
    p = (p_tile * SIDE + tl.arange(0, SIDE)) % P
    q = (q_tile * SIDE + tl.arange(0, SIDE)) % Q
    k = tl.arange(0, DEPTH)
    a_at = a_codes + p[:, None].to(tl.int64) * K + k[None, :]
    b_at = b_codes + q[:, None].to(tl.int64) * K + k[None, :]
    a_scale_at = a_scales + (p if A_ROWS == 1 else p_tile) * blocks
    b_scale_at = b_scales + q * blocks
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for block in range(blocks):
        left = k[None, :] < K - block * DEPTH
        a, b = tl.load(a_at, mask=left, other=0.0), tl.load(b_at, mask=left, other=0.0)
        a_scale, b_scale = tl.load(a_scale_at), tl.load(b_scale_at)
        part = tl.dot(a, b.T)
        if A_ROWS == 1:
            total += part * a_scale[:, None] * b_scale[None, :]
        else:
            total += part * (a_scale * b_scale)[None, :]
        a_at += DEPTH
        b_at += DEPTH
        a_scale_at += 1
        b_scale_at += 1
    p = p_tile * SIDE + tl.arange(0, SIDE)
    q = q_tile * SIDE + tl.arange(0, SIDE)
    at = p[:, None].to(tl.int64) * Q + q[None, :]
    tl.store(product + at, total, mask=(p < P)[:, None] & (q < Q)[None, :])
