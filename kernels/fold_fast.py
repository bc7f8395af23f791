"""The fold in numba: a few chunks at a time, so that the sum stays in the cache; the same bits as in `fold`.

Without fastmath numba never fuses a multiplication and an addition, so each is rounded, as in numpy. A tensor is one
call, which holds no lock of the interpreter: threads share tensors, and training goes on beside them. Importing this
module needs numba.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit

from tscale.kernels.codec import CHUNK, Decoded
from tscale.kernels.codec.fast_add import Sources, add_chunks, cursors, sources
from tscale.kernels.fold import Arrays, FoldPart, TensorFold, weighted_sum
from tscale.kernels.layout import Layout

# numba's cache doesn't see changes in fast_add.py: df3b0730

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


@njit(cache=True, nogil=True)
def _fold_plain(chunks: tuple, which: Sources, at: np.ndarray, arrays: tuple, eta: np.float32) -> None:
    """One chunked tensor. `chunks`: number of the first one, lengths, where they begin in the flat vector."""
    first, lengths, begin = chunks
    (old,), (new,) = arrays
    buffer, start = np.empty(BLOCK_CHUNKS * CHUNK), 0
    for block in range(0, len(lengths), BLOCK_CHUNKS):
        some = lengths[block : block + BLOCK_CHUNKS]
        stop = start + some.sum()
        sum64 = buffer[: stop - start]
        sum64[:] = 0.0
        add_chunks(sum64, begin + start, (first + block, some), which, at, None)
        _plain(sum64, old[start:stop], new[start:stop], eta)
        start = stop


@njit(cache=True, nogil=True)
def _fold_nesterov(
    chunks: tuple, which: Sources, at: np.ndarray, arrays: tuple, rates: tuple[np.float32, np.float32]
) -> None:
    """`_fold_plain` with momentum."""
    first, lengths, begin = chunks
    old, new = arrays
    buffer, start = np.empty(BLOCK_CHUNKS * CHUNK), 0
    for block in range(0, len(lengths), BLOCK_CHUNKS):
        some = lengths[block : block + BLOCK_CHUNKS]
        stop = start + some.sum()
        sum64 = buffer[: stop - start]
        sum64[:] = 0.0
        add_chunks(sum64, begin + start, (first + block, some), which, at, None)
        some_old, some_new = (old[0][start:stop], old[1][start:stop]), (new[0][start:stop], new[1][start:stop])
        _nesterov(sum64, some_old, some_new, rates[0], rates[1])
        start = stop


def tensor_fold(parts: Sequence[FoldPart], layout: Layout, rates: tuple[np.float32, np.float32]) -> TensorFold:
    """Folds one tensor of decoded `parts`: what `fold` calls for every tensor, from any thread."""
    weighted = [(part.blob, part.weight) for part in parts if isinstance(part.blob, Decoded)]
    which = sources(weighted)

    def fold_tensor(index: int, old: Arrays, new: Arrays) -> None:
        if not weighted or layout.is_small(index):
            outer_step(weighted_sum(parts, index, layout.tensors[index].numel), old, new, rates)
            return
        plan = weighted[0][0].plan
        first, stop = plan.chunk_ranges[plan.chunked.index(index)]
        chunks = (first, plan.lengths_C[first:stop], layout.slices[index].start)
        at = cursors(weighted, index)
        if len(old) == 2:
            _fold_nesterov(chunks, which, at, (old, new), rates)
        else:
            _fold_plain(chunks, which, at, (old, new), rates[0])

    return fold_tensor
