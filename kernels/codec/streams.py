"""The parts of a contribution between selection and the wire."""

from dataclasses import dataclass

import numpy as np

ESCAPE = 255


@dataclass(frozen=True)
class Streams:
    """What the two encoders hand to the wire and the wire hands to the decoders. C chunks, N sent values.

    counts_C: uint16, values sent of each chunk. codes_C2: uint8, lower and upper magnitude code.
    places: uint8, which values are sent. As gaps: per value the number of positions skipped since the chunk's previous
    value, one byte of 255 for each whole 255, then the rest. As a mask: one bit per value of all chunks.
    signs, uppers: uint8, N bits each. Bits lie with the first value in the lowest bit and are padded with zeros.
    """

    counts_C: np.ndarray
    codes_C2: np.ndarray
    places: np.ndarray
    signs: np.ndarray
    uppers: np.ndarray


def pack_bits(flags: np.ndarray) -> np.ndarray:
    """bool [N] -> uint8 [ceil(N / 8)], first flag in the lowest bit."""
    return np.packbits(flags, bitorder="little")


def unpack_bits(packed: np.ndarray, first: int, count: int) -> np.ndarray:
    """The flags [first, first + count) as uint8 zeros and ones."""
    skip = first % 8
    window = packed[first // 8 : (first + count + 7) // 8]
    return np.unpackbits(window, count=skip + count, bitorder="little")[skip:]


def gap_bytes(positions: np.ndarray) -> np.ndarray:
    """Ascending positions within one chunk -> their gaps as bytes."""
    gaps = np.diff(positions, prepend=-1) - 1
    escapes = gaps // ESCAPE
    coded = np.full(len(gaps) + int(escapes.sum()), ESCAPE, dtype=np.uint8)
    coded[np.cumsum(escapes + 1) - 1] = gaps % ESCAPE
    return coded


def mask_positions(mask: np.ndarray, first: int, count: int) -> np.ndarray:
    """Ascending positions of the set ones (int64, the first flag is 0) among the flags [first, first + count)."""
    return np.flatnonzero(unpack_bits(mask, first, count))
