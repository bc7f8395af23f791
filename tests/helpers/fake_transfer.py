"""A device for tests of the offload engine that keeps its word as late as it may and catches who does not wait.

Copies happen when they are waited for and no sooner. A slot that is loading or was given back is full of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tscale.kernels.offload.transfer import Pieces, Slot, Ticket, Traffic


class TransferMisuse(AssertionError):
    """Something was read before it was there, or overwritten while it was still read."""


class FakeSlot(Slot):
    """A slot that refuses to be read before its load was waited for."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self.state = "empty"
        self._pieces: Pieces = ()

    @property
    def pieces(self) -> Pieces:
        if self.state != "ready":
            raise TransferMisuse(f"a slot was read while {self.state}")
        return self._pieces

    @pieces.setter
    def pieces(self, pieces: Pieces) -> None:
        self._pieces = pieces


@dataclass
class _Copy:
    sources: Pieces
    targets: Pieces
    slot: FakeSlot | None
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = sum(piece.numel() * piece.element_size() for piece in self.targets)


def _overlap(one: Pieces, other: Pieces) -> bool:
    def spans(pieces: Pieces) -> list[tuple[int, int]]:
        # of the whole memory a strided piece reaches over
        return [(p.data_ptr(), p.data_ptr() + 4 * (1 + _reach(p))) for p in pieces if p.numel()]

    return any(a < d and c < b for a, b in spans(one) for c, d in spans(other))


def _reach(piece: torch.Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(piece.shape, piece.stride(), strict=True))


class FakeTransfer:
    """A Transfer in main memory. `peak_bytes` counts slots that are in use, buffers, and what is on its way out."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.traffic = Traffic()
        self.slots: list[FakeSlot] = []
        self.peak_bytes = 0
        self.host_bytes = 0
        self._buffer_bytes = 0
        self._pending: dict[int, _Copy] = {}
        self._serial = 0

    def slot(self, numel: int) -> FakeSlot:
        slot = FakeSlot(torch.full((numel,), torch.nan))
        self.slots.append(slot)
        return slot

    def buffer(self, numel: int) -> torch.Tensor:
        self._buffer_bytes += 4 * numel
        return torch.full((numel,), torch.nan)

    def host(self, numel: int) -> torch.Tensor:
        self.host_bytes += 4 * numel
        return torch.full((numel,), torch.nan)

    def pin(self, host: torch.Tensor) -> None:
        pass

    def to_device(self, hosts: Pieces, slot: FakeSlot, after: tuple[Ticket, ...] = ()) -> Ticket:
        for ticket in after:
            self._run(ticket)
        if slot.state != "empty":
            raise TransferMisuse(f"a slot was loaded while {slot.state}")
        if self._out(lambda copy: _overlap(copy.sources, (slot.memory,))):
            raise TransferMisuse("a slot was loaded while a copy out of it was not done")
        if self._out(lambda copy: _overlap(copy.targets, hosts)):
            raise TransferMisuse("host memory was read while a copy into it was not done")
        slot.memory.fill_(torch.nan)
        slot.state, slot.pieces = "loading", slot.views(hosts)
        copy = _Copy(hosts, slot._pieces, slot)
        self.traffic.to_device_bytes += copy.bytes
        return self._issue(copy)

    def to_host(self, devices: Pieces, hosts: Pieces) -> Ticket:
        if any(copy.slot is not None and _overlap(copy.sources, hosts) for copy in self._pending.values()):
            raise TransferMisuse("host memory was overwritten while a copy from it was not done")
        copy = _Copy(devices, hosts, None)
        self.traffic.to_host_bytes += copy.bytes
        return self._issue(copy)

    def wait(self, ticket: Ticket) -> None:
        self._run(ticket)

    def release(self, slot: FakeSlot) -> None:
        if slot.state != "ready":
            raise TransferMisuse(f"a slot was given back while {slot.state}")
        slot.state = "empty"
        if not self._out(lambda copy: _overlap(copy.sources, (slot.memory,))):
            slot.memory.fill_(torch.nan)

    def finish(self, ticket: Ticket | None = None) -> None:
        for serial in [ticket.serial] if ticket else list(self._pending):
            self._run(Ticket(serial))

    def _issue(self, copy: _Copy) -> Ticket:
        self._serial += 1
        self._pending[self._serial] = copy
        in_slots = sum(4 * slot.memory.numel() for slot in self.slots if slot.state != "empty")
        memories = tuple(slot.memory for slot in self.slots)
        leaving = sum(c.bytes for c in self._pending.values() if c.slot is None and not _overlap(c.sources, memories))
        self.peak_bytes = max(self.peak_bytes, in_slots + self._buffer_bytes + leaving)
        return Ticket(self._serial)

    def _run(self, ticket: Ticket) -> None:
        copy = self._pending.pop(ticket.serial, None)
        if copy is None:
            return
        for source, target in zip(copy.sources, copy.targets, strict=True):
            target.copy_(source)
        if copy.slot is not None:
            copy.slot.state = "ready"

    def _out(self, applies: Callable[[_Copy], bool]) -> bool:
        return any(copy.slot is None and applies(copy) for copy in self._pending.values())
