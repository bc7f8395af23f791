"""Which values of the flat vector form which chunk."""

from dataclasses import dataclass

import numpy as np

from tscale.kernels.codec.rung import CHUNK, Rung
from tscale.kernels.layout import Layout

MASK_FROM = 1024  # kept per chunk: from a quarter on, a bit per value is shorter than a byte per gap


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a layout at one rung. C chunks over the chunked tensors, in layout order.

    starts_C: int64, offset of each chunk in the flat vector. lengths_C: int64, 4096 or less for a tensor's last chunk.
    keep_C: int64, the most values of the chunk that may be sent; a short chunk keeps its share, rounded up.
    """

    chunked: tuple[int, ...]  # layout positions
    chunk_ranges: tuple[tuple[int, int], ...]  # per chunked tensor, its first chunk and the one after its last
    small: tuple[int, ...]  # layout positions
    small_numel: int
    starts_C: np.ndarray
    lengths_C: np.ndarray
    keep_C: np.ndarray
    masked: bool  # whether positions travel as a mask instead of gaps

    @property
    def chunks(self) -> int:
        return len(self.starts_C)

    @property
    def chunked_numel(self) -> int:
        return int(self.lengths_C.sum())


def plan_chunks(layout: Layout, rung: Rung) -> ChunkPlan:
    """The chunks of `layout`; a function of its arguments alone, so that both ends agree without sending it."""
    chunked = tuple(i for i in range(len(layout.tensors)) if not layout.is_small(i))
    small = tuple(i for i in range(len(layout.tensors)) if layout.is_small(i))
    ranges, starts, lengths, first = [], [], [], 0
    for position in chunked:
        place = layout.slices[position]
        begins = np.arange(place.start, place.stop, CHUNK, dtype=np.int64)
        starts.append(begins)
        lengths.append(np.minimum(CHUNK, place.stop - begins))
        ranges.append((first, first + len(begins)))
        first += len(begins)
    empty = np.zeros(0, dtype=np.int64)
    lengths_C = np.concatenate([empty, *lengths])
    return ChunkPlan(
        chunked=chunked,
        chunk_ranges=tuple(ranges),
        small=small,
        small_numel=sum(layout.tensors[i].numel for i in small),
        starts_C=np.concatenate([empty, *starts]),
        lengths_C=lengths_C,
        keep_C=-(-rung.kept_per_chunk * lengths_C // CHUNK),
        masked=rung.kept_per_chunk >= MASK_FROM,
    )
