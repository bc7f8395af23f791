"""Selecting a chunk's largest values in numba, faster than a top-k selection.

Absolute values' bits sort like the values (as int32). The previous chunk's threshold is moved until it lets a few times
`keep` values through, those are gathered, and bisection over their bits gives the exact threshold. Importing this
module needs numba.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from tscale.kernels.codec.rung import CHUNK

MARGIN = 1 << 19  # the next chunk's first threshold lies about 5 % under this one's
STEP = 1 << 20
ENOUGH = 3  # times `keep` candidates are few enough to gather


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
def largest_bits(bits: np.ndarray) -> np.int32:
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
def select_largest(bits: np.ndarray, keep: int, guess: int, largest: int, scratch: Scratch) -> tuple[int, int]:
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


def new_scratch() -> Scratch:
    """Buffers for one thread."""
    return Scratch(
        bits=np.empty(CHUNK, dtype=np.int32),
        flags=np.empty(CHUNK, dtype=np.uint8),
        groups=np.empty(CHUNK // 8 + 1, dtype=np.int32),
        where=np.empty(CHUNK + 1, dtype=np.int32),
        chosen=np.empty(CHUNK, dtype=np.int32),
        rounded=np.empty(1, dtype=np.float32),
    )
