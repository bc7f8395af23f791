"""e4m3 codes by integer operations on float32 bits: for cards without fp8 conversions, and without double rounding.

Importing this module needs Triton. A code is sign, 4 exponent bits (bias 7) and 3 mantissa bits; 0x7E is 448, the
largest, and 0x7F is NaN. Integer constants: 20 mantissa bits of a float32 are rounded away, its bias is larger by 120.
"""

import triton
import triton.language as tl


@triton.jit
def to_codes(values):
    """float32 -> uint8 codes, to the nearest, ties to even. Saturates at 448, infinity too; NaN stays NaN."""
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
    # below 2^-6 the code counts steps of 2^-9; a shift by 25 leaves nothing of a 24-bit significand
    exponent = (magnitude >> 23).to(tl.int32)
    shift = tl.minimum(tl.maximum(141 - exponent, 20), 25)
    significand = ((magnitude & 0x7FFFFF) | 0x800000).to(tl.int32)
    half = (1 << (shift - 1)) - 1
    subnormal = (significand + half + ((significand >> shift) & 1)) >> shift
    code = tl.minimum(tl.where(exponent > 120, normal, subnormal), 0x7E)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80).to(tl.int32)).to(tl.uint8)


@triton.jit
def to_bits(codes):
    """uint8 codes -> uint32, the bits of the float32 values; exact."""
    wide = codes.to(tl.uint32)
    mantissa = wide & 7
    exponent = (wide >> 3) & 15
    normal = ((exponent + 120) << 23) | (mantissa << 20)
    quarter = (120 << 23) | ((mantissa & 3) << 21)
    half = (119 << 23) | ((mantissa & 1) << 22)
    one = mantissa * (118 << 23)  # 0 or 1 here
    subnormal = tl.where(mantissa >= 4, quarter, tl.where(mantissa >= 2, half, one))
    value = tl.where(exponent > 0, normal, subnormal)
    value = tl.where((wide & 0x7F) == 0x7F, 0x7FF00000, value)
    return value | ((wide & 0x80) << 24)


@triton.jit
def to_bfloat16(bits):
    """uint32 bits of float32 values -> int16 bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).to(tl.int16)


@triton.jit
def load_float32(at, mask, BFLOAT16: tl.constexpr):
    """float32 values from float32, or from bfloat16 handed over as int16: exact."""
    if BFLOAT16:
        values = (tl.load(at, mask=mask, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = tl.load(at, mask=mask, other=0.0)
    return values


@triton.jit
def encode(values, codes, count, BLOCK: tl.constexpr):
    """values float32 [count] -> codes [count]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(codes + at, to_codes(tl.load(values + at, mask=inside, other=0.0)), mask=inside)


@triton.jit
def decode(codes, values, count, BLOCK: tl.constexpr):
    """codes [count] -> values [count], int32, as float32 bits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    bits = to_bits(tl.load(codes + at, mask=inside, other=0))
    tl.store(values + at, bits.to(tl.int32, bitcast=True), mask=inside)
