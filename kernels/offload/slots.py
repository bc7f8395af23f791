"""Which things of a step's plan are on the device: a few slots, filled ahead in the order of need."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tscale.kernels.offload.transfer import Pieces, Slot, Ticket, Transfer


@dataclass(frozen=True)
class Need:
    """Something that a step will use: its name, and where it lies in host memory."""

    key: Hashable
    hosts: Pieces


@dataclass(frozen=True)
class _Held:
    need: Need
    slot: Slot
    ticket: Ticket


class SlotPool:
    """`count` slots of `numel` values. A slot that becomes free is filled with the first thing that is not here yet.

    Nothing is dropped to make room: what is here stays until it is released.
    """

    def __init__(self, transfer: Transfer, count: int, numel: int) -> None:
        self._transfer = transfer
        self._free = [transfer.slot(numel) for _ in range(count)]
        self._leaving: dict[int, Ticket] = {}
        self._held: dict[Hashable, _Held] = {}
        self._needs: Sequence[Need] = ()
        self._at = 0

    def begin(self, needs: Sequence[Need]) -> None:
        """Follow a new plan, with empty slots. A key may come twice: what was kept meanwhile is not copied again."""
        self.abandon()
        self._needs = needs
        self._at = 0
        self._fill()

    def take(self, key: Hashable) -> Pieces:
        """The next thing of the plan, on the device. Raises RuntimeError when it is not `key`, or there is no slot."""
        if self._at >= len(self._needs) or self._needs[self._at].key != key:
            raise RuntimeError(f"{key!r} is not what the plan of this step needs next")
        self._at += 1
        held = self._held.get(key)
        if held is None:
            raise RuntimeError(f"no slot was free for {key!r}")
        self._transfer.wait(held.ticket)
        return held.slot.pieces

    def pieces(self, key: Hashable) -> Pieces:
        """What was taken before and is still here."""
        return self._held[key].slot.pieces

    def hosts(self, key: Hashable) -> Pieces:
        """Where that lies in host memory."""
        return self._held[key].need.hosts

    def release(self, key: Hashable, leaving: Ticket | None = None) -> None:
        """Give the slot of `key` to the next need; `leaving` is the copy to the host that still reads it."""
        slot = self._held.pop(key).slot
        self._transfer.release(slot)
        if leaving is not None:
            self._leaving[id(slot)] = leaving
        self._free.append(slot)
        self._fill()

    def abandon(self) -> None:
        """Empty all slots and forget the plan."""
        self._needs = ()
        self._at = 0
        for key in list(self._held):
            self._transfer.wait(self._held[key].ticket)
            self.release(key)

    def _fill(self) -> None:
        for need in self._needs[self._at :]:
            if need.key in self._held:
                continue
            if not self._free:
                return
            slot = self._free.pop(0)
            leaving = self._leaving.pop(id(slot), None)
            ticket = self._transfer.to_device(need.hosts, slot, () if leaving is None else (leaving,))
            self._held[need.key] = _Held(need, slot, ticket)
