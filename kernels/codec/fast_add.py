"""Adding contributions' values to a sum straight from their streams, in numba: no list of positions, any run of chunks.

The same bits as `Decoded.add_to`: weight * value is rounded, then added. The same walk adds votes (a share with the
sign of each value), and then counts what each contribution says of the others'. All contributions of a fold are handed
over in one call, whose arguments are of one type however many they are: their arrays go by address. A call for each
contribution and block took as long as the adding, and threads waited for each other's turn to make it. Importing this
module needs numba.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tscale.kernels.codec.decode import Decoded
from tscale.kernels.codec.magnitudes import magnitude_table
from tscale.kernels.codec.streams import ESCAPE

GAPS, MASK, EXACT, EXACT_SIGNS = range(4)


class Sources(NamedTuple):
    """A contributions and their weights, in a form that numba takes. Valid as long as the decoded ones are kept."""

    kinds: np.ndarray  # int64 [A], how the values are placed
    addresses: np.ndarray  # uint64 [A, 6], of a Coded's arrays but the magnitudes; of the exact values alone
    sizes: np.ndarray  # int64 [A, 6], their numbers of elements
    magnitudes: np.ndarray  # float64 [A, 256] by code, the weight multiplied in; the weight of exact values


class Coded(NamedTuple):
    """The streams of one contribution."""

    number: int  # of the contribution
    counts: np.ndarray  # uint16 [C]
    lows: np.ndarray  # uint8 [C], code of the lower magnitude
    highs: np.ndarray  # uint8 [C]
    places: np.ndarray  # uint8
    signs: np.ndarray  # uint8
    uppers: np.ndarray  # uint8
    magnitudes: np.ndarray  # float64 by code


def sources(weighted: Sequence[tuple[Decoded, float]]) -> Sources:
    """Checked contributions and their weights."""
    count = len(weighted)
    made = Sources(
        kinds=np.empty(count, np.int64),
        addresses=np.zeros((count, 6), np.uint64),
        sizes=np.zeros((count, 6), np.int64),
        magnitudes=np.empty((count, len(magnitude_table()))),
    )
    for number, (decoded, weight) in enumerate(weighted):
        arrays = _arrays(decoded)
        made.kinds[number] = EXACT if len(arrays) == 1 else MASK if decoded.plan.masked else GAPS
        made.magnitudes[number] = weight if len(arrays) == 1 else magnitude_table().astype(np.float64) * weight
        for place, array in enumerate(arrays):
            if not array.flags.c_contiguous:
                raise ValueError("a stream has gaps in memory")
            made.addresses[number, place], made.sizes[number, place] = array.ctypes.data, array.size
    return made


def vote_sources(weighted: Sequence[tuple[Decoded, float]]) -> Sources:
    """Checked contributions and their shares: each value counts as its sign times the share."""
    made = sources(weighted)
    made.kinds[made.kinds == EXACT] = EXACT_SIGNS
    made.magnitudes[:] = np.array([share for _, share in weighted])[:, None]
    return made


def _arrays(decoded: Decoded) -> list[np.ndarray]:
    streams = decoded.streams
    if streams is None:
        assert decoded.exact is not None
        return [decoded.exact]
    lows, highs = streams.codes_C2[:, 0], streams.codes_C2[:, 1]
    return [streams.counts_C, lows, highs, streams.places, streams.signs, streams.uppers]


def cursors(weighted: Sequence[tuple[Decoded, float]], tensor_index: int) -> np.ndarray:
    """Where a chunked tensor's data begin in each: first value, and first gap byte or mask bit. int64 [A, 2]."""
    found = np.zeros((len(weighted), 2), np.int64)
    for number, (decoded, _) in enumerate(weighted):
        if decoded.streams is not None:
            part = decoded.parts[decoded.slots[tensor_index]]
            found[number] = part.first_value, part.first_place
    return found


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@njit(cache=True, nogil=True)
def _bytes(which: Sources, number: int, place: int) -> np.ndarray:
    return carray(_pointer(which.addresses[number, place]), (which.sizes[number, place],), np.uint8)


@njit(cache=True, nogil=True)
def add_chunks(
    sum64: np.ndarray, start: int, chunks: tuple, which: Sources, at: np.ndarray, counts: np.ndarray | None
) -> None:
    """Add a run of chunks of every contribution to `sum64`, in order.

    `chunks` are the number of the first one and the lengths of all of them, `start` is where they begin in the flat
    vector; `at` are the contributions' cursors, moved on. With `counts` (int64 [A, 2]) nothing is added: `sum64` has
    the votes of all, and how many of each contribution's are for and against the others' is added to `counts`.
    """
    first, lengths = chunks
    for number in range(len(which.kinds)):
        magnitudes = which.magnitudes[number]
        if which.kinds[number] >= EXACT:
            values = carray(_pointer(which.addresses[number, 0]), (which.sizes[number, 0],), np.float32)
            some = values[start : start + len(sum64)]
            if which.kinds[number] == EXACT:
                _add_values(sum64, some, magnitudes[0])
            else:
                _add_signs(sum64, some, magnitudes[0], number, counts)
            continue
        sent = carray(_pointer(which.addresses[number, 0]), (which.sizes[number, 0],), np.uint16)
        lows, highs = _bytes(which, number, 1), _bytes(which, number, 2)
        places, signs, uppers = _bytes(which, number, 3), _bytes(which, number, 4), _bytes(which, number, 5)
        coded = Coded(number, sent[first:], lows[first:], highs[first:], places, signs, uppers, magnitudes)
        if which.kinds[number] == MASK:
            _add_masked(sum64, lengths, coded, at[number], counts)
        else:
            _add_gaps(sum64, lengths, coded, at[number], counts)


@njit(cache=True, nogil=True)
def _add_gaps(
    sum64: np.ndarray, lengths: np.ndarray, coded: Coded, cursor: np.ndarray, counts: np.ndarray | None
) -> None:
    """Add chunks of these lengths, or count for and against; `cursor` is the next value and gap byte."""
    value, place = cursor[0], cursor[1]
    start = agree = against = 0
    for c in range(len(lengths)):
        low, high = coded.magnitudes[coded.lows[c]], coded.magnitudes[coded.highs[c]]
        position = start - 1
        for _ in range(coded.counts[c]):
            position += 1
            while coded.places[place] == ESCAPE:
                position += ESCAPE
                place += 1
            position += coded.places[place]
            place += 1
            sent = high if (coded.uppers[value >> 3] >> (value & 7)) & 1 else low
            signed = -sent if (coded.signs[value >> 3] >> (value & 7)) & 1 else sent
            if counts is None:
                sum64[position] += signed
            else:
                side = (sum64[position] - signed) * signed
                agree += side > 0.0
                against += side < 0.0
            value += 1
        start += lengths[c]
    cursor[0], cursor[1] = value, place
    if counts is not None:
        counts[coded.number, 0] += agree
        counts[coded.number, 1] += against


@njit(cache=True, nogil=True)
def _add_masked(
    sum64: np.ndarray, lengths: np.ndarray, coded: Coded, cursor: np.ndarray, counts: np.ndarray | None
) -> None:
    """`_add_gaps` where places are a mask: the cursor's second entry is the next mask bit."""
    value, bit = cursor[0], cursor[1]
    start = agree = against = 0
    for c in range(len(lengths)):
        low, high = coded.magnitudes[coded.lows[c]], coded.magnitudes[coded.highs[c]]
        for position in range(start, start + lengths[c]):
            if (coded.places[bit >> 3] >> (bit & 7)) & 1:
                sent = high if (coded.uppers[value >> 3] >> (value & 7)) & 1 else low
                signed = -sent if (coded.signs[value >> 3] >> (value & 7)) & 1 else sent
                if counts is None:
                    sum64[position] += signed
                else:
                    side = (sum64[position] - signed) * signed
                    agree += side > 0.0
                    against += side < 0.0
                value += 1
            bit += 1
        start += lengths[c]
    cursor[0], cursor[1] = value, bit
    if counts is not None:
        counts[coded.number, 0] += agree
        counts[coded.number, 1] += against


@njit(cache=True, nogil=True)
def _add_values(sum64: np.ndarray, values: np.ndarray, weight: float) -> None:
    """`sum64 += weight * values`, float64 and float32 [N], without a temporary."""
    for i in range(len(sum64)):
        product = weight * np.float64(values[i])
        sum64[i] += product


@njit(cache=True, nogil=True)
def _add_signs(sum64: np.ndarray, values: np.ndarray, share: float, number: int, counts: np.ndarray | None) -> None:
    """`sum64 += share * sign(values)`, or count for and against."""
    for i in range(len(sum64)):
        signed = share * np.sign(np.float64(values[i]))
        if counts is None:
            sum64[i] += signed
        else:
            side = (sum64[i] - signed) * signed
            counts[number, 0] += side > 0.0
            counts[number, 1] += side < 0.0
