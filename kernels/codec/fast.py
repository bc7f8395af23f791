"""The chunk coder in numba: the same streams as `reference`, bit for bit, several times faster than a top-k selection.

Selection works on the absolute values' bits (as int32 they sort like the values). The previous chunk's threshold is
moved until it lets a few times `keep` values through, those are gathered, and bisection over their bits gives the exact
threshold. No parallel loops (training owns the cores), and the GIL is released. Importing this module needs numba.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from tscale.kernels.codec.errors import CodecError
from tscale.kernels.codec.magnitudes import BIAS, CODES, HALF_STEP, REACH, SHIFT, SPLIT_ABOVE_MEAN, magnitude_table
from tscale.kernels.codec.plan import ChunkPlan
from tscale.kernels.codec.rung import CHUNK
from tscale.kernels.codec.streams import ESCAPE, Streams, mask_positions, unpack_bits

MAGNITUDE_MASK = 0x7FFFFFFF
LARGEST_FINITE = 0x7F7FFFFF
MARGIN = 1 << 19  # the next chunk's first threshold lies about 5 % under this one's
STEP = 1 << 20
ENOUGH = 3  # times `keep` candidates are few enough to gather


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


class Scratch(NamedTuple):
    """Buffers of one chunk."""

    bits: np.ndarray  # int32 [CHUNK], absolute values as bits
    flags: np.ndarray  # uint8 [CHUNK], whether a value is a candidate
    groups: np.ndarray  # int32 [CHUNK / 8 + 1], groups of eight values with a candidate
    where: np.ndarray  # int32 [CHUNK + 1], candidates' positions
    chosen: np.ndarray  # int32 [CHUNK], candidates' bits
    rounded: np.ndarray  # float32 [1], for looking at a mean's bits


@njit(cache=True, nogil=True)
def _count(bits: np.ndarray, limit: np.int32) -> int:
    total = 0
    for i in range(len(bits)):
        total += bits[i] >= limit
    return total


@njit(cache=True, nogil=True)
def _largest(bits: np.ndarray) -> np.int32:
    worst = np.int32(0)
    for i in range(len(bits)):
        worst = max(worst, bits[i])
    return worst


@njit(cache=True, nogil=True)
def _gather(bits: np.ndarray, limit: np.int32, scratch: Scratch) -> np.int64:
    """Leaves the positions of the values of at least `limit` in scratch.where; how many.

    Without a branch on the data: flags, then the groups of eight that have one, then the flagged ones of these.
    """
    where, flags, groups = scratch.where, scratch.flags, scratch.groups
    for i in range(len(bits)):
        flags[i] = bits[i] >= limit
    stop = (len(bits) + 7) // 8
    for i in range(len(bits), 8 * stop):
        flags[i] = 0
    eights = flags.view(np.uint64)
    hit = np.uint64(0)
    for group in range(stop):
        groups[hit] = group
        hit += np.uint64(eights[group] != 0)
    found = np.uint64(0)
    for g in range(np.int64(hit)):
        for i in range(8 * groups[g], 8 * groups[g] + 8):
            where[found] = i
            found += np.uint64(flags[i])
    return np.int64(found)


@njit(cache=True, nogil=True)
def _loose_limit(bits: np.ndarray, keep: int, guess: int, largest: int) -> int:
    """A limit that at least `keep` values reach and not many more, or 1 when no more than `keep` are non-zero."""
    low, high = 1, largest + 1
    limit = min(max(guess, low), largest)
    step = STEP
    while high - low > 1:
        count = _count(bits, np.int32(limit))
        if keep <= count <= ENOUGH * keep:
            return limit
        if count < keep:
            high = limit
            limit -= step
        else:
            low = limit
            limit += step
        step *= 2
        if not low < limit < high:
            limit = (low + high) // 2
    return low


@njit(cache=True, nogil=True)
def _exact_limit(candidates: np.ndarray, keep: int, low: int, high: int) -> int:
    """The `keep`-th largest: the greatest limit that `keep` values still reach (low is reached, high is not)."""
    while high - low > 1:
        middle = (low + high) // 2
        if _count(candidates, np.int32(middle)) >= keep:
            low = middle
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _select(bits: np.ndarray, keep: int, guess: int, largest: int, scratch: Scratch) -> tuple[int, int]:
    """Leaves the `keep` largest in scratch.where and scratch.chosen; how many, and a guess for the next chunk."""
    where, chosen = scratch.where, scratch.chosen
    limit = _loose_limit(bits, keep, guess, largest)
    found = _gather(bits, np.int32(limit), scratch)
    for j in range(found):
        chosen[j] = bits[where[j]]
    if found <= keep:
        return found, (limit if limit > 1 else guess)
    exact = _exact_limit(chosen[:found], keep, limit, largest + 1)
    ties = keep - _count(chosen[:found], np.int32(exact + 1))
    kept = 0
    for j in range(found):
        value = chosen[j]
        if value > exact or (value == exact and ties > 0):
            ties -= value == exact
            where[kept] = where[j]
            chosen[kept] = value
            kept += 1
    return kept, exact - MARGIN


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
        largest = np.int64(_largest(bits))
        if largest > LARGEST_FINITE:
            return c, sent, gap
        cursor = Cursor(sent, gap, bit)
        bit += len(raw)
        if largest == 0:
            continue
        found, guess = _select(bits, chunks.keep[c], guess, largest, scratch)
        low, high = _choose_codes(scratch.chosen[:found].view(np.float32), scratch.rounded)
        out.codes[c, 0], out.codes[c, 1] = low, high
        sent, gap = _emit(values, scratch, (table[low], table[high], found), out, cursor, masked)
        out.counts[c] = sent - cursor.sent
    return len(chunks.starts), sent, gap


def encode_chunks(residual: np.ndarray, plan: ChunkPlan) -> Streams:
    """`reference.encode_chunks`: same bytes, same changes to `residual` (float32 [P]), same error."""
    most, mask_bytes = int(plan.keep_C.sum()), (plan.chunked_numel + 7) // 8
    out = Output(
        counts=np.zeros(plan.chunks, dtype=np.uint16),
        codes=np.zeros((plan.chunks, 2), dtype=np.uint8),
        places=np.zeros(mask_bytes if plan.masked else most + int((plan.lengths_C // ESCAPE).sum()), dtype=np.uint8),
        signs=np.zeros((most + 7) // 8, dtype=np.uint8),
        uppers=np.zeros((most + 7) // 8, dtype=np.uint8),
    )
    scratch = Scratch(
        bits=np.empty(CHUNK, dtype=np.int32),
        flags=np.empty(CHUNK, dtype=np.uint8),
        groups=np.empty(CHUNK // 8 + 1, dtype=np.int32),
        where=np.empty(CHUNK + 1, dtype=np.int32),
        chosen=np.empty(CHUNK, dtype=np.int32),
        rounded=np.empty(1, dtype=np.float32),
    )
    chunks = Chunks(plan.starts_C, plan.lengths_C, plan.keep_C)
    done, sent, gap = _encode(residual, chunks, magnitude_table(), scratch, out, plan.masked)
    if done < plan.chunks:
        _put_back(residual, plan, out, done)
        raise CodecError("the residual has a value that isn't finite")
    flag_bytes = (sent + 7) // 8
    return Streams(
        counts_C=out.counts,
        codes_C2=out.codes,
        places=out.places if plan.masked else out.places[:gap],
        signs=out.signs[:flag_bytes],
        uppers=out.uppers[:flag_bytes],
    )


def _put_back(residual: np.ndarray, plan: ChunkPlan, out: Output, done: int) -> None:
    """Undoes the first `done` chunks, exactly: what was sent plus what was left is what there was.

    Looking for infinities in a pass of its own would cost as much time as the whole selection.
    """
    counts, lengths = out.counts[:done].astype(np.int64), plan.lengths_C[:done]
    if plan.masked:
        positions = mask_positions(out.places, 0, int(lengths.sum()))
    else:
        positions, _ = expand_positions(out.places, counts, lengths)
    values = int(counts.sum())
    upper = unpack_bits(out.uppers, 0, values)
    codes = np.where(upper, np.repeat(out.codes[:done, 1], counts), np.repeat(out.codes[:done, 0], counts))
    sent = np.where(unpack_bits(out.signs, 0, values), np.float32(-1), np.float32(1)) * magnitude_table()[codes]
    moved = np.repeat(plan.starts_C[:done] - (np.cumsum(lengths) - lengths), counts)
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
