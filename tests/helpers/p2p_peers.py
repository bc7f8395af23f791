"""Real p2pd on loopback for tests: transports with fixed identities, and waiting for what they do."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tscale.node.transport.joining import JoinTimes
from tscale.node.transport.p2p import P2PConfig, P2PTransport
from tscale.protocol.identity import Identity

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
