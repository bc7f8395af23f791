"""Two or three real p2pd on loopback in one test: requests, the directory, late seeds, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tscale.node.transport.base import MAX_PAYLOAD_BYTES, MAX_RECORD_BYTES, TransportError
from tscale.node.transport.joining import JoinTimes
from tscale.node.transport.p2p import P2PConfig, P2PTransport
from tscale.node.transport.serving import ServerLimits
from tscale.protocol.errors import BadInput, PortInUse
from tscale.protocol.identity import Identity

pytestmark = pytest.mark.process

_TIMES = JoinTimes(first_s=0.2, longest_s=0.5, check_s=0.5)
_PATIENCE_S = 60.0


class Peers:
    """Makes transports with fixed identities in a folder; closes all of them at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[P2PTransport] = []

    def identity(self, number: int) -> Identity:
        return Identity.from_secret(bytes([number]) * 32)

    def config(self, number: int, **changes: object) -> P2PConfig:
        key_file = self._folder / f"key ü {number}"
        key_file.write_bytes(self.identity(number).key_file())
        key_file.chmod(0o600)
        return replace(P2PConfig(key_file, "test-abc", host="127.0.0.1", times=_TIMES), **changes)

    async def start(self, number: int, **changes: object) -> P2PTransport:
        transport = P2PTransport(self.config(number, **changes))
        self._made.append(transport)
        transport.set_handler(_reverse)
        await transport.start()
        return transport

    async def close(self) -> None:
        for transport in self._made:
            await transport.close()


@asynccontextmanager
async def peers_in(folder: Path) -> AsyncIterator[Peers]:
    peers = Peers(folder)
    try:
        yield peers
    finally:
        await peers.close()


async def _reverse(peer_public: bytes, payload: bytes) -> bytes:
    return payload[::-1]


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not await condition():
        assert time.monotonic() < deadline_s, f"not within {_PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.05)


async def until_joined(transport: P2PTransport) -> None:
    async def joined() -> bool:
        return all(seed.reachable for seed in transport.seeds_status()) and bool(transport.seeds_status())

    await until(joined, "the seed answers")


def private_dirs() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob(f"tscale-{os.getpid()}-*")}


def free_port() -> int:
    """A port below the ephemeral range, so that no outgoing connection takes it meanwhile."""
    for port in range(21000 + os.getpid() % 5000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


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


def test_records_are_found_by_all_and_junk_is_not_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            seed = await peers.start(1, check_record=lambda peer_id, record: not record.startswith(b"junk"))
            member = await peers.start(2, seeds=tuple(seed.own_addrs()))
            dialler = await peers.start(3, seeds=tuple(seed.own_addrs()), listen=False, serve_dht=False)
            await until_joined(member)
            await until_joined(dialler)
            record = b"member" + bytes(MAX_RECORD_BYTES - 6)
            await member.publish(record, time.time() + 60)
            await dialler.publish(b"dialler", time.time() + 60)
            assert sorted(await seed.discover()) == [b"dialler", record]
            assert sorted(await dialler.discover()) == [b"dialler", record]
            await dialler.publish(b"newer", time.time() + 90)
            assert sorted(await member.discover()) == sorted([b"newer", record])
            await dialler.publish(b"junk", time.time() + 120)
            assert b"junk" not in await seed.discover()
            with pytest.raises(TransportError, match="longer than"):
                await member.publish(bytes(MAX_RECORD_BYTES + 1), time.time() + 60)

    asyncio.run(scenario())


def test_a_seed_that_comes_later_is_found_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            port = free_port()
            addr = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peers.identity(1).peer_id}"
            early = await peers.start(2, seeds=(addr,))

            async def refused() -> bool:
                return [status.problem for status in early.seeds_status()] == ["nobody listens at its address"]

            await until(refused, "the missing seed is reported")
            assert await early.discover() == []
            await early.publish(b"early", time.time() + 60)
            impostor = await peers.start(9, port=port)

            async def named() -> bool:
                return "another peer answers" in early.seeds_status()[0].problem

            await until(named, "the wrong peer id is reported")
            await impostor.close()
            seed = await peers.start(1, port=port)
            assert seed.own_addrs() == [addr]
            await until_joined(early)

            async def handed_over() -> bool:
                return await seed.discover() == [b"early"]

            await until(handed_over, "the record reaches the seed")
            await seed.close()

            async def lost() -> bool:
                return not early.seeds_status()[0].reachable

            await until(lost, "the lost seed is noticed")

    asyncio.run(scenario())


def test_a_port_in_use_and_a_bad_key_or_host_are_one_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            port = free_port()
            await peers.start(1, port=port)
            with pytest.raises(PortInUse, match=f"port {port} .*in use") as caught:
                await peers.start(2, port=port)
            assert "\n" not in str(caught.value)
            with pytest.raises(BadInput, match="not an IP address"):
                await peers.start(3, host="localhost")
            with pytest.raises(BadInput, match="can't listen"):
                await peers.start(4, host="192.0.2.77", port=port)
            assert len(private_dirs()) == 1

    asyncio.run(scenario())


def test_closing_leaves_no_process_no_socket_and_no_task(tmp_path: Path) -> None:
    async def scenario() -> None:
        me = psutil.Process()
        seed = P2PTransport(Peers(tmp_path).config(1))
        await seed.start()
        pid = seed.helper_pid
        assert pid is not None and psutil.pid_exists(pid)
        await seed.close()
        await seed.close()
        assert not psutil.pid_exists(pid)
        assert private_dirs() == set()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert [child for child in me.children() if "p2pd" in child.name()] == []
        with pytest.raises(TransportError, match="not running"):
            await seed.request(bytes(32), b"", 1.0)

    asyncio.run(scenario())


def test_a_killed_p2pd_is_started_again_at_the_same_address(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            seed = await peers.start(1)
            member = await peers.start(2, seeds=tuple(seed.own_addrs()))
            await until_joined(member)
            addrs, pid = seed.own_addrs(), seed.helper_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

            async def back() -> bool:
                return seed.helper_pid not in (None, pid)

            await until(back, "p2pd runs again")
            assert seed.own_addrs() == addrs

            async def answers() -> bool:
                try:
                    return await member.request(peers.identity(1).public, b"ab", 5.0) == b"ba"
                except TransportError:
                    return False

            await until(answers, "the peer answers again")

    asyncio.run(scenario())


_CHILD = """
import asyncio, sys
from pathlib import Path
from tscale.node.transport.p2p import P2PConfig, P2PTransport

async def main():
    transport = P2PTransport(P2PConfig(Path(sys.argv[1]), "test-abc", host="127.0.0.1"))
    await transport.start()
    print(transport.helper_pid, transport._running.guard.path, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_after_kill_9_of_the_node_p2pd_ends_and_its_sockets_are_removed_later(tmp_path: Path) -> None:
    config = Peers(tmp_path).config(1)
    node = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(config.key_file)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert node.stdout is not None
    pid_text, folder = node.stdout.readline().split()
    node.kill()
    node.wait()
    node.stdout.close()
    p2pd = psutil.Process(int(pid_text)) if psutil.pid_exists(int(pid_text)) else None
    if p2pd is not None:
        p2pd.wait(timeout=10.0)

    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            await peers.start(2)
            assert not Path(folder).exists()

    asyncio.run(scenario())
