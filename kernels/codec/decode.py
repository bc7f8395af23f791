"""Contribution in, values out, tensor by tensor. Everything is checked before anything is used."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from types import ModuleType

import numpy as np

from tscale.kernels.codec.errors import CodecError
from tscale.kernels.codec.implementation import chunk_coder
from tscale.kernels.codec.magnitudes import CODES, SCALE_BITS, magnitude_table, sequential_sum
from tscale.kernels.codec.plan import ChunkPlan, plan_chunks
from tscale.kernels.codec.rung import CHUNK, Rung, allows
from tscale.kernels.codec.streams import Streams, mask_positions, unpack_bits
from tscale.kernels.codec.wire import read_header, unpack_exact, unpack_streams
from tscale.kernels.layout import Layout


@dataclass(frozen=True)
class TensorPart:
    """Where one chunked tensor's data lie in the streams."""

    chunks: slice
    first_value: int
    values: int
    first_place: int  # gap byte, or mask bit


@dataclass(frozen=True)
class Decoded:
    """A checked contribution, kept about as small as it came; tensors are expanded one at a time.

    Either `streams`, with `plan` and a part per chunked tensor, and `small` (float16, the small tensors), or `exact`
    (float32 [P], over the blob's memory) is there.
    """

    layout: Layout
    rung: Rung
    size_bytes: int
    coder: ModuleType
    plan: ChunkPlan
    streams: Streams | None = None
    small: np.ndarray | None = None
    parts: tuple[TensorPart, ...] = ()
    exact: np.ndarray | None = None

    @cached_property
    def slots(self) -> dict[int, int]:
        """Layout position of a chunked tensor -> its index in `parts`."""
        return {position: slot for slot, position in enumerate(self.plan.chunked)}

    @cached_property
    def small_slices(self) -> dict[int, slice]:
        """Layout position of a small tensor -> its place in the small stream."""
        places, start = {}, 0
        for position in self.plan.small:
            numel = self.layout.tensors[position].numel
            places[position] = slice(start, start + numel)
            start += numel
        return places

    def sparse(self, tensor_index: int) -> tuple[np.ndarray, np.ndarray]:
        """One chunked tensor of a two-bit contribution: int64 [N] ascending positions in it, float32 [N] values."""
        part, streams = self.parts[self.slots[tensor_index]], self._streams()
        positions, _ = _find_places(self.coder, self.plan, streams, part.chunks, part.first_place)
        values = magnitude_table()[self._codes(part)]
        negative = unpack_bits(streams.signs, part.first_value, part.values)
        return positions, np.where(negative, -values, values)

    def signs(self, tensor_index: int) -> tuple[np.ndarray, np.ndarray]:
        """Of one chunked tensor: int64 [N] positions that are sent, and the values' signs, float64 [N]."""
        if self.exact is not None:
            values = self.values(tensor_index)
            return np.arange(len(values)), np.sign(values, dtype=np.float64)
        positions, values = self.sparse(tensor_index)
        return positions, np.sign(values, dtype=np.float64)

    def values(self, tensor_index: int) -> np.ndarray:
        """One tensor as flat float32 [numel]. May be read-only."""
        if self.exact is not None:
            return self.exact[self.layout.slices[tensor_index]]
        if self.small is not None and tensor_index in self.small_slices:
            return self.small[self.small_slices[tensor_index]].astype(np.float32)
        values = np.zeros(self.layout.tensors[tensor_index].numel, dtype=np.float32)
        positions, sent = self.sparse(tensor_index)
        values[positions] = sent
        return values

    def dense(self) -> np.ndarray:
        """All that was sent: float32 [P], zero where nothing was."""
        return np.concatenate([self.values(i) for i in range(len(self.layout.tensors))])

    def add_to(self, acc64: np.ndarray, tensor_index: int, weight: float) -> None:
        """`acc64 += weight * value` for one tensor (float64 [numel], in place); product and sum are rounded apart."""
        if self.exact is None and tensor_index in self.slots:
            positions, values = self.sparse(tensor_index)
            acc64[positions] += weight * values.astype(np.float64)
        else:
            acc64 += weight * self.values(tensor_index).astype(np.float64)

    def rms(self) -> np.ndarray:
        """Root mean square of every tensor's sent values: float64 [T], the same bits on every machine."""
        return np.array([self._tensor_rms(i) for i in range(len(self.layout.tensors))])

    def _tensor_rms(self, tensor_index: int) -> float:
        numel = self.layout.tensors[tensor_index].numel
        if self.exact is None and tensor_index in self.slots:
            return sqrt(_square_steps(self._sent_of_code(tensor_index)) / (numel << (2 * SCALE_BITS)))
        return sqrt(self._plain_sum(tensor_index) / numel)

    def sum_of_squares(self) -> float:
        """Of all sent values, the same bits on every machine."""
        coded = set() if self.exact is not None else set(self.plan.chunked)
        sent_of_code = np.zeros(CODES)
        for index in coded:
            sent_of_code += self._sent_of_code(index)
        total = _square_steps(sent_of_code) / (1 << (2 * SCALE_BITS))
        for index in range(len(self.layout.tensors)):
            total += 0.0 if index in coded else self._plain_sum(index)
        return total

    def _plain_sum(self, tensor_index: int) -> float:
        return sequential_sum(np.square(self.values(tensor_index), dtype=np.float64))

    def _sent_of_code(self, tensor_index: int) -> np.ndarray:
        """How many values of a two-bit tensor are sent with each magnitude: whole numbers in float64 [CODES]."""
        part, streams = self.parts[self.slots[tensor_index]], self._streams()
        counts_C = streams.counts_C[part.chunks].astype(np.int64)
        sends_C, high_C = counts_C > 0, np.zeros_like(counts_C)
        upper = unpack_bits(streams.uppers, part.first_value, part.values)
        high_C[sends_C] = np.add.reduceat(upper, (np.cumsum(counts_C) - counts_C)[sends_C], dtype=np.int64)
        low_code_C, high_code_C = streams.codes_C2[part.chunks].T
        return np.bincount(low_code_C, counts_C - high_C, CODES) + np.bincount(high_code_C, high_C, CODES)

    def sends_zero(self) -> bool:
        """Whether a value is sent with magnitude zero. A look at the chunks settles it for every honest blob."""
        streams = self._streams()
        if not np.any((streams.codes_C2[:, 0] == 0) & (streams.counts_C > 0)):
            return False
        return any(0 in self._codes(part) for part in self.parts)

    def _streams(self) -> Streams:
        assert self.streams is not None
        return self.streams

    def _codes(self, part: TensorPart) -> np.ndarray:
        """Magnitude code of each of the tensor's values, uint8 [N]."""
        streams = self._streams()
        counts, codes_C2 = streams.counts_C[part.chunks], streams.codes_C2[part.chunks]
        upper = unpack_bits(streams.uppers, part.first_value, part.values)
        return np.where(upper, np.repeat(codes_C2[:, 1], counts), np.repeat(codes_C2[:, 0], counts))


def decode(
    blob: bytes, layout: Layout, rung_allowed: Rung | Iterable[Rung] | None = None, impl: str = "auto"
) -> Decoded:
    """Checks and opens a contribution. Raises CodecError for anything that `encode` could not have made for `layout`.

    The header and every length are checked before memory for them is taken; no stream is larger than the layout and the
    rung imply. `rung_allowed` is the rung, or the rungs, that the receiver accepts.
    """
    header = read_header(blob, layout)
    if not allows(header.rung, rung_allowed):
        raise CodecError(f"the swarm doesn't allow {header.rung}")
    plan, coder = plan_chunks(layout, header.rung), chunk_coder(impl)
    if header.rung.exact:
        return Decoded(layout, header.rung, len(blob), coder, plan, exact=unpack_exact(blob, layout))
    streams, small = unpack_streams(blob, header, plan)
    parts, value, place = [], 0, 0
    for first, stop in plan.chunk_ranges:
        chunks = slice(first, stop)
        positions, taken = _find_places(coder, plan, streams, chunks, place)
        parts.append(TensorPart(chunks, value, len(positions), place))
        value, place = value + len(positions), place + taken
    if not plan.masked and place != len(streams.places):
        raise CodecError(f"{len(streams.places) - place} gap bytes are left over")
    decoded = Decoded(layout, header.rung, len(blob), coder, plan, streams, small, tuple(parts))
    if decoded.sends_zero():
        raise CodecError("a value is sent with magnitude zero")
    return decoded


def _find_places(
    coder: ModuleType, plan: ChunkPlan, streams: Streams, chunks: slice, first: int
) -> tuple[np.ndarray, int]:
    """Positions (int64 [N], in the tensor) of one tensor's values, and how many gap bytes or mask bits they take."""
    counts, lengths = streams.counts_C[chunks], plan.lengths_C[chunks]
    if not plan.masked:
        return coder.expand_positions(streams.places[first:], counts, lengths)
    numel = int(lengths.sum())
    positions = mask_positions(streams.places, first, numel)
    if np.any(np.bincount(positions // CHUNK, minlength=len(counts)) != counts):
        raise CodecError("a chunk's count and its mask differ")
    return positions, numel


def _square_steps(sent_of_code: np.ndarray) -> int:
    """Sum of squares of values that are sent with each magnitude so often, in units of 4^-SCALE_BITS, exact."""
    steps = [int(np.ldexp(np.float64(magnitude), SCALE_BITS)) for magnitude in magnitude_table()]
    return sum(int(sent) * step * step for sent, step in zip(sent_of_code, steps, strict=True))


def verify(blob: bytes, layout: Layout, max_rms: float, rung_allowed: Rung | Iterable[Rung] | None = None) -> None:
    """Raises CodecError unless the contribution is well formed and no tensor's root mean square exceeds `max_rms`."""
    worst = decode(blob, layout, rung_allowed).rms()
    position = int(worst.argmax())
    if worst[position] > max_rms:
        name = layout.tensors[position].name
        raise CodecError(f"tensor {name!r} has a root mean square of {worst[position]:.4g}, more than {max_rms:.4g}")


def contribution_bits_per_parameter(blob: bytes, layout: Layout) -> float:
    """What a contribution costs, headers included."""
    return 8 * len(blob) / layout.numel
