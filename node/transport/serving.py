"""Answering requests: bounded per peer and in all, each with a time limit, and no exception reaches the network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tscale.node.transport.base import MAX_PAYLOAD_BYTES, RequestHandler
from tscale.node.transport.wire import (
    BUSY,
    FAILED,
    OK,
    TOO_LARGE,
    Link,
    await_ack,
    discard,
    read_request,
    write_reply,
)

_LOG = logging.getLogger("tscale.transport")
_ACK_TIMEOUT_S = 10.0
_REFUSE_TIMEOUT_S = 1.0
# streams beyond the limit are told so; beyond this multiple of it they are only closed
_FLOOD_FACTOR = 4


@dataclass(frozen=True)
class ServerLimits:
    """What strangers may use of this node.

    More streams cost file descriptors and little memory; `running` bounds the payloads in memory (each up to 1 MiB
    in and out); a small `request_timeout_s` lets slow uplinks fail, a large one lets idle peers hold streams.
    """

    streams: int = 128
    streams_per_peer: int = 16
    running: int = 32
    request_timeout_s: float = 60.0


class RequestServer:
    """Serves streams one request each. `handler` may be None: then every request is refused."""

    def __init__(self, limits: ServerLimits, link: Link) -> None:
        self.handler: RequestHandler | None = None
        self._limits = limits
        self._link = link
        self._open: Counter[bytes] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = asyncio.Semaphore(limits.running)

    async def serve(self, peer_public: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one stream to its end, also when `close` is what ends it. Raises only when cancelled itself."""
        if len(self._tasks) >= _FLOOD_FACTOR * self._limits.streams:
            writer.close()
            return
        task = asyncio.create_task(self._serve_one(peer_public, reader, writer))
        self._tasks.add(task)
        try:
            await asyncio.wait({task})
            error = None if task.cancelled() else task.exception()
            if error is not None:
                _LOG.debug("request_broken reason=%s", type(error).__name__)
        finally:
            task.cancel()
            self._tasks.discard(task)
            writer.close()

    async def close(self) -> None:
        """Cancel what is being served and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_one(self, peer: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open.total() >= self._limits.streams or self._open[peer] >= self._limits.streams_per_peer:
            await self._refuse(reader, writer, BUSY, b"too many requests at once")
            return
        async with self._counted(peer), asyncio.timeout(self._limits.request_timeout_s), self._running:
            payload = await read_request(reader, self._link)
            if payload is None:
                await self._refuse(reader, writer, TOO_LARGE, b"the request is too long")
                return
            # the next byte is the asker's word that it has the reply, or its end: then nobody needs the answer
            over = asyncio.create_task(await_ack(reader))
            answer = asyncio.create_task(self._answer(peer, payload))
            try:
                await _first_of(answer, over)
                if answer.cancelled():
                    _LOG.debug("request_abandoned peer=%s", peer.hex()[:16])
                    return
                status, reply = answer.result()
                await self._reply(writer, status, reply, over)
            except BaseException:
                over.cancel()
                raise
        await asyncio.wait({over}, timeout=_ACK_TIMEOUT_S)
        over.cancel()

    async def _reply(self, writer: asyncio.StreamWriter, status: int, reply: bytes, over: asyncio.Task[None]) -> None:
        """Send a reply; the rest of it stays here when the asker gives up, as a slow uplink has better to carry."""
        sending = asyncio.create_task(write_reply(writer, status, reply, self._link))
        try:
            await asyncio.wait({sending, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    @contextlib.asynccontextmanager
    async def _counted(self, peer: bytes) -> AsyncIterator[None]:
        """Count a request of a peer until its reply is written; waiting for the last byte costs nothing."""
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if self._open[peer] <= 0:
                del self._open[peer]

    async def _refuse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int, reason: bytes
    ) -> None:
        async with asyncio.timeout(_REFUSE_TIMEOUT_S):
            await write_reply(writer, status, reason, self._link)
            # closing with the request unread would take the reason back; nothing of it is kept
            await discard(reader)

    async def _answer(self, peer_public: bytes, payload: bytes) -> tuple[int, bytes]:
        if self.handler is None:
            return FAILED, b"not ready"
        try:
            reply = await self.handler(peer_public, payload)
        except Exception:  # noqa: BLE001 - the boundary: a fault in the handler must not end the server
            _LOG.exception("handler_failed peer=%s", peer_public.hex()[:16])
            return FAILED, b"the request failed here"
        if len(reply) > MAX_PAYLOAD_BYTES:
            _LOG.error("reply_too_long bytes=%d", len(reply))
            return FAILED, b"the reply is too long"
        return OK, reply


async def _first_of(wanted: asyncio.Task[tuple[int, bytes]], other: asyncio.Task[None]) -> None:
    """Wait for either; `wanted` is cancelled unless it is the one that is done."""
    try:
        await asyncio.wait({wanted, other}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not wanted.done():
            wanted.cancel()
            await asyncio.gather(wanted, return_exceptions=True)
