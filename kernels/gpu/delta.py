"""The chunk coder on a GPU: the same streams as `codec.reference`, bit for bit.

The residual stays in host memory. Groups of chunks are copied to the card, which selects, quantizes and writes the
gaps; what was chosen comes back and is taken out of the residual. So the card holds one group at a time.
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
from tscale.kernels.codec.streams import ESCAPE, Streams, pack_bits
from tscale.kernels.gpu.builds import CHUNK_LANES, choose_build, select_build
from tscale.kernels.layout import Layout

__all__ = ["encode_chunks", "encode_delta", "expand_positions"]

GROUP_VALUES = 1 << 24  # of the residual on the card at a time: 64 MB, and at most 112 MB of candidates
SENT, UPPER, NEGATIVE = 1, 2, 4  # bits of a candidate's flag, as in delta_kernels


class Group(NamedTuple):
    """What is sent of some chunks, in host memory. c chunks, n values in the order of chunks and positions."""

    chunks: slice
    counts: np.ndarray  # int64 [c], sent values per chunk
    codes: np.ndarray  # uint8 [c, 2]
    places: np.ndarray  # gap bytes, uint8; or bool, one per value of the chunks
    upper: np.ndarray  # bool [n]
    negative: np.ndarray  # bool [n]


class Chosen(NamedTuple):
    """What is sent of some chunks, on the device; names as in Group."""

    counts: torch.Tensor
    codes: torch.Tensor
    chunk: torch.Tensor  # int64 [n], each value's chunk
    position: torch.Tensor  # int64 [n], within it
    upper: torch.Tensor
    negative: torch.Tensor


def encode_delta(residual: np.ndarray, layout: Layout, rung: Rung) -> bytes:
    """`codec.encode` with the selection on the GPU: the same bytes, the same residual left, the same errors."""
    return encode(residual, layout, rung, impl="triton")


def encode_chunks(residual: np.ndarray, plan: ChunkPlan, threads: int = 1) -> Streams:
    """`reference.encode_chunks` on the GPU: same bytes, same changes to `residual` (float32 [P]), same error.

    Raises ImportError where Triton is missing. `threads` is for the CPU's twin.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU serves Triton's interpreter
    groups: list[Group] = []
    try:
        for chunks in _groups(plan):
            groups.append(_take(residual, plan, chunks, device))
    except CodecError:
        for group in groups:
            _put_back(residual, plan, group)
        raise
    places = _joined([group.places for group in groups], bool if plan.masked else np.uint8)
    return Streams(
        counts_C=_joined([group.counts for group in groups], np.int64).astype(np.uint16),
        codes_C2=_joined([group.codes for group in groups], np.uint8).reshape(-1, 2),
        places=pack_bits(places) if plan.masked else places,
        signs=pack_bits(_joined([group.negative for group in groups], bool)),
        uppers=pack_bits(_joined([group.upper for group in groups], bool)),
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


def _take(residual: np.ndarray, plan: ChunkPlan, chunks: slice, device: torch.device) -> Group:
    """Chooses what is sent of one group and takes it out of the residual. CodecError: a value isn't finite."""
    starts, lengths = plan.starts_C[chunks], plan.lengths_C[chunks]
    span = residual[starts[0] : starts[-1] + lengths[-1]]
    starts_c, lengths_c = (torch.from_numpy(array).to(device) for array in (starts - starts[0], lengths))
    keeps_c = torch.from_numpy(plan.keep_C[chunks]).to(device)
    chosen = _choose(torch.from_numpy(span.view(np.int32)).to(device), starts_c, lengths_c, keeps_c)
    levels = torch.from_numpy(magnitude_table()).to(device)[chosen.codes[chosen.chunk, chosen.upper.long()].long()]
    sent = torch.where(chosen.negative, -levels, levels)
    span[(starts_c[chosen.chunk] + chosen.position).cpu().numpy()] -= sent.cpu().numpy()
    if plan.masked:
        before = torch.cumsum(lengths_c, dim=0) - lengths_c
        places = torch.zeros(int(lengths.sum()), dtype=torch.bool, device=device)
        places[before[chosen.chunk] + chosen.position] = True
    else:
        places = _gaps(chosen.chunk, chosen.position)
    parts = (chosen.counts, chosen.codes, places, chosen.upper, chosen.negative)
    return Group(chunks, *(part.cpu().numpy() for part in parts))


def _choose(values: torch.Tensor, starts_c: torch.Tensor, lengths_c: torch.Tensor, keeps_c: torch.Tensor) -> Chosen:
    """Runs the two kernels on a group's values (int32, the bits). Raises CodecError."""
    device, count, width = values.device, len(starts_c), int(keeps_c.max())
    positions = torch.empty((count, width), dtype=torch.int16, device=device)
    kept = torch.empty((count, width), dtype=torch.int32, device=device)
    found = torch.empty(count, dtype=torch.int32, device=device)
    select_build().launch((count,), values, starts_c, lengths_c.int(), keeps_c.int(), positions, kept, found, width)
    if int(found.min()) < 0:
        raise CodecError("the residual has a value that isn't finite")
    codes = torch.empty((count, 2), dtype=torch.uint8, device=device)
    flags = torch.zeros((count, width), dtype=torch.uint8, device=device)
    grid = (-(-count // CHUNK_LANES),)
    choose_build().launch(grid, kept.view(torch.float32), found, codes, flags, count, width)
    sent = (flags & SENT) > 0
    flag = flags[sent]
    return Chosen(
        counts=sent.sum(dim=1),
        codes=codes,
        chunk=torch.nonzero(sent)[:, 0],
        position=positions[sent].long(),
        upper=(flag & UPPER) > 0,
        negative=(flag & NEGATIVE) > 0,
    )


def _put_back(residual: np.ndarray, plan: ChunkPlan, group: Group) -> None:
    """Undoes `_take`, exactly: what was sent plus what was left is what there was."""
    starts, lengths = plan.starts_C[group.chunks], plan.lengths_C[group.chunks]
    if plan.masked:
        positions = np.flatnonzero(group.places)
    else:
        positions, _ = expand_positions(group.places, group.counts, lengths)
    low, high = np.repeat(group.codes, group.counts, axis=0).T
    levels = magnitude_table()[np.where(group.upper, high, low)]
    moved = np.repeat(starts - (np.cumsum(lengths) - lengths), group.counts)
    residual[positions + moved] += np.where(group.negative, -levels, levels)


def _gaps(chunk: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """`streams.gap_bytes` of several chunks' sent values, which lie in the order of chunks and positions: uint8."""
    before = torch.full_like(position, -1)
    before[1:] = torch.where(chunk[1:] == chunk[:-1], position[:-1], before[1:])
    gaps = position - before - 1
    ends = torch.cumsum(gaps // ESCAPE + 1, dim=0)
    coded = torch.full((int(ends[-1]) if len(ends) else 0,), ESCAPE, dtype=torch.uint8, device=chunk.device)
    coded[ends - 1] = (gaps % ESCAPE).to(torch.uint8)
    return coded


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=dtype), *(part.reshape(-1) for part in parts)])
