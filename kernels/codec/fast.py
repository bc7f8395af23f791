"""The chunk coder in numba: the same streams as `reference`, bit for bit, several times faster than a top-k selection.

No parallel loops (training owns the cores), but the GIL is released, and chunks can be shared out to threads.
Importing this module needs numba.
"""

from concurrent.futures import Future
from itertools import pairwise
from threading import Thread
from typing import NamedTuple

import numpy as np
from numba import njit

from tscale.kernels.codec.errors import CodecError
from tscale.kernels.codec.fast_select import Scratch, largest_bits, new_scratch, select_largest
from tscale.kernels.codec.magnitudes import BIAS, CODES, HALF_STEP, REACH, SHIFT, SPLIT_ABOVE_MEAN, magnitude_table
from tscale.kernels.codec.plan import ChunkPlan
from tscale.kernels.codec.rung import CHUNK
from tscale.kernels.codec.streams import ESCAPE, Streams, mask_positions, unpack_bits

# numba's cache doesn't see changes in fast_select.py: 8fe283c9

MAGNITUDE_MASK = 0x7FFFFFFF
LARGEST_FINITE = 0x7F7FFFFF


class Chunks(NamedTuple):
    """ChunkPlan's arrays, in a form that numba takes."""

    starts: np.ndarray
    lengths: np.ndarray
    keep: np.ndarray


class Output(NamedTuple):
    """Streams of the greatest size they can have, all zeros."""

    counts: np.ndarray
    codes: np.ndarray
    places: np.ndarray
    signs: np.ndarray
    uppers: np.ndarray


class Cursor(NamedTuple):
    """Where the next chunk's output goes: the values sent so far, the gap bytes so far, the chunk's first mask bit."""

    sent: int
    gap: int
    bit: int


@njit(cache=True, nogil=True)
def _code(value: float, rounded: np.ndarray) -> int:
    rounded[0] = value
    code = int((np.int64(rounded.view(np.int32)[0]) + HALF_STEP) >> SHIFT) - BIAS
    return min(max(code, 0), CODES - 1)


@njit(cache=True, nogil=True)
def _choose_codes(values: np.ndarray, rounded: np.ndarray) -> tuple[int, int]:
    """`magnitudes.choose_codes`: same operations in the same order."""
    total, lowest = 0.0, np.inf
    for j in range(len(values)):
        value = np.float64(values[j])
        total += value
        lowest = min(lowest, value)
    mean = total / len(values)
    split = mean + SPLIT_ABOVE_MEAN * (mean - lowest)
    floor = 0.5 * mean
    lower_total, lower_count, upper_total, upper_count = 0.0, 0, 0.0, 0
    for j in range(len(values)):
        value = np.float64(values[j])
        if value >= split:
            upper_total += value
            upper_count += 1
        elif value >= floor:
            lower_total += value
            lower_count += 1
    low = _code(lower_total / lower_count, rounded) if lower_count else 0
    high = _code(upper_total / upper_count, rounded) if upper_count else low
    return low, high


@njit(cache=True, nogil=True)
def _set_bit(packed: np.ndarray, place: int, flag: bool) -> None:
    packed[place >> 3] |= np.uint8(flag) << np.uint8(place & 7)


@njit(cache=True, nogil=True)
def _put_gap(places: np.ndarray, gap: int, skipped: int) -> int:
    while skipped >= ESCAPE:
        places[gap] = ESCAPE
        gap += 1
        skipped -= ESCAPE
    places[gap] = skipped
    return gap + 1


@njit(cache=True, nogil=True)
def _emit(
    values: np.ndarray, scratch: Scratch, levels: tuple, out: Output, cursor: Cursor, masked: bool
) -> tuple[int, int]:
    """Writes a chunk's sent values (levels: lower, upper, candidates), takes them out of `values`; new sent and gap."""
    low, high, found = levels
    sent, gap = cursor.sent, cursor.gap
    split = np.float32((np.float64(low) + np.float64(high)) * 0.5)
    magnitudes = scratch.chosen.view(np.float32)
    previous = -1
    for j in range(found):
        value = magnitudes[j]
        upper = value >= split
        sent_as = high if upper else low
        if sent_as <= 0 or value < sent_as * np.float32(0.5) or value >= sent_as * REACH:
            continue
        position = scratch.where[j]
        if masked:
            _set_bit(out.places, cursor.bit + position, True)
        else:
            gap = _put_gap(out.places, gap, position - previous - 1)
            previous = position
        negative = values[position] < 0
        values[position] += sent_as if negative else -sent_as
        _set_bit(out.signs, sent, negative)
        _set_bit(out.uppers, sent, upper)
        sent += 1
    return sent, gap


@njit(cache=True, nogil=True)
def _encode(
    residual: np.ndarray, chunks: Chunks, table: np.ndarray, scratch: Scratch, out: Output, masked: bool
) -> tuple[int, int, int]:
    """Chunks done (all of them, or those before the first one that isn't finite), values sent, gap bytes."""
    sent, gap, bit = 0, 0, 0
    guess = 1
    for c in range(len(chunks.starts)):
        values = residual[chunks.starts[c] : chunks.starts[c] + chunks.lengths[c]]
        raw = values.view(np.int32)
        bits = scratch.bits[: len(raw)]
        for i in range(len(raw)):
            bits[i] = raw[i] & np.int32(MAGNITUDE_MASK)
        largest = np.int64(largest_bits(bits))
        if largest > LARGEST_FINITE:
            return c, sent, gap
        cursor = Cursor(sent, gap, bit)
        bit += len(raw)
        if largest == 0:
            continue
        found, guess = select_largest(bits, chunks.keep[c], guess, largest, scratch)
        low, high = _choose_codes(scratch.chosen[:found].view(np.float32), scratch.rounded)
        out.codes[c, 0], out.codes[c, 1] = low, high
        sent, gap = _emit(values, scratch, (table[low], table[high], found), out, cursor, masked)
        out.counts[c] = sent - cursor.sent
    return len(chunks.starts), sent, gap


class Piece(NamedTuple):
    """A run of a plan's chunks that one thread encodes: what came of it, in streams of its own."""

    chunks: Chunks
    out: Output
    done: int
    sent: int
    gap: int


def encode_chunks(residual: np.ndarray, plan: ChunkPlan, threads: int = 1) -> Streams:
    """`reference.encode_chunks`: same bytes, same changes to `residual` (float32 [P]), same error.

    The chunks are shared out to `threads` threads; the bytes are the same for any number of them.
    """
    bounds = [plan.chunks * i // threads for i in range(threads + 1)]
    runs = [slice(a, b) for a, b in pairwise(bounds) if b > a] or [slice(0, 0)]
    pieces = _encode_runs(residual, plan, runs)
    if any(piece.done < len(piece.chunks.starts) for piece in pieces):
        for piece in pieces:
            _put_back(residual, piece, plan.masked)
        raise CodecError("the residual has a value that isn't finite")
    return _join(pieces, plan.masked)


def _encode_runs(residual: np.ndarray, plan: ChunkPlan, runs: list[slice]) -> list[Piece]:
    """The pieces of `runs`, each in a thread of its own; the caller's takes the first one.

    Plain threads: a pool's start and end take a twentieth of the time that ten million parameters need.
    """
    pieces: list[Future[Piece]] = [Future() for _ in runs]

    def encode_one(number: int) -> None:
        try:
            pieces[number].set_result(_encode_run(residual, plan, runs[number]))
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
            pieces[number].set_exception(error)

    threads = [Thread(target=encode_one, args=(number,)) for number in range(1, len(runs))]
    for thread in threads:
        thread.start()
    encode_one(0)
    for thread in threads:
        thread.join()
    return [piece.result() for piece in pieces]


def _encode_run(residual: np.ndarray, plan: ChunkPlan, run: slice) -> Piece:
    chunks = Chunks(plan.starts_C[run], plan.lengths_C[run], plan.keep_C[run])
    most, numel = int(chunks.keep.sum()), int(chunks.lengths.sum())
    place_bytes = (numel + 7) // 8 if plan.masked else most + int((chunks.lengths // ESCAPE).sum())
    out = Output(
        counts=np.zeros(len(chunks.starts), dtype=np.uint16),
        codes=np.zeros((len(chunks.starts), 2), dtype=np.uint8),
        places=np.zeros(place_bytes, dtype=np.uint8),
        signs=np.zeros((most + 7) // 8, dtype=np.uint8),
        uppers=np.zeros((most + 7) // 8, dtype=np.uint8),
    )
    return Piece(chunks, out, *_encode(residual, chunks, magnitude_table(), new_scratch(), out, plan.masked))


def _join(pieces: list[Piece], masked: bool) -> Streams:
    """The pieces' streams one after the other; bits close up."""
    sent = [piece.sent for piece in pieces]
    numel = [int(piece.chunks.lengths.sum()) for piece in pieces]
    if masked:
        places = _join_bits([piece.out.places for piece in pieces], numel)
    else:
        places = np.concatenate([piece.out.places[: piece.gap] for piece in pieces])
    return Streams(
        counts_C=np.concatenate([piece.out.counts for piece in pieces]),
        codes_C2=np.concatenate([piece.out.codes for piece in pieces]),
        places=places,
        signs=_join_bits([piece.out.signs for piece in pieces], sent),
        uppers=_join_bits([piece.out.uppers for piece in pieces], sent),
    )


def _join_bits(packed: list[np.ndarray], counts: list[int]) -> np.ndarray:
    """The first `counts[i]` bits of every array, one after the other; the bits behind them are zeros."""
    joined = np.zeros((sum(counts) + 7) // 8 + 1, dtype=np.uint8)  # a byte to spare for the shift
    first = 0
    for bits, count in zip(packed, counts, strict=True):
        _append_bits(joined[first >> 3 :], first & 7, bits[: (count + 7) // 8])
        first += count
    return joined[:-1]


def _append_bits(joined: np.ndarray, shift: int, bits: np.ndarray) -> None:
    """Puts `bits` into `joined` from bit `shift` (0 to 7) on, where only the bits before that are set."""
    if shift == 0:
        joined[: len(bits)] = bits
    else:
        joined[: len(bits)] |= bits << shift
        joined[1 : len(bits) + 1] |= bits >> (8 - shift)


def _put_back(residual: np.ndarray, piece: Piece, masked: bool) -> None:
    """Undoes what a piece has done, exactly: what was sent plus what was left is what there was.

    Looking for infinities in a pass of its own would cost as much time as the whole selection.
    """
    chunks, out, done = piece.chunks, piece.out, piece.done
    counts, lengths = out.counts[:done].astype(np.int64), chunks.lengths[:done]
    if masked:
        positions = mask_positions(out.places, 0, int(lengths.sum()))
    else:
        positions, _ = expand_positions(out.places, counts, lengths)
    values = int(counts.sum())
    upper = unpack_bits(out.uppers, 0, values)
    codes = np.where(upper, np.repeat(out.codes[:done, 1], counts), np.repeat(out.codes[:done, 0], counts))
    sent = np.where(unpack_bits(out.signs, 0, values), np.float32(-1), np.float32(1)) * magnitude_table()[codes]
    moved = np.repeat(chunks.starts[:done] - (np.cumsum(lengths) - lengths), counts)
    residual[positions + moved] += sent


@njit(cache=True, nogil=True)
def _expand(gaps: np.ndarray, counts: np.ndarray, lengths: np.ndarray, positions: np.ndarray) -> int:
    """Fills `positions`; the gap bytes taken, -1 when they end too early, -2 when a value leaves its chunk."""
    taken, value, start = 0, 0, 0
    for c in range(len(counts)):
        position = -1
        for _ in range(counts[c]):
            position += 1
            while taken < len(gaps) and gaps[taken] == ESCAPE and position < CHUNK:
                position += ESCAPE
                taken += 1
            if taken >= len(gaps):
                return -1
            position += gaps[taken]
            taken += 1
            if position >= lengths[c]:
                return -2
            positions[value] = start + position
            value += 1
        start += lengths[c]
    return taken


def expand_positions(gaps: np.ndarray, counts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """`reference.expand_positions`."""
    positions = np.empty(int(counts.sum(dtype=np.int64)), dtype=np.int64)
    taken = _expand(gaps, counts, lengths, positions)
    if taken < 0:
        raise CodecError("the gaps end before the last value" if taken == -1 else "a value lies outside its chunk")
    return positions, int(taken)
