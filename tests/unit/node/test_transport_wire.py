"""Frames and serving on plain loopback sockets: caps before reading, limits, refusals, and a server that survives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tscale.node.ratelimit import RateLimiter, TokenBucket
from tscale.node.transport.base import MAX_PAYLOAD_BYTES, RequestHandler, TransportError
from tscale.node.transport.p2pd import explain
from tscale.node.transport.serving import RequestServer, ServerLimits
from tscale.node.transport.wire import Link, ask, printable

_PEER = b"\x07" * 32


class Server:
    def __init__(self, limits: ServerLimits, handler: RequestHandler | None) -> None:
        self.link = Link()
        self.requests = RequestServer(limits, self.link)
        self.requests.handler = handler
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.requests.serve(_PEER, reader, writer)

    async def ask(self, payload: bytes, link: Link | None = None) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            return await ask(reader, writer, payload, link or Link())
        finally:
            writer.close()

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(20.0):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


@asynccontextmanager
async def serving(handler: RequestHandler | None, limits: ServerLimits | None = None) -> AsyncIterator[Server]:
    server = Server(limits or ServerLimits(), handler)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        server.port = listener.sockets[0].getsockname()[1]
        yield server
        await server.requests.close()


def _run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60.0):
            await scenario()

    asyncio.run(bounded())


async def _reverse(peer_public: bytes, payload: bytes) -> bytes:
    assert peer_public == _PEER
    return payload[::-1]


@pytest.mark.parametrize("size_bytes", [0, 1, 65_535, 65_536, 65_537, 1 << 20, MAX_PAYLOAD_BYTES])
def test_payloads_of_every_size_pass(size_bytes: int) -> None:
    async def scenario() -> None:
        async with serving(_reverse) as server:
            payload = random.Random(size_bytes).randbytes(size_bytes)
            link = Link()
            assert await server.ask(payload, link) == payload[::-1]
            assert size_bytes < link.traffic.up_bytes <= size_bytes + 8
            assert size_bytes < link.traffic.down_bytes <= size_bytes + 8
            assert server.link.traffic.up_bytes >= size_bytes

    _run(scenario)


def test_a_length_beyond_the_cap_is_refused_without_waiting_for_it() -> None:
    async def scenario() -> None:
        async with serving(_reverse) as server:
            for claimed in (MAX_PAYLOAD_BYTES + 1, (1 << 32) - 1):
                reply = await server.raw(claimed.to_bytes(4, "big") + b"x" * 100)
                assert reply[0] == 3 and reply[5:] == b"the request is too long"
            assert await server.ask(b"ab") == b"ba"

    _run(scenario)


def test_random_bytes_never_end_the_server() -> None:
    async def scenario() -> None:
        rng = random.Random(11)
        async with serving(_reverse) as server:
            for _ in range(200):
                await server.raw(rng.randbytes(rng.randint(0, 40)))
            assert await server.ask(b"ab") == b"ba"

    _run(scenario)


def test_a_request_that_stops_half_way_ends_at_the_time_limit() -> None:
    async def scenario() -> None:
        async with serving(_reverse, ServerLimits(request_timeout_s=0.05)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write((100).to_bytes(4, "big") + b"half")
            assert await reader.read() == b""
            writer.close()
            assert await server.ask(b"ab") == b"ba"

    _run(scenario)


def test_when_the_asker_leaves_its_handler_is_cancelled() -> None:
    async def scenario() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def wait(peer_public: bytes, payload: bytes) -> bytes:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return b""

        async with serving(wait) as server:
            call = asyncio.create_task(server.ask(b"x"))
            await begun.wait()
            call.cancel()
            await ended.wait()

    _run(scenario)


def test_without_a_handler_requests_are_refused() -> None:
    async def scenario() -> None:
        async with serving(None) as server:
            with pytest.raises(TransportError, match="not ready"):
                await server.ask(b"x")

    _run(scenario)


def test_the_number_at_once_is_bounded_per_peer_and_frees_up() -> None:
    async def scenario() -> None:
        release = asyncio.Event()
        begun: list[bytes] = []

        async def wait(peer_public: bytes, payload: bytes) -> bytes:
            begun.append(payload)
            await release.wait()
            return payload

        async with serving(wait, ServerLimits(streams=8, streams_per_peer=3, running=2)) as server:
            calls = [asyncio.create_task(server.ask(bytes([number]))) for number in range(3)]
            while len(begun) < 2 or server.requests._open.total() < 3:
                await asyncio.sleep(0)
            # the third is accepted and waits for one of the two that run
            assert len(begun) == 2
            with pytest.raises(TransportError, match="too many requests at once"):
                await server.ask(bytes(MAX_PAYLOAD_BYTES))
            release.set()
            assert await asyncio.gather(*calls) == [b"\0", b"\1", b"\2"]
            while server.requests._open.total():
                await asyncio.sleep(0)
            assert await server.ask(b"again") == b"again"

    _run(scenario)


@pytest.mark.parametrize("reply", [b"\x00\xff\xff\xff\xff", b"\x01\x00\x00\x10\x00", b"\x09\x00\x00\x00\x00"])
def test_a_lying_reply_is_refused_before_it_is_read(reply: bytes) -> None:
    async def scenario() -> None:
        async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(reply)
            await writer.drain()
            await reader.read()
            writer.close()

        async with await asyncio.start_server(lie, "127.0.0.1", 0) as listener:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            with pytest.raises(TransportError, match="not allowed"):
                await ask(reader, writer, b"x", Link())
            writer.close()

    _run(scenario)


def test_limited_links_wait_for_what_they_send_and_receive() -> None:
    async def scenario() -> None:
        waited = {"up": 0.0, "down": 0.0}

        def limiter(name: str) -> RateLimiter:
            async def sleep(seconds: float) -> None:
                waited[name] += seconds

            return RateLimiter(TokenBucket(10_000.0), lambda: waited[name], sleep)

        async with serving(_reverse) as server:
            payload = bytes(50_000)
            assert await server.ask(payload, Link(upload=limiter("up"), download=limiter("down"))) == payload
        assert waited["up"] == pytest.approx(5.0, rel=0.05)
        assert waited["down"] == pytest.approx(5.0, rel=0.05)

    _run(scenario)


def test_a_reply_to_an_asker_that_left_is_not_sent_to_its_end() -> None:
    async def scenario() -> None:
        async with serving(_reverse) as server:
            left, waits = asyncio.Event(), list[float]()

            async def sleep(seconds: float) -> None:
                waits.append(seconds)
                await left.wait()

            server.link.upload.bucket, server.link.upload.sleep = TokenBucket(1_000.0), sleep
            call = asyncio.create_task(server.ask(bytes(10_000)))
            while len(waits) < 1:
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            while server.requests._open.total():
                await asyncio.sleep(0)
            assert len(waits) == 1 and server.link.traffic.up_bytes < 200, "a second's worth is kept for others"

    _run(scenario)


def test_a_hostile_reason_is_made_harmless() -> None:
    assert printable(b"fine, really") == "fine, really"
    assert printable(b"a\x1b[2Jb\n\xff" + b"x" * 500).startswith("a?[2Jb")
    assert len(printable(b"x" * 500)) == 200


@pytest.mark.parametrize(
    ("message", "meaning"),
    [
        ("failed to dial X: all dials failed * [/ip4/1.2.3.4/tcp/1] dial backoff", "could not be dialled a moment ago"),
        ("dial tcp4 127.0.0.1:9: connect: connection refused", "nobody listens"),
        (
            "failed to negotiate security protocol: peer id mismatch: expected A, but remote key matches B",
            "another peer",
        ),
        ("failed to negotiate security protocol: message did not have trailing newline", "not a peer"),
        ("failed to negotiate security protocol: context deadline exceeded", "does not answer"),
        ("protocols not supported: [/tscale/request/1]", "does not speak"),
        ("something\nnew", "something new"),
    ],
)
def test_p2pds_errors_become_plain_words(message: str, meaning: str) -> None:
    assert meaning in explain(message) and "\n" not in explain(message)
