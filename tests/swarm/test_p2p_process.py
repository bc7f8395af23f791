"""The p2pd process below a transport: what stops it from starting, its restart, and nothing left of it afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.p2p_peers import Peers, free_port, peers_in, private_dirs, until, until_joined
from tscale.node.transport.base import TransportError
from tscale.node.transport.p2p import P2PTransport
from tscale.protocol.errors import BadInput, PortInUse

pytestmark = pytest.mark.process


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
