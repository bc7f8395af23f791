"""Copies between host and device as the engine asks for them, and the twin for a CPU, where nothing is copied.

The rules, which a fake of the tests enforces:

1. what is in a slot may be used after `wait` on the ticket of its load;
2. a slot is loaded again only after `release`, and a load names in `after` the copies that must be done before it:
   those that leave the same slot, and those that write the host memory it reads;
3. host memory that `to_host` writes may be read by the CPU after `finish`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

Pieces = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Ticket:
    """A copy that was asked for."""

    serial: int


@dataclass
class Traffic:
    """Bytes copied each way since the start."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0


class Slot:
    """Device memory for one thing at a time; `pieces` are its tensors, in the shapes of the host's."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.pieces: Pieces = ()

    def views(self, hosts: Pieces) -> Pieces:
        """Places for `hosts` one after the other. Raises ValueError when they do not fit."""
        if sum(host.numel() for host in hosts) > self.memory.numel():
            raise ValueError("a slot is smaller than what should go into it")
        views, start = [], 0
        for host in hosts:
            views.append(self.memory[start : start + host.numel()].view(host.shape))
            start += host.numel()
        return tuple(views)


class Transfer(Protocol):
    """A device's memory and its two directions of copying, which run beside the computation."""

    device: torch.device
    traffic: Traffic

    def slot(self, numel: int) -> Slot:
        """Device memory for `numel` float32 values, for as long as the transfer lives."""
        ...

    def buffer(self, numel: int) -> torch.Tensor:
        """Device memory that nothing is copied into: float32 [numel], contents undefined."""
        ...

    def host(self, numel: int) -> torch.Tensor:
        """Host memory that copies fast: float32 [numel], contents undefined."""
        ...

    def pin(self, host: torch.Tensor) -> None:
        """Make host memory that exists copy fast, where that can be done."""
        ...

    def to_device(self, hosts: Pieces, slot: Slot, after: tuple[Ticket, ...] = ()) -> Ticket:
        """Begin to fill `slot`, which is empty or released, and set its pieces."""
        ...

    def to_host(self, devices: Pieces, hosts: Pieces) -> Ticket:
        """Begin to copy what the work issued so far leaves in `devices`; they must not change until it is done."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Let all device work that is issued from now on come after this copy."""
        ...

    def release(self, slot: Slot) -> None:
        """Say that the work issued so far was the last that uses what is in the slot."""
        ...

    def finish(self, ticket: Ticket | None = None) -> None:
        """Block until this copy, or every copy, is done."""
        ...


class DirectTransfer:
    """The CPU as the device: a slot's pieces are the host's own tensors, so everything is resident, uncopied."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.traffic = Traffic()

    def slot(self, numel: int) -> Slot:
        """A slot without memory of its own."""
        return Slot(torch.empty(0))

    def buffer(self, numel: int) -> torch.Tensor:
        """As Transfer."""
        return torch.empty(numel)

    def host(self, numel: int) -> torch.Tensor:
        """As Transfer."""
        return torch.empty(numel)

    def pin(self, host: torch.Tensor) -> None:
        """Nothing to do."""

    def to_device(self, hosts: Pieces, slot: Slot, after: tuple[Ticket, ...] = ()) -> Ticket:
        """Lend the host's tensors."""
        slot.pieces = hosts
        return Ticket(0)

    def to_host(self, devices: Pieces, hosts: Pieces) -> Ticket:
        """Copy what is not the host's own."""
        for source, target in zip(devices, hosts, strict=True):
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
                self.traffic.to_host_bytes += target.numel() * target.element_size()
        return Ticket(0)

    def wait(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def release(self, slot: Slot) -> None:
        """Give the host's tensors back."""
        slot.pieces = ()

    def finish(self, ticket: Ticket | None = None) -> None:
        """Nothing to wait for."""
