"""Adding a contribution's values to a sum straight from its streams, in numba: no list of positions, any run of chunks.

The same bits as `Decoded.add_to`: weight * value is rounded, then added. Importing this module needs numba.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from tscale.kernels.codec.magnitudes import magnitude_table
from tscale.kernels.codec.streams import ESCAPE, Streams


class Coded(NamedTuple):
    """Checked streams of a contribution and their weight, in a form that numba takes."""

    counts: np.ndarray  # uint16 [C]
    lows: np.ndarray  # uint8 [C], code of the lower magnitude
    highs: np.ndarray  # uint8 [C]
    magnitudes: np.ndarray  # float64 by code, the weight multiplied in
    places: np.ndarray  # uint8
    signs: np.ndarray  # uint8
    uppers: np.ndarray  # uint8


def weighted(streams: Streams, weight: float) -> Coded:
    """The streams of a checked contribution with `weight` on every magnitude."""
    magnitudes = magnitude_table().astype(np.float64) * weight
    lows, highs = streams.codes_C2[:, 0], streams.codes_C2[:, 1]
    return Coded(streams.counts_C, lows, highs, magnitudes, streams.places, streams.signs, streams.uppers)


@njit(cache=True, nogil=True)
def add_gaps(sum64: np.ndarray, lengths: np.ndarray, coded: Coded, first: int, cursor: np.ndarray) -> None:
    """Add chunks `first` and on (`lengths` of them) to `sum64`; `cursor` is the next value and gap byte, moved on."""
    value, place = cursor[0], cursor[1]
    start = 0
    for c in range(len(lengths)):
        low, high = coded.magnitudes[coded.lows[first + c]], coded.magnitudes[coded.highs[first + c]]
        position = start - 1
        for _ in range(coded.counts[first + c]):
            position += 1
            while coded.places[place] == ESCAPE:
                position += ESCAPE
                place += 1
            position += coded.places[place]
            place += 1
            sent = high if (coded.uppers[value >> 3] >> (value & 7)) & 1 else low
            sum64[position] += -sent if (coded.signs[value >> 3] >> (value & 7)) & 1 else sent
            value += 1
        start += lengths[c]
    cursor[0], cursor[1] = value, place


@njit(cache=True, nogil=True)
def add_masked(sum64: np.ndarray, lengths: np.ndarray, coded: Coded, first: int, cursor: np.ndarray) -> None:
    """`add_gaps` where places are a mask: the cursor's second entry is the next mask bit."""
    value, bit = cursor[0], cursor[1]
    start = 0
    for c in range(len(lengths)):
        low, high = coded.magnitudes[coded.lows[first + c]], coded.magnitudes[coded.highs[first + c]]
        for position in range(start, start + lengths[c]):
            if (coded.places[bit >> 3] >> (bit & 7)) & 1:
                sent = high if (coded.uppers[value >> 3] >> (value & 7)) & 1 else low
                sum64[position] += -sent if (coded.signs[value >> 3] >> (value & 7)) & 1 else sent
                value += 1
            bit += 1
        start += lengths[c]
    cursor[0], cursor[1] = value, bit


@njit(cache=True, nogil=True)
def add_values(sum64: np.ndarray, values: np.ndarray, weight: float) -> None:
    """`sum64 += weight * values`, float64 and float32 [N], without a temporary."""
    for i in range(len(sum64)):
        product = weight * np.float64(values[i])
        sum64[i] += product
