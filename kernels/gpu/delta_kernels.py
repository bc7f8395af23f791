"""The delta encoder's selection and its two magnitudes per chunk: the same choice as `codec.reference`, to the bit.

Importing this module needs Triton. C chunks of up to 4096 values, at most W candidates each.
"""

import triton
import triton.language as tl

from tscale.kernels.codec.magnitudes import BIAS, CODES, HALF_STEP, REACH, SHIFT, SPLIT_ABOVE_MEAN
from tscale.kernels.codec.rung import CHUNK

LENGTH = tl.constexpr(CHUNK)
CODE_BIAS = tl.constexpr(BIAS)
CODE_SHIFT = tl.constexpr(SHIFT)
CODE_HALF_STEP = tl.constexpr(HALF_STEP)
LAST_CODE = tl.constexpr(CODES - 1)
SPLIT = tl.constexpr(SPLIT_ABOVE_MEAN)
FARTHEST = tl.constexpr(float(REACH))
SENT = tl.constexpr(1)
UPPER = tl.constexpr(2)
NEGATIVE = tl.constexpr(4)


@triton.jit
def select(values, starts, lengths, keeps, positions, kept, found, W):
    """Per chunk, its candidates in ascending order: positions int16 [C, W], their values' bits kept int32 [C, W].

    values: int32, float32 bits of all chunks. starts int64, lengths and keeps int32 [C]. found int32 [C]: how many
    candidates, or -1 when a value isn't finite. The limit is built from its highest bit down: it is the greatest one
    that `keep` magnitudes reach. Of equal magnitudes the lower positions are taken.
    """
    chunk = tl.program_id(0)
    at = tl.arange(0, LENGTH)
    length, keep = tl.load(lengths + chunk), tl.load(keeps + chunk)
    bits = tl.load(values + tl.load(starts + chunk) + at, mask=at < length, other=0)
    magnitude = bits & 0x7FFFFFFF
    limit = keep * 0
    for step in range(31):
        trial = limit | (1 << (30 - step))
        reached = tl.sum((magnitude >= trial).to(tl.int32), axis=0)
        limit = tl.where(reached >= keep, trial, limit)
    above = (magnitude > limit).to(tl.int32)
    tied = ((magnitude == limit) & (limit > 0)).to(tl.int32)
    spare = keep - tl.sum(above, axis=0)
    taken = above | (tied & (tl.cumsum(tied, axis=0) <= spare).to(tl.int32))
    slot = chunk.to(tl.int64) * W + tl.cumsum(taken, axis=0) - 1
    tl.store(positions + slot, at.to(tl.int16), mask=taken > 0)
    tl.store(kept + slot, bits, mask=taken > 0)
    finite = tl.max(magnitude, axis=0) < 0x7F800000
    tl.store(found + chunk, tl.where(finite, tl.sum(taken, axis=0), -1))


@triton.jit
def code_of(total, count):
    """Nearest magnitude code of total / count (float64, int32), 0 where count is 0."""
    mean = total / tl.maximum(count, 1).to(tl.float64)
    bits = mean.to(tl.float32).to(tl.int32, bitcast=True)
    code = ((bits + CODE_HALF_STEP) >> CODE_SHIFT) - CODE_BIAS
    return tl.where(count > 0, tl.minimum(tl.maximum(code, 0), LAST_CODE), 0)


@triton.jit
def level_of(code):
    """float32 magnitude of a code."""
    return tl.where(code > 0, (code + CODE_BIAS) << CODE_SHIFT, 0).to(tl.float32, bitcast=True)


@triton.jit
def choose(kept, found, codes, flags, chunks, W, BLOCK: tl.constexpr):
    """kept float32 [C, W], found int32 [C] -> codes uint8 [C, 2], flags uint8 [C, W] (SENT, UPPER, NEGATIVE).

    What lies past a chunk's candidates in `flags` is left as it is.

    A lane walks through its own chunk from the first candidate to the last, so that the float64 sums are added in the
    reference's order. Compile without fused multiply-add.
    """
    chunk = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(found + chunk, mask=chunk < chunks, other=0)
    row = kept + chunk * W
    most = tl.max(count, axis=0)
    total = tl.zeros((BLOCK,), tl.float64)
    lowest = tl.full((BLOCK,), float("inf"), tl.float64)
    for j in range(most):
        value = tl.abs(tl.load(row + j, mask=j < count, other=float("inf"))).to(tl.float64)
        total += tl.where(j < count, value, 0.0)
        lowest = tl.minimum(lowest, value)
    mean = total / tl.maximum(count, 1).to(tl.float64)
    split = mean + SPLIT * (mean - lowest)
    lower_total, upper_total = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    lower_count, upper_count = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for j in range(most):
        value = tl.abs(tl.load(row + j, mask=j < count, other=0.0)).to(tl.float64)
        upper = (value >= split) & (j < count)
        lower = (value >= 0.5 * mean) & (value < split) & (j < count)
        upper_total += tl.where(upper, value, 0.0)
        lower_total += tl.where(lower, value, 0.0)
        upper_count += upper.to(tl.int32)
        lower_count += lower.to(tl.int32)
    low = code_of(lower_total, lower_count)
    high = tl.where(upper_count > 0, code_of(upper_total, upper_count), low)
    tl.store(codes + chunk * 2, low.to(tl.uint8), mask=chunk < chunks)
    tl.store(codes + chunk * 2 + 1, high.to(tl.uint8), mask=chunk < chunks)
    low_level, high_level = level_of(low), level_of(high)
    middle = ((low_level.to(tl.float64) + high_level.to(tl.float64)) * 0.5).to(tl.float32)
    for j in range(most):
        signed = tl.load(row + j, mask=j < count, other=0.0)
        value = tl.abs(signed)
        upper = value >= middle
        level = tl.where(upper, high_level, low_level)
        sent = (level > 0) & (value >= level * 0.5) & (value < level * FARTHEST)
        flag = SENT + upper.to(tl.int32) * UPPER + (signed < 0).to(tl.int32) * NEGATIVE
        tl.store(flags + chunk * W + j, tl.where(sent, flag, 0).to(tl.uint8), mask=j < count)
