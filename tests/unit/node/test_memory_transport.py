"""The in-memory network: requests, who may dial whom, cuts, and faults that a seed repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tscale.node.transport.base import MAX_PAYLOAD_BYTES, Transport, TransportError
from tscale.node.transport.memory import Faults, MemoryNetwork, MemoryTransport

_KEYS = [bytes([number]) * 32 for number in range(4)]


class Swarm:
    def __init__(self, seed: int = 1, faults: Faults | None = None) -> None:
        self.now_unix_s = 1000.0
        self.network = MemoryNetwork(seed, lambda: self.now_unix_s, faults)
        self.seen: list[tuple[bytes, bytes]] = []

    async def start(self, key: bytes, listen: bool = True) -> MemoryTransport:
        transport = self.network.transport(key, listen)
        checked: Transport = transport
        checked.set_handler(self.answer)
        await checked.start()
        return transport

    async def answer(self, peer_public: bytes, payload: bytes) -> bytes:
        self.seen.append((peer_public, payload))
        if payload == b"fail":
            raise RuntimeError("inside")
        return payload[::-1] if payload != b"long" else bytes(MAX_PAYLOAD_BYTES + 1)


def _run(scenario: Callable[[Swarm], Awaitable[None]], swarm: Swarm | None = None) -> Swarm:
    used = swarm or Swarm()

    async def run() -> None:
        await scenario(used)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    return used


def test_a_request_carries_its_author_and_brings_the_reply() -> None:
    async def scenario(swarm: Swarm) -> None:
        one, two = await swarm.start(_KEYS[0]), await swarm.start(_KEYS[1])
        assert await one.request(two.public, b"abc", 5.0) == b"cba"
        assert (one.up_bytes, one.down_bytes, two.up_bytes, two.down_bytes) == (3, 3, 3, 3)

    assert _run(scenario).seen == [(_KEYS[0], b"abc")]


def test_what_can_go_wrong_is_a_transport_error() -> None:
    async def scenario(swarm: Swarm) -> None:
        one, two = await swarm.start(_KEYS[0]), await swarm.start(_KEYS[1])
        too_long = bytes(MAX_PAYLOAD_BYTES + 1)
        for payload, match in ((b"fail", "failed here"), (b"long", "too long"), (too_long, "longer")):
            with pytest.raises(TransportError, match=match):
                await one.request(two.public, payload, 5.0)
        with pytest.raises(TransportError, match="nobody listens"):
            await one.request(_KEYS[3], b"", 5.0)
        await two.close()
        with pytest.raises(TransportError, match="nobody listens"):
            await one.request(two.public, b"", 5.0)
        with pytest.raises(TransportError):
            await two.request(one.public, b"", 5.0)

    _run(scenario)


def test_a_peer_that_only_dials_is_reached_over_its_own_connection() -> None:
    async def scenario(swarm: Swarm) -> None:
        one, hidden = await swarm.start(_KEYS[0]), await swarm.start(_KEYS[1], listen=False)
        assert hidden.own_addrs() == [] and one.own_addrs()[0].startswith("/ip4/10.")
        with pytest.raises(TransportError, match="no address"):
            await one.request(hidden.public, b"x", 5.0)
        await hidden.request(one.public, b"x", 5.0)
        assert await one.request(hidden.public, b"ab", 5.0) == b"ba"

    _run(scenario)


def test_cuts_stop_both_ways_until_they_heal() -> None:
    async def scenario(swarm: Swarm) -> None:
        ends = [await swarm.start(key) for key in _KEYS]
        swarm.network.part({_KEYS[0], _KEYS[1]}, {_KEYS[2], _KEYS[3]})
        assert await ends[0].request(_KEYS[1], b"x", 5.0) == b"x"
        for asker, other in ((0, 2), (3, 1)):
            with pytest.raises(TransportError):
                await ends[asker].request(_KEYS[other], b"x", 5.0)
        swarm.network.heal()
        assert await ends[0].request(_KEYS[2], b"x", 5.0) == b"x"

    _run(scenario)


def test_a_lost_request_ends_at_its_timeout_and_the_handler_never_sees_it() -> None:
    async def scenario(swarm: Swarm) -> None:
        one, two = await swarm.start(_KEYS[0]), await swarm.start(_KEYS[1])
        with pytest.raises(TransportError, match="no reply within"):
            await one.request(two.public, b"x", 0.01)

    assert _run(scenario, Swarm(faults=Faults(drop=1.0))).seen == []


def test_a_lost_reply_and_a_duplicate_are_both_handled_by_the_peer() -> None:
    async def scenario(swarm: Swarm) -> None:
        one, two = await swarm.start(_KEYS[0]), await swarm.start(_KEYS[1])
        call = asyncio.create_task(one.request(two.public, b"x", 60.0))
        while len(swarm.seen) < 2:
            await asyncio.sleep(0)
        assert not call.done()
        await two.close()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    swarm = Swarm(faults=Faults(drop_reply=1.0, duplicate=1.0))
    assert _run(scenario, swarm).seen == [(_KEYS[0], b"x")] * 2


def test_the_same_seed_gives_the_same_faults() -> None:
    async def arrived(seed: int) -> list[bytes]:
        swarm = Swarm(seed, Faults(drop=0.5))
        one, two = await swarm.start(_KEYS[0]), await swarm.start(_KEYS[1])
        calls = [asyncio.create_task(one.request(two.public, bytes([number]), 60.0)) for number in range(30)]
        for _ in range(50):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return [payload for _, payload in swarm.seen]

    first, again, other = (asyncio.run(arrived(seed)) for seed in (7, 7, 8))
    assert first == again != other and 5 < len(first) < 25


def test_a_crash_ends_what_is_under_way() -> None:
    async def scenario(swarm: Swarm) -> None:
        one, two = await swarm.start(_KEYS[0]), await swarm.start(_KEYS[1])
        call = asyncio.create_task(one.request(two.public, b"x", 60.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        swarm.network.kill(one.public)
        with pytest.raises(TransportError, match="not running"):
            await call

    _run(scenario, Swarm(faults=Faults(drop=1.0)))


def test_the_directory_expires_and_respects_cuts() -> None:
    async def scenario(swarm: Swarm) -> None:
        one, two, three = [await swarm.start(key) for key in _KEYS[:3]]
        await one.publish(b"one", 1010.0)
        await two.publish(b"two", 1100.0)
        assert await three.discover() == [b"one", b"two"]
        swarm.network.cut(two.public, three.public)
        assert await three.discover() == [b"one"]
        swarm.now_unix_s = 1010.0
        assert await three.discover() == [] and await one.discover() == [b"two"]
        with pytest.raises(TransportError):
            await one.publish(bytes(5000), 2000.0)

    _run(scenario)
