"""The screen's votes in numba: a few chunks at a time, so that they stay in the cache; the same counts as in `screen`.

A tensor is one call, which holds no lock of the interpreter. Importing this module needs numba.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit

from tscale.kernels.codec import CHUNK, Decoded
from tscale.kernels.codec.fast_add import Sources, add_chunks, cursors, vote_sources
from tscale.kernels.fold_fast import BLOCK_CHUNKS
from tscale.kernels.layout import Layout
from tscale.kernels.screen import Counter

# numba's cache doesn't see changes in fast_add.py: df3b0730
# numba's cache doesn't see changes in fold_fast.py: 3aca1a44


@njit(cache=True, nogil=True)
def _count(chunks: tuple, which: Sources, at: np.ndarray, counts: np.ndarray) -> None:
    """One chunked tensor. `chunks`: number of the first one, lengths, where they begin in the flat vector."""
    first, lengths, begin = chunks
    buffer, start = np.empty(BLOCK_CHUNKS * CHUNK), 0
    for block in range(0, len(lengths), BLOCK_CHUNKS):
        some = lengths[block : block + BLOCK_CHUNKS]
        stop = start + some.sum()
        votes, before = buffer[: stop - start], at.copy()
        votes[:] = 0.0
        add_chunks(votes, begin + start, (first + block, some), which, at, None)
        add_chunks(votes, begin + start, (first + block, some), which, before, counts)
        start = stop


def tensor_counter(decoded: Sequence[Decoded], votes: Sequence[int], layout: Layout) -> Counter:
    """Counts one chunked tensor's values for and against the others' votes, from any thread."""
    weighted = [(one, float(vote)) for one, vote in zip(decoded, votes, strict=True)]
    which = vote_sources(weighted)

    def count_tensor(index: int) -> np.ndarray:
        plan = weighted[0][0].plan
        first, stop = plan.chunk_ranges[plan.chunked.index(index)]
        counts = np.zeros((len(weighted), 2), np.int64)
        _count((first, plan.lengths_C[first:stop], layout.slices[index].start), which, cursors(weighted, index), counts)
        return counts

    return count_tensor
