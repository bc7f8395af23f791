"""The chunk coder on a GPU: the same streams as `codec.reference`, bit for bit.

The residual stays in host memory. Groups of chunks are copied to the card, which selects and quantizes; what it chose
comes back, and the host packs it and takes it out of the residual. So the card holds one group, and the residual is
untouched until every value of it was found finite.
"""

from typing import NamedTuple

import numpy as np
import torch

from tscale.kernels.codec.encode import encode
from tscale.kernels.codec.errors import CodecError
from tscale.kernels.codec.magnitudes import magnitude_table
from tscale.kernels.codec.plan import ChunkPlan
from tscale.kernels.codec.reference import expand_positions
from tscale.kernels.codec.rung import Rung
from tscale.kernels.codec.streams import Streams, gap_bytes, pack_bits
from tscale.kernels.gpu.builds import CHUNK_LANES, choose_build, select_build
from tscale.kernels.layout import Layout

__all__ = ["encode_chunks", "encode_delta", "expand_positions"]

GROUP_VALUES = 1 << 24  # of the residual on the card at a time: 64 MB, and at most 112 MB of candidates
SENT, UPPER, NEGATIVE = 1, 2, 4  # bits of a candidate's flag, as in delta_kernels


class Group(NamedTuple):
    """What was chosen in some chunks. c chunks, n sent values in the order of chunks and positions."""

    counts: np.ndarray  # int64 [c], sent values per chunk
    codes: np.ndarray  # uint8 [c, 2]
    positions: np.ndarray  # int16 [n], within the chunk
    flags: np.ndarray  # uint8 [n]


def encode_delta(residual: np.ndarray, layout: Layout, rung: Rung) -> bytes:
    """`codec.encode` with the selection on the GPU: the same bytes, the same residual left, the same errors."""
    return encode(residual, layout, rung, impl="triton")


def encode_chunks(residual: np.ndarray, plan: ChunkPlan, threads: int = 1) -> Streams:
    """`reference.encode_chunks` on the GPU: same bytes, same changes to `residual` (float32 [P]), same error.

    Raises ImportError where Triton is missing. `threads` is for the CPU's twin.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU serves Triton's interpreter
    groups = [_choose(residual, plan, chunks, device) for chunks in _groups(plan)]
    counts = _joined([group.counts for group in groups], np.int64)
    codes_C2 = _joined([group.codes for group in groups], np.uint8).reshape(-1, 2)
    positions = _joined([group.positions for group in groups], np.int16).astype(np.int64)
    flags = _joined([group.flags for group in groups], np.uint8)
    upper, negative = (flags & UPPER) > 0, (flags & NEGATIVE) > 0
    levels = magnitude_table()[np.where(upper, np.repeat(codes_C2[:, 1], counts), np.repeat(codes_C2[:, 0], counts))]
    residual[positions + np.repeat(plan.starts_C, counts)] -= np.where(negative, -levels, levels)
    return Streams(
        counts_C=counts.astype(np.uint16),
        codes_C2=codes_C2,
        places=_mask(positions, counts, plan) if plan.masked else _gaps(positions, counts),
        signs=pack_bits(negative),
        uppers=pack_bits(upper),
    )


def _groups(plan: ChunkPlan) -> list[slice]:
    """Runs of chunks that span at most GROUP_VALUES of the flat vector (one chunk at least)."""
    groups, first = [], 0
    ends_C = plan.starts_C + plan.lengths_C
    while first < plan.chunks:
        stop = int(np.searchsorted(ends_C, plan.starts_C[first] + GROUP_VALUES, side="right"))
        groups.append(slice(first, max(stop, first + 1)))
        first = groups[-1].stop
    return groups


def _choose(residual: np.ndarray, plan: ChunkPlan, chunks: slice, device: torch.device) -> Group:
    """Selects and quantizes one group. Raises CodecError when a value of it isn't finite."""
    starts, lengths, keeps = plan.starts_C[chunks], plan.lengths_C[chunks], plan.keep_C[chunks]
    width, count = int(keeps.max()), len(starts)
    span = residual[starts[0] : starts[-1] + lengths[-1]]
    values = torch.from_numpy(span.view(np.int32)).to(device)
    tables = (
        torch.from_numpy(starts - starts[0]).to(device),
        torch.from_numpy(lengths.astype(np.int32)).to(device),
        torch.from_numpy(keeps.astype(np.int32)).to(device),
    )
    positions = torch.empty((count, width), dtype=torch.int16, device=device)
    kept = torch.empty((count, width), dtype=torch.int32, device=device)
    found = torch.empty(count, dtype=torch.int32, device=device)
    select_build().launch((count,), values, *tables, positions, kept, found, width)
    if int(found.min()) < 0:
        raise CodecError("the residual has a value that isn't finite")
    codes = torch.empty((count, 2), dtype=torch.uint8, device=device)
    flags = torch.zeros((count, width), dtype=torch.uint8, device=device)
    grid = (-(-count // CHUNK_LANES),)
    choose_build().launch(grid, kept.view(torch.float32), found, codes, flags, count, width)
    sent = (flags & SENT) > 0
    per_chunk = sent.sum(dim=1, dtype=torch.int64)
    return Group(*(part.cpu().numpy() for part in (per_chunk, codes, positions[sent], flags[sent])))


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=dtype), *(part.reshape(-1) for part in parts)])


def _gaps(positions: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Gap bytes of all chunks; as if the chunks lay one behind another and each began behind the last sent value."""
    if not len(positions):
        return gap_bytes(positions)
    last = np.zeros(len(counts), dtype=np.int64)  # per chunk, the room that it takes
    some = counts > 0
    last[some] = positions[np.cumsum(counts)[some] - 1] + 1
    return gap_bytes(positions + np.repeat(np.cumsum(last) - last, counts))


def _mask(positions: np.ndarray, counts: np.ndarray, plan: ChunkPlan) -> np.ndarray:
    """One bit per value of all chunks."""
    flags = np.zeros(plan.chunked_numel, dtype=bool)
    flags[positions + np.repeat(np.cumsum(plan.lengths_C) - plan.lengths_C, counts)] = True
    return pack_bits(flags)
