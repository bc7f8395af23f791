"""Server-sent events: one producer renders each change once, any number of slow readers get the newest."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

log = logging.getLogger(__name__)

RETRY_MS = 2000
HEARTBEAT = b": still here\n\n"

Render = Callable[[], Awaitable[bytes | None]]


def event_frame(event_id: str, data: bytes) -> bytes:
    """One event of the stream. `data` must be one line (JSON is, when written without indent)."""
    if b"\n" in data or b"\r" in data:
        raise ValueError("event data must be one line")
    return b"id: " + event_id.encode() + b"\nevent: view\ndata: " + data + b"\n\n"


class Broadcaster:
    """Calls `render` every `tick_s` and hands what it returns (None: nothing new) to every open stream.

    Each stream holds at most one frame: a reader that falls behind loses the older one, never the newest, and never
    holds up the producer or the other readers.
    """

    def __init__(self, render: Render, tick_s: float = 0.5, heartbeat_s: float = 15.0, max_clients: int = 64) -> None:
        self._render = render
        self._tick_s = tick_s
        self._heartbeat_s = heartbeat_s
        self._max_clients = max_clients
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._boot = secrets.token_hex(4)
        self._count = 0
        self._newest: bytes | None = None
        self._closed = False
        self._failures = 0
        self.last_tick_mono_s: float | None = None

    @property
    def clients(self) -> int:
        return len(self._queues)

    @property
    def full(self) -> bool:
        return len(self._queues) >= self._max_clients

    async def run(self) -> None:
        """Render until cancelled. A render that keeps failing is logged once; the next tick tries again."""
        while not self._closed:
            try:
                data = await self._render()
            except Exception:  # the task boundary: the page must outlive any one bad tick
                self._failures += 1
                if self._failures == 1:
                    log.exception("event=render_failed")
            else:
                self._failures = 0
                self.last_tick_mono_s = asyncio.get_running_loop().time()
                if data is not None:
                    self.publish(data)
            await asyncio.sleep(self._tick_s)

    def publish(self, data: bytes) -> None:
        """Hand `data` to every stream as one event, in place of what it has not read yet."""
        self._count += 1
        self._newest = event_frame(f"{self._boot}-{self._count}", data)
        for queue in self._queues:
            _put_newest(queue, self._newest)

    def close(self) -> None:
        """End every stream, so that the server can stop; new ones end at once."""
        self._closed = True
        for queue in self._queues:
            _put_newest(queue, None)

    async def stream(self) -> AsyncIterator[bytes]:
        """The body of one client's event stream: the newest view at once, then every change."""
        if self._closed or self.full:
            return
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        if self._newest is not None:
            queue.put_nowait(self._newest)
        self._queues.add(queue)
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            while True:
                try:
                    frame = await asyncio.wait_for(queue.get(), self._heartbeat_s)
                except TimeoutError:
                    yield HEARTBEAT
                    continue
                if frame is None:
                    return
                yield frame
        finally:
            self._queues.discard(queue)


def _put_newest(queue: asyncio.Queue[bytes | None], frame: bytes | None) -> None:
    with contextlib.suppress(asyncio.QueueEmpty):
        queue.get_nowait()
    queue.put_nowait(frame)
