"""The activations between layers, and their gradients, of every micro-batch: on the device or in host memory.

Suffixes: D width, T positions, M = rows * T. A state is kept by its layer and its range of sequences (rows). States
of one key are written range by range and read by the same ranges or by parts of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import Protocol

import torch

from tscale.kernels.offload.transfer import Pieces, Slot, Ticket, Transfer

Ranges = tuple[range, ...]
Memory = Callable[[int], torch.Tensor]
Stream = Generator[tuple[range, Pieces], None, None]
_AHEAD = 2
"""Micro-batches on the device at once: one is computed with, one is on its way in; as many may be on their way out."""


def micro_batches(rows: int, micro_rows: int) -> Ranges:
    """`rows` sequences in ranges of at most `micro_rows`."""
    return tuple(range(start, min(start + micro_rows, rows)) for start in range(0, rows, micro_rows))


def halves(rows: range) -> Ranges:
    """Two ranges of about equal length; one when there is only one row."""
    middle = rows.start + (len(rows) + 1) // 2
    return (rows,) if len(rows) < 2 else (range(rows.start, middle), range(middle, rows.stop))


class Boundary(Protocol):
    """Where the states are."""

    def put(self, key: Hashable, rows: range, state_DM: torch.Tensor) -> None:
        """Keep a state; the tensor must not change afterwards."""
        ...

    def stream(self, keys: tuple[Hashable, ...], ranges: Ranges) -> Stream:
        """For each range, the states of all keys on the device, in use until the next is asked for.

        Close it before another is opened.
        """
        ...

    def drop(self, key: Hashable) -> None:
        """Forget the states of a key, if there are any."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


def _columns(chunk: range, rows: range, positions: int) -> slice:
    return slice((rows.start - chunk.start) * positions, (rows.stop - chunk.start) * positions)


def _covering(chunks: dict[range, torch.Tensor], rows: range) -> range:
    for chunk in chunks:
        if chunk.start <= rows.start and rows.stop <= chunk.stop:
            return chunk
    raise KeyError(f"no state holds the rows {rows.start} to {rows.stop}")


class DeviceBoundary:
    """All states stay where they were computed."""

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._states: dict[Hashable, dict[range, torch.Tensor]] = {}

    def put(self, key: Hashable, rows: range, state_DM: torch.Tensor) -> None:
        """As Boundary."""
        self._states.setdefault(key, {})[rows] = state_DM

    def stream(self, keys: tuple[Hashable, ...], ranges: Ranges) -> Stream:
        """As Boundary."""
        for rows in ranges:
            yield rows, tuple(self._part(self._states[key], rows) for key in keys)

    def drop(self, key: Hashable) -> None:
        """As Boundary."""
        self._states.pop(key, None)

    def clear(self) -> None:
        """As Boundary."""
        self._states.clear()

    def _part(self, chunks: dict[range, torch.Tensor], rows: range) -> torch.Tensor:
        chunk = _covering(chunks, rows)
        return chunks[chunk][:, _columns(chunk, rows, self._positions)].contiguous()


class HostBoundary:
    """States go to host memory as soon as they are computed and come back one micro-batch ahead.

    The batch has `rows` sequences of `row_shape` (width, positions), at most `micro_rows` at a time. `memory` makes
    host tensors of float32 [numel] (None: the transfer's); they are taken as needed and used again.
    """

    def __init__(
        self,
        transfer: Transfer,
        row_shape: tuple[int, int],
        rows: int,
        micro_rows: int,
        memory: Memory | None = None,
    ) -> None:
        self._transfer = transfer
        self._memory = memory or transfer.host
        self._positions = row_shape[1]
        self._row_numel = row_shape[0] * row_shape[1]
        self._rows = rows
        self._slots = [[transfer.slot(micro_rows * self._row_numel) for _ in range(_AHEAD)] for _ in range(2)]
        self._arrays: dict[Hashable, torch.Tensor] = {}
        self._states: dict[Hashable, dict[range, torch.Tensor]] = {}
        self._written: dict[tuple[Hashable, range], Ticket] = {}
        self._spare: list[torch.Tensor] = []
        self._leaving: deque[Ticket] = deque()

    def put(self, key: Hashable, rows: range, state_DM: torch.Tensor) -> None:
        """As Boundary."""
        if key not in self._arrays:
            self._arrays[key] = self._spare.pop() if self._spare else self._transfer.host(self._rows * self._row_numel)
        place = self._arrays[key][rows.start * self._row_numel : rows.stop * self._row_numel]
        host_DM = place.view(state_DM.shape)
        while len(self._leaving) >= _AHEAD:
            self._transfer.finish(self._leaving.popleft())
        ticket = self._transfer.to_host((state_DM,), (host_DM,))
        self._leaving.append(ticket)
        self._states.setdefault(key, {})[rows] = host_DM
        self._written[key, rows] = ticket

    def stream(self, keys: tuple[Hashable, ...], ranges: Ranges) -> Stream:
        """As Boundary."""
        loads: deque[list[tuple[Slot, Ticket]]] = deque()
        try:
            for place, rows in enumerate(ranges):
                if not loads:
                    loads.append(self._fetch(keys, rows, place))
                if place + 1 < len(ranges):
                    loads.append(self._fetch(keys, ranges[place + 1], place + 1))
                for _, ticket in loads[0]:
                    self._transfer.wait(ticket)
                yield rows, tuple(slot.pieces[0].contiguous() for slot, _ in loads[0])
                self._give_back(loads.popleft())
        finally:
            for load in loads:
                for _, ticket in load:
                    self._transfer.wait(ticket)
                self._give_back(load)

    def drop(self, key: Hashable) -> None:
        """As Boundary."""
        array = self._arrays.pop(key, None)
        if array is not None:
            self._spare.append(array)
        for rows in self._states.pop(key, {}):
            del self._written[key, rows]

    def clear(self) -> None:
        """As Boundary."""
        for key in list(self._arrays):
            self.drop(key)

    def _fetch(self, keys: tuple[Hashable, ...], rows: range, turn: int) -> list[tuple[Slot, Ticket]]:
        loads = []
        for slots, key in zip(self._slots, keys, strict=False):
            chunk = _covering(self._states[key], rows)
            host_DM = self._states[key][chunk][:, _columns(chunk, rows, self._positions)]
            slot = slots[turn % _AHEAD]
            loads.append((slot, self._transfer.to_device((host_DM,), slot, (self._written[key, chunk],))))
        return loads

    def _give_back(self, load: list[tuple[Slot, Ticket]]) -> None:
        for slot, _ in load:
            self._transfer.release(slot)
