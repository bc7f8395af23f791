"""Copies over CUDA (or ROCm) streams: one stream in, one out, events between them and the computation's stream."""

from __future__ import annotations

import contextlib

import torch

from tscale.kernels.offload.transfer import Pieces, Slot, Ticket, Traffic


class CudaTransfer:
    """Transfers of one device, beside the stream that was current when it was made: computation stays on that one.

    Host memory from `host` and memory that was pinned is copied asynchronously. Other memory (a mapped file, say) is
    copied correctly too, but the driver stages it and the caller waits meanwhile.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self.traffic = Traffic()
        self._compute = torch.cuda.current_stream(self.device)
        self._in = torch.cuda.Stream(self.device)
        self._out = torch.cuda.Stream(self.device)
        self._events: dict[int, torch.cuda.Event] = {}
        self._serial = 0
        self._pinned: list[torch.Tensor] = []

    def close(self) -> None:
        """Finish, and give the pages that were pinned back."""
        self.finish()
        for host in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
        self._pinned.clear()

    def slot(self, numel: int) -> Slot:
        """As Transfer."""
        return Slot(self.buffer(numel))

    def buffer(self, numel: int) -> torch.Tensor:
        """As Transfer."""
        return torch.empty(numel, dtype=torch.float32, device=self.device)

    def host(self, numel: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(numel, dtype=torch.float32, pin_memory=True)

    def pin(self, host: torch.Tensor) -> None:
        """Register the pages of `host`, which must outlive `close`. Where that is refused, copies are only slower."""
        if host.numel() == 0 or host.is_pinned():
            return
        size_bytes = host.numel() * host.element_size()
        if int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size_bytes, 0)) == 0:
            self._pinned.append(host)
            return
        # the refusal stays the thread's last error, and the next kernel's launch check would take it for its own
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device).add_(1.0)

    def to_device(self, hosts: Pieces, slot: Slot, after: tuple[Ticket, ...] = ()) -> Ticket:
        """As Transfer."""
        # the slot's last user was issued to the computation's stream before its release
        self._in.wait_stream(self._compute)
        strided = not all(host.is_contiguous() for host in hosts)
        for ticket in after:
            if strided:
                # torch gathers such a piece on the processor, now, and no stream makes that wait
                self.finish(ticket)
            else:
                self._wait_on(self._in, ticket)
        slot.pieces = slot.views(hosts)
        with torch.cuda.stream(self._in):
            for host, piece in zip(hosts, slot.pieces, strict=True):
                piece.copy_(host, non_blocking=True)
                self.traffic.to_device_bytes += host.numel() * host.element_size()
        return self._issued(self._in)

    def to_host(self, devices: Pieces, hosts: Pieces) -> Ticket:
        """As Transfer."""
        self._out.wait_stream(self._compute)
        with torch.cuda.stream(self._out):
            for source, target in zip(devices, hosts, strict=True):
                target.copy_(source, non_blocking=True)
                # the allocator must not hand this memory out again before the copy has read it
                source.record_stream(self._out)
                self.traffic.to_host_bytes += target.numel() * target.element_size()
        return self._issued(self._out)

    def wait(self, ticket: Ticket) -> None:
        """As Transfer."""
        self._wait_on(self._compute, ticket)

    def release(self, slot: Slot) -> None:
        """As Transfer: the next load waits for the computation's stream."""
        slot.pieces = ()

    def finish(self, ticket: Ticket | None = None) -> None:
        """As Transfer."""
        if ticket is not None:
            event = self._events.pop(ticket.serial, None)
            if event is not None:
                event.synchronize()
            return
        self._in.synchronize()
        self._out.synchronize()
        self._events.clear()

    def _issued(self, stream: torch.cuda.Stream) -> Ticket:
        self._serial += 1
        event = torch.cuda.Event()
        event.record(stream)
        self._events[self._serial] = event
        return Ticket(self._serial)

    def _wait_on(self, stream: torch.cuda.Stream, ticket: Ticket) -> None:
        # a ticket without an event is one that was finished
        event = self._events.get(ticket.serial)
        if event is not None:
            stream.wait_event(event)
