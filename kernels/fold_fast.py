"""The fold in numba: a few chunks at a time, so that the sum stays in the cache; the same bits as in `fold`.

Without fastmath numba never fuses a multiplication and an addition, so each is rounded, as in numpy. Importing this
module needs numba.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit

from tscale.kernels.codec import CHUNK, Decoded
from tscale.kernels.codec.fast_add import Coded, add_gaps, add_masked, add_values, weighted
from tscale.kernels.fold import Arrays, FoldPart, TensorFold, weighted_sum
from tscale.kernels.layout import Layout

BLOCK_CHUNKS = 32  # 1 MiB of float64


@njit(cache=True, nogil=True)
def _plain(sum64: np.ndarray, anchor: np.ndarray, new_anchor: np.ndarray, eta: np.float32) -> None:
    for i in range(len(sum64)):
        new_anchor[i] = anchor[i] - eta * np.float32(sum64[i])


@njit(cache=True, nogil=True)
def _nesterov(sum64: np.ndarray, old: Arrays, new: Arrays, eta: np.float32, mu: np.float32) -> None:
    for i in range(len(sum64)):
        direction = np.float32(sum64[i])
        momentum = mu * old[1][i] + direction
        new[1][i] = momentum
        new[0][i] = old[0][i] - eta * (direction + mu * momentum)


def outer_step(sum64: np.ndarray, old: Arrays, new: Arrays, rates: tuple[np.float32, np.float32]) -> None:
    """`fold.outer_step`."""
    if len(old) == 2:
        _nesterov(sum64, old, new, *rates)
    else:
        _plain(sum64, old[0], new[0], rates[0])


class Addend:
    """One contribution with its weight, to be added from anywhere."""

    def __init__(self, decoded: Decoded, weight: float) -> None:
        self.decoded = decoded
        self.weight = weight
        self._coded: Coded | None = None if decoded.streams is None else weighted(decoded.streams, weight)

    def cursor(self, tensor_index: int) -> np.ndarray:
        """Where a chunked tensor's data begin: its first value, and its first gap byte or mask bit. int64 [2]."""
        if self._coded is None:
            return np.zeros(2, np.int64)
        part = self.decoded.parts[self.decoded.slots[tensor_index]]
        return np.array([part.first_value, part.first_place], np.int64)

    def add_chunks(self, sum64: np.ndarray, first: int, lengths: np.ndarray, cursor: np.ndarray) -> None:
        """Add the chunks `first` and on, as many as there are `lengths`; `cursor` moves on."""
        if self._coded is None:
            start = int(self.decoded.plan.starts_C[first])
            assert self.decoded.exact is not None
            add_values(sum64, self.decoded.exact[start : start + len(sum64)], self.weight)
        else:
            add = add_masked if self.decoded.plan.masked else add_gaps
            add(sum64, lengths, self._coded, first, cursor)


def tensor_fold(parts: Sequence[FoldPart], layout: Layout, rates: tuple[np.float32, np.float32]) -> TensorFold:
    """Folds one tensor of decoded `parts`: what `fold` calls for every tensor, from any thread."""
    addends = [Addend(part.blob, part.weight) for part in parts if isinstance(part.blob, Decoded)]

    def fold_tensor(index: int, old: Arrays, new: Arrays) -> None:
        if addends and not layout.is_small(index):
            _fold_chunked(addends, index, (old, new), rates)
        else:
            outer_step(weighted_sum(parts, index, layout.tensors[index].numel), old, new, rates)

    return fold_tensor


def _fold_chunked(
    addends: Sequence[Addend], index: int, arrays: tuple[Arrays, Arrays], rates: tuple[np.float32, np.float32]
) -> None:
    """Sum and outer step of one chunked tensor, a block of chunks at a time."""
    plan, (old, new) = addends[0].decoded.plan, arrays
    first_chunk, stop_chunk = plan.chunk_ranges[plan.chunked.index(index)]
    cursors = [addend.cursor(index) for addend in addends]
    buffer, start = np.empty(BLOCK_CHUNKS * CHUNK), 0
    for first in range(first_chunk, stop_chunk, BLOCK_CHUNKS):
        lengths = plan.lengths_C[first : min(first + BLOCK_CHUNKS, stop_chunk)]
        block = slice(start, start + int(lengths.sum()))
        sum64 = buffer[: block.stop - block.start]
        sum64.fill(0.0)
        for addend, cursor in zip(addends, cursors, strict=True):
            addend.add_chunks(sum64, first, lengths, cursor)
        outer_step(sum64, tuple(array[block] for array in old), tuple(array[block] for array in new), rates)
        start = block.stop
