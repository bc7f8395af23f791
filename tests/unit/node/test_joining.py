"""Staying joined: when seeds are tried, what is said about them, and that a fault in one round ends nothing."""

from __future__ import annotations

import asyncio
import random
import socket
from dataclasses import dataclass, field

import pytest

from tscale.node.transport.base import TransportError
from tscale.node.transport.joining import JoinCalls, JoinTimes, SeedKeeper, probe_any
from tscale.protocol.addrs import PeerAddr
from tscale.protocol.identity import Identity

_TIMES = JoinTimes(first_s=0.5, longest_s=30.0, check_s=20.0)


def _seed(number: int) -> PeerAddr:
    return PeerAddr("ip4", f"203.0.113.{number}", 4001, Identity.from_secret(bytes([number]) * 32).public)


@dataclass
class Net:
    """Seeds that are up by number; counts what is tried and remembers the waits."""

    up: set[int] = field(default_factory=set)
    dialled: list[str] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    met: int = 0
    broken: bool = False

    def calls(self) -> JoinCalls:
        return JoinCalls(self.dial, self.meet, self.probe, self.sleep)

    async def probe(self, addr: PeerAddr, timeout_s: float) -> None:
        self.probed.append(addr.host)
        if int(addr.host.split(".")[-1]) not in self.up:
            raise TransportError("nobody listens at its address")

    async def dial(self, addr: PeerAddr, timeout_s: float) -> None:
        self.dialled.append(addr.host)
        if int(addr.host.split(".")[-1]) not in self.up:
            raise TransportError("it is gone")

    async def meet(self) -> None:
        self.met += 1
        if self.broken:
            raise RuntimeError("a fault of our own")

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0)


def _rounds(keeper: SeedKeeper, net: Net, count: int) -> None:
    async def run() -> None:
        task = asyncio.create_task(keeper.run())
        target = len(net.waits) + count
        while len(net.waits) < target:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_dead_seeds_are_tried_less_and_less_but_at_least_every_half_minute() -> None:
    net = Net()
    keeper = SeedKeeper((_seed(1), _seed(2)), net.calls(), _TIMES, random.Random(1))
    assert [status.problem for status in keeper.status] == ["not tried yet"] * 2
    _rounds(keeper, net, 10)
    ladder = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    assert all(top / 2 <= wait <= top for wait, top in zip(net.waits, ladder, strict=True))
    assert len({wait / top for wait, top in zip(net.waits, ladder, strict=True)}) == 10
    assert [status.problem for status in keeper.status] == ["nobody listens at its address"] * 2
    # p2pd is not asked to dial a port that is closed: its own back-off would grow to minutes
    assert net.dialled == [] and len(net.probed) == 20 and net.met == 10


def test_a_seed_that_comes_back_is_found_and_one_that_goes_is_noticed() -> None:
    net = Net(up={1})
    keeper = SeedKeeper((_seed(1), _seed(2)), net.calls(), _TIMES, random.Random(2))
    _rounds(keeper, net, 5)
    assert [status.reachable for status in keeper.status] == [True, False]
    net.up = {1, 2}
    _rounds(keeper, net, 1)
    assert [status.reachable for status in keeper.status] == [True, True]
    assert 10.0 <= net.waits[-1] <= 20.0
    net.up = {2}
    _rounds(keeper, net, 1)
    assert [(status.reachable, status.problem) for status in keeper.status] == [(False, "it is gone"), (True, "")]
    # lost after a calm: quick tries again
    assert net.waits[-1] <= 0.5


def test_a_fault_in_one_round_does_not_end_the_joining() -> None:
    net = Net(broken=True)
    keeper = SeedKeeper((_seed(1),), net.calls(), _TIMES, random.Random(3))
    _rounds(keeper, net, 3)
    net.broken, net.up = False, {1}
    _rounds(keeper, net, 1)
    assert keeper.status[0].reachable and net.met == 4


def test_without_seeds_the_node_only_meets_others() -> None:
    net = Net()
    _rounds(SeedKeeper((), net.calls(), _TIMES, random.Random(4)), net, 2)
    assert net.met == 2 and all(10.0 <= wait <= 20.0 for wait in net.waits)


def test_one_open_address_among_closed_ones_is_enough() -> None:
    async def scenario() -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            with socket.socket() as holder:
                # bound but not listening: connections are refused
                holder.bind(("127.0.0.1", 0))
                closed = PeerAddr("ip4", "127.0.0.1", holder.getsockname()[1], None)
                await probe_any((closed, PeerAddr("ip4", "127.0.0.1", port, None)), 30.0)
                with pytest.raises(TransportError, match="nobody listens at its address"):
                    await probe_any((closed, closed), 30.0)
        with pytest.raises(TransportError, match="no address"):
            await probe_any((), 30.0)

    asyncio.run(scenario())
