"""The two magnitudes of a chunk: 8-bit codes of a fixed logarithmic float32 table, and what each value is sent as.

A code is a float32 with three mantissa bits: code c > 0 stands for (1 + j/8) * 2^E with 8*(E + 24) + j = c - 1, from
2^-24 (less than that doesn't move a weight near one) to 1.75 * 2^7. Code 0 stands for zero: nothing is sent with it.

Why `decode + residual == input` holds exactly. A value x is sent as q (sign apart) only when q/2 <= x < 2^20 * q.
For x <= 2q, Sterbenz' lemma makes x - q exact. For x > 2q, q is a multiple of x's last place, because q has four
significant bits and x is less than 2^20 times larger; so x - q is again such a multiple, smaller than x, and fits.
Values outside that interval stay in the residual whole: no float32 residual could complete them to x.
"""

import numpy as np

LOWEST_EXPONENT = -24
CODES = 256
BIAS = (127 + LOWEST_EXPONENT) * 8 - 1  # top 12 bits of a float32, less BIAS, is its code
HALF_STEP = 1 << 19
SHIFT = 20
REACH = np.float32(2.0**20)
SCALE_BITS = 3 - LOWEST_EXPONENT  # every magnitude is a whole multiple of 2^-SCALE_BITS
SPLIT_ABOVE_MEAN = 0.625  # the best split of an exponential tail is 0.594 (mean - lowest) above its mean


def magnitude_table() -> np.ndarray:
    """float32 [256], ascending; entry 0 is zero."""
    bits = (np.arange(CODES, dtype=np.int32) + BIAS) << SHIFT
    bits[0] = 0
    return bits.view(np.float32)


def magnitude_code(value: float) -> int:
    """The nearest code of a non-negative value, limited to the table."""
    bits = int(np.float32(value).view(np.int32))
    return min(max(((bits + HALF_STEP) >> SHIFT) - BIAS, 0), CODES - 1)


def sequential_sum(values: np.ndarray) -> float:
    """Float64 sum in index order, the same bits on every machine (numpy's own sum is free to regroup)."""
    total = 0.0
    for start in range(0, len(values), 65536):
        block = values[start : start + 65536].astype(np.float64)
        block[0] += total
        total = float(np.add.accumulate(block)[-1])
    return total


def choose_codes(values_K: np.ndarray) -> tuple[int, int]:
    """Codes of the lower and the upper magnitude for the candidates' absolute values (float32 [K], none zero).

    One Lloyd step with a zero zone, started where it is almost right for both the tail of a top-k selection and a
    whole half-normal chunk: split at mean + 0.625 (mean - lowest), values below mean/2 left out.
    """
    if not len(values_K):
        return 0, 0
    values = values_K.astype(np.float64)
    mean = sequential_sum(values) / len(values)
    split = mean + SPLIT_ABOVE_MEAN * (mean - float(values.min()))
    lower = values[(values >= 0.5 * mean) & (values < split)]
    upper = values[values >= split]
    low = magnitude_code(sequential_sum(lower) / len(lower)) if len(lower) else 0
    high = magnitude_code(sequential_sum(upper) / len(upper)) if len(upper) else low
    return low, high


def assign(values_K: np.ndarray, low: np.float32, high: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Which values (float32 [K], absolute) take the upper magnitude, and which are sent at all: two bool [K]."""
    split = np.float32((float(low) + float(high)) * 0.5)
    upper_K = values_K >= split
    sent_as_K = np.where(upper_K, high, low)
    sent_K = (sent_as_K > 0) & (values_K >= sent_as_K * np.float32(0.5)) & (values_K < sent_as_K * REACH)
    return upper_K, sent_K
