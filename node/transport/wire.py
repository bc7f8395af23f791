"""One request on one stream: frames with a length that is checked before anything is read into memory.

Request: 4 bytes big-endian length, payload. Reply: 1 byte status, 4 bytes length, payload (or a short reason).
The asking side then sends one byte, and the answering side closes after it: a stream closed right after the last
write can lose its end on the way.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tscale.node.ratelimit import SMALL_BYTES, RateLimiter
from tscale.node.transport.base import MAX_PAYLOAD_BYTES, Traffic, TransportError

PROTOCOL = "/tscale/request/1"

OK, FAILED, BUSY, TOO_LARGE = range(4)
"""Reply statuses: the payload is the reply; the handler failed; too many requests at once; the request is too long."""

MAX_REASON_BYTES = 200
SMALL_S = 2.0
"""Nor may a frame pass ahead of others that alone takes longer than this."""

_LENGTH_BYTES = 4
_ACK = b"\x06"


@dataclass(frozen=True)
class Link:
    """What all streams of a node share: its counters and the limits of both directions."""

    traffic: Traffic = field(default_factory=Traffic)
    upload: RateLimiter = field(default_factory=RateLimiter)
    download: RateLimiter = field(default_factory=RateLimiter)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes, link: Link) -> bytes:
    """Send a request and return the reply. Raises TransportError when the other side refuses or the frame is wrong,
    and what the stream raises (OSError, IncompleteReadError) when it breaks.
    """
    await _send(writer, _length(payload), payload, link)
    status = (await reader.readexactly(1))[0]
    size_bytes = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if status > TOO_LARGE or size_bytes > (MAX_PAYLOAD_BYTES if status == OK else MAX_REASON_BYTES):
        raise TransportError(f"a reply of status {status} and {size_bytes} bytes is not allowed")
    reply = await _receive(reader, size_bytes, link)
    writer.write(_ACK)
    await writer.drain()
    if status == OK:
        return reply
    raise TransportError(f"the peer refused: {printable(reply)}")


async def read_request(reader: asyncio.StreamReader, link: Link) -> bytes | None:
    """The payload of a request, or None when it claims to be longer than allowed."""
    size_bytes = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if size_bytes > MAX_PAYLOAD_BYTES:
        return None
    return await _receive(reader, size_bytes, link)


async def write_reply(writer: asyncio.StreamWriter, status: int, payload: bytes, link: Link) -> None:
    """Send a reply; a refusal's reason is cut to its cap."""
    body = payload if status == OK else payload[:MAX_REASON_BYTES]
    await _send(writer, bytes([status]) + _length(body), body, link)


async def await_ack(reader: asyncio.StreamReader) -> None:
    """Wait until the other side has taken the reply or is gone."""
    await reader.read(1)


async def discard(reader: asyncio.StreamReader) -> None:
    """Read to the end and keep nothing, at most a few payloads long."""
    left_bytes = 2 * MAX_PAYLOAD_BYTES
    while left_bytes > 0 and (piece := await reader.read(1 << 16)):
        left_bytes -= len(piece)


def printable(reason: bytes) -> str:
    """A peer's reason as one harmless line."""
    text = reason[:MAX_REASON_BYTES].decode("ascii", "replace")
    return "".join(char if char.isascii() and char.isprintable() else "?" for char in text)


def _length(payload: bytes) -> bytes:
    return len(payload).to_bytes(_LENGTH_BYTES, "big")


async def _send(writer: asyncio.StreamWriter, head: bytes, payload: bytes, link: Link) -> None:
    # head and first piece in one write: they travel in one packet
    pending = head
    step_bytes = link.upload.bucket.piece_bytes() if link.upload.limited else 1 << 16
    view = memoryview(payload)
    bulk = len(view) > min(SMALL_BYTES, SMALL_S * (link.upload.bucket.rate_bps or 1e9))
    for start in range(0, max(1, len(view)), step_bytes):
        piece = pending + bytes(view[start : start + step_bytes])
        pending = b""
        await link.upload.spend(len(piece), bulk)
        writer.write(piece)
        link.traffic.up_bytes += len(piece)
        await writer.drain()


async def _receive(reader: asyncio.StreamReader, size_bytes: int, link: Link) -> bytes:
    link.traffic.down_bytes += _LENGTH_BYTES
    if not link.download.limited:
        payload = await reader.readexactly(size_bytes)
        link.traffic.down_bytes += size_bytes
        return payload
    buffer = bytearray()
    while len(buffer) < size_bytes:
        step_bytes = min(link.download.bucket.piece_bytes(), size_bytes - len(buffer))
        piece = await reader.readexactly(step_bytes)
        await link.download.spend(len(piece))
        link.traffic.down_bytes += len(piece)
        buffer += piece
    return bytes(buffer)
