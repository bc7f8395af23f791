"""Requests between two or three real p2pd on loopback: both ways, large, refused, and to peers that are gone."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.helpers.p2p_peers import free_port, peers_in, until, until_joined
from tscale.node.transport.base import MAX_PAYLOAD_BYTES, TransportError
from tscale.node.transport.serving import ServerLimits

pytestmark = pytest.mark.process


def test_requests_pass_both_ways_also_to_a_peer_that_only_dials(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            seed = await peers.start(1)
            member = await peers.start(2, seeds=tuple(seed.own_addrs()))
            dialler = await peers.start(3, seeds=tuple(seed.own_addrs()), listen=False, serve_dht=False)
            await until_joined(member)
            await until_joined(dialler)
            one, two, three = (peers.identity(number).public for number in (1, 2, 3))

            assert seed.own_addrs()[0].endswith(f"/p2p/{peers.identity(1).peer_id}")
            assert dialler.own_addrs() == []
            assert await member.request(one, b"abc", 10.0) == b"cba"
            assert await seed.request(two, b"abc", 10.0) == b"cba"
            assert await seed.request(three, b"", 10.0) == b""
            # member and dialler know each other's keys only: the seed's routing names the address
            member.learn_addrs(three, ())
            assert await dialler.request(two, b"xyz", 10.0) == b"zyx"
            assert await member.request(three, b"xyz", 10.0) == b"zyx"
            with pytest.raises(TransportError, match="does not dial itself"):
                await seed.request(one, b"", 5.0)

    asyncio.run(scenario())


def test_the_handler_sees_who_asks_and_large_payloads_pass_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            seed = await peers.start(1)
            member = await peers.start(2, seeds=tuple(seed.own_addrs()))
            await until_joined(member)
            askers: set[bytes] = set()

            async def answer(peer_public: bytes, payload: bytes) -> bytes:
                askers.add(peer_public)
                return payload[::-1]

            seed.set_handler(answer)
            up_before, down_before = member.up_bytes, member.down_bytes
            payloads = [os.urandom(MAX_PAYLOAD_BYTES - number) for number in range(24)]
            replies = await asyncio.gather(
                *(member.request(peers.identity(1).public, payload, 60.0) for payload in payloads[:8])
            )
            for payload in payloads[8:]:
                replies.append(await member.request(peers.identity(1).public, payload, 60.0))
            assert all(reply == payload[::-1] for reply, payload in zip(replies, payloads, strict=True))
            assert askers == {peers.identity(2).public}
            total_bytes = sum(map(len, payloads))
            assert total_bytes <= member.up_bytes - up_before <= 1.01 * total_bytes
            assert total_bytes <= member.down_bytes - down_before <= 1.01 * total_bytes
            with pytest.raises(TransportError, match="longer than"):
                await member.request(peers.identity(1).public, bytes(MAX_PAYLOAD_BYTES + 1), 5.0)

    asyncio.run(scenario())


def test_a_failing_or_slow_handler_ends_one_request_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            seed = await peers.start(1, limits=ServerLimits(streams=6, streams_per_peer=4, request_timeout_s=30.0))
            member = await peers.start(2, seeds=tuple(seed.own_addrs()))
            await until_joined(member)
            one = peers.identity(1).public
            release = asyncio.Event()

            async def answer(peer_public: bytes, payload: bytes) -> bytes:
                if payload == b"fail":
                    raise RuntimeError("a secret path /home/me")
                if payload == b"wait":
                    await release.wait()
                return b"fine" if payload != b"huge" else bytes(MAX_PAYLOAD_BYTES + 1)

            seed.set_handler(answer)
            with pytest.raises(TransportError, match="the request failed here") as caught:
                await member.request(one, b"fail", 10.0)
            assert "secret" not in str(caught.value)
            with pytest.raises(TransportError, match="the reply is too long"):
                await member.request(one, b"huge", 10.0)
            with pytest.raises(TransportError, match="no reply within"):
                await member.request(one, b"wait", 0.3)

            async def only_this() -> bool:
                return seed._running is not None and seed._running.server._open.total() == 0

            await until(only_this, "the abandoned request has ended")
            waiting = [asyncio.create_task(member.request(one, b"wait", 30.0)) for _ in range(4)]

            async def four() -> bool:
                return seed._running is not None and seed._running.server._open.total() == 4

            await until(four, "four requests are being served")
            with pytest.raises(TransportError, match="too many requests"):
                await member.request(one, b"now", 10.0)
            release.set()
            assert await asyncio.gather(*waiting) == [b"fine"] * 4
            assert await member.request(one, b"now", 10.0) == b"fine"

    asyncio.run(scenario())


def test_a_dead_peer_fails_fast_and_answers_again_when_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            seed = await peers.start(1)
            gone = await peers.start(2, seeds=tuple(seed.own_addrs()))
            await until_joined(gone)
            two = peers.identity(2).public
            assert await seed.request(two, b"ab", 10.0) == b"ba"
            await gone.close()
            started_s = time.monotonic()
            with pytest.raises(TransportError):
                await seed.request(two, b"ab", 30.0)
            with pytest.raises(TransportError):
                await seed.request(peers.identity(77).public, b"ab", 30.0)
            assert time.monotonic() - started_s < 10.0
            back = await peers.start(2, seeds=tuple(seed.own_addrs()))
            await until_joined(back)
            assert await seed.request(two, b"ab", 10.0) == b"ba"

    asyncio.run(scenario())


def test_a_peer_that_is_gone_for_long_is_dialled_as_soon_as_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            seed = await peers.start(1)
            port, two = free_port(), peers.identity(2).public
            seed.learn_addrs(two, (f"/ip4/127.0.0.1/tcp/{port}",))
            for _ in range(20):
                with pytest.raises(TransportError, match="nobody listens"):
                    await seed.request(two, b"ab", 10.0)
            # p2pd alone would now refuse to dial it for minutes
            await peers.start(2, port=port)
            assert await seed.request(two, b"ab", 10.0) == b"ba"

    asyncio.run(scenario())


def test_a_seed_is_asked_before_the_joining_has_begun(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            seed = await peers.start(1)
            member = await peers.start(2, seeds=tuple(seed.own_addrs()))
            assert await member.request(peers.identity(1).public, b"ab", 10.0) == b"ba"

    asyncio.run(scenario())
