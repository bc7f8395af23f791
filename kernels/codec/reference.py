"""The plain chunk coder in numpy: the definition that the fast twin is tested against."""

import numpy as np

from tscale.kernels.codec.errors import CodecError
from tscale.kernels.codec.magnitudes import assign, choose_codes, magnitude_table
from tscale.kernels.codec.plan import ChunkPlan
from tscale.kernels.codec.streams import ESCAPE, Streams, gap_bytes, pack_bits


def candidates(values: np.ndarray, keep: int) -> np.ndarray:
    """Ascending positions of the `keep` largest non-zero values; of equal ones the lower position wins."""
    magnitudes = np.abs(values)
    order = np.argsort(-magnitudes, kind="stable")[:keep]
    return np.sort(order[magnitudes[order] > 0])


def encode_chunks(residual: np.ndarray, plan: ChunkPlan, threads: int = 1) -> Streams:
    """Selects, quantizes and takes what is sent out of `residual` (float32 [P], changed in place).

    Raises CodecError, with `residual` unchanged, when a value of a chunk isn't finite. `threads` is for the fast twin.
    """
    if not all(np.isfinite(residual[a : a + n]).all() for a, n in zip(plan.starts_C, plan.lengths_C, strict=True)):
        raise CodecError("the residual has a value that isn't finite")
    table = magnitude_table()
    no_flags = np.zeros(0, dtype=bool)
    counts_C = np.zeros(plan.chunks, dtype=np.uint16)
    codes_C2 = np.zeros((plan.chunks, 2), dtype=np.uint8)
    places, signs, uppers = [np.zeros(0, dtype=bool if plan.masked else np.uint8)], [no_flags], [no_flags]
    for chunk, (start, length) in enumerate(zip(plan.starts_C, plan.lengths_C, strict=True)):
        values = residual[start : start + length]
        positions = candidates(values, int(plan.keep_C[chunk]))
        magnitudes = np.abs(values[positions])
        codes_C2[chunk] = choose_codes(magnitudes)
        low, high = table[codes_C2[chunk]]
        upper, sent = assign(magnitudes, low, high)
        positions, upper = positions[sent], upper[sent]
        negative = values[positions] < 0
        values[positions] -= np.where(negative, -1, 1).astype(np.float32) * np.where(upper, high, low)
        counts_C[chunk] = len(positions)
        places.append(np.isin(np.arange(length), positions) if plan.masked else gap_bytes(positions))
        signs.append(negative)
        uppers.append(upper)
    return Streams(
        counts_C=counts_C,
        codes_C2=codes_C2,
        places=pack_bits(np.concatenate(places)) if plan.masked else np.concatenate(places),
        signs=pack_bits(np.concatenate(signs)),
        uppers=pack_bits(np.concatenate(uppers)),
    )


def expand_positions(gaps: np.ndarray, counts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """Positions (int64 [N], from the tensor's start) of one tensor's values, and the gap bytes they took.

    `gaps` starts at the tensor's first gap and may go on with the next tensor's. `lengths` are the chunks' lengths.
    Raises CodecError when bytes are missing or a value would lie outside its chunk.
    """
    counts = counts.astype(np.int64)
    total = int(counts.sum())
    if total == 0:
        return np.zeros(0, dtype=np.int64), 0
    window = gaps[: total + int(lengths.sum()) // ESCAPE]
    ends = np.flatnonzero(window != ESCAPE)[:total]
    if len(ends) < total:
        raise CodecError("the gaps end before the last value")
    taken = int(ends[-1]) + 1
    # position + 1 within the concatenation of all chunks' runs, then moved to each chunk's own start
    reached = np.cumsum(window[:taken], dtype=np.int64)[ends] + np.arange(1, total + 1)
    first_value = np.cumsum(counts) - counts
    before = np.concatenate([[0], reached])[first_value]
    within = reached - np.repeat(before, counts) - 1
    if np.any(within >= np.repeat(lengths, counts)):
        raise CodecError("a value lies outside its chunk")
    starts = np.cumsum(lengths) - lengths
    return within + np.repeat(starts, counts), taken
