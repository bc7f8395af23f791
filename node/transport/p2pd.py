"""One p2pd process (go-libp2p) and the calls over its control socket.

hivemind's own start of p2pd is not used: the process belongs in a group of its own (so that Ctrl-C in a terminal
reaches the node first), its sockets in a private folder, and a cancelled call must close its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tscale.node.transport.base import TransportError, WrongPeer
from tscale.node.transport.hivemind_parts import HivemindParts
from tscale.protocol.errors import StopNode

_LOG = logging.getLogger("tscale.transport")
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 3.0
_KEPT_LINES = 20


@dataclass(frozen=True)
class P2pdOptions:
    """Command line of p2pd. `listen_addrs` empty means dial out only."""

    key_file: Path
    listen_addrs: tuple[str, ...]
    announce_addrs: tuple[str, ...] = ()
    serve_dht: bool = True

    def command(self, p2pd_path: str, socket_path: Path) -> list[str]:
        """The arguments; relaying, NAT tricks and QUIC stay off."""
        args = [p2pd_path, f"-listen=/unix{socket_path}", f"-id={self.key_file}", "-idleTimeout=30s", "-connManager=1"]
        args += ["-autonat=0", "-autoRelay=0", "-natPortMap=0", "-relay=0", "-relayService=0", "-tls=1", "-quic=0"]
        args += ["-dhtServer=1" if self.serve_dht else "-dhtClient=1"]
        args += [f"-hostAddrs={','.join(self.listen_addrs)}"] if self.listen_addrs else ["-noListenAddrs=1"]
        return args + ([f"-announceAddrs={','.join(self.announce_addrs)}"] if self.announce_addrs else [])


class P2pd:
    """A running p2pd. Make it with `spawn`; `stop` ends it."""

    def __init__(self, parts: HivemindParts, process: asyncio.subprocess.Process, socket_path: Path) -> None:
        self.socket_path = socket_path
        self._parts = parts
        self._process = process
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read_output())

    @classmethod
    async def spawn(cls, parts: HivemindParts, options: P2pdOptions, folder: Path) -> P2pd:
        """Start p2pd with its control socket in `folder`. Raises StopNode with its last words when it doesn't start."""
        socket_path = folder / "p2pd.sock"
        process = await asyncio.create_subprocess_exec(
            *options.command(parts.p2pd_path, socket_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self = cls(parts, process, socket_path)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._until_ready()
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise StopNode(
                    f"p2pd did not start within {_START_TIMEOUT_S:g} s: is the machine overloaded?"
                ) from error
            raise
        return self

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def wait(self) -> str:
        """Wait until the process ends; returns the last line it said."""
        await self._process.wait()
        await asyncio.wait({self._reader}, timeout=1.0)
        return self._lines[-1] if self._lines else f"exit code {self._process.returncode}"

    async def stop(self) -> None:
        """End the process, politely first."""
        for end in (self._process.terminate, self._process.kill):
            if self._process.returncode is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def connect(self, peer: Any, addrs: tuple[Any, ...], timeout_s: float) -> None:
        """Be connected to a peer (hivemind's PeerID), dialling `addrs` (multiaddrs) and what p2pd knows itself.

        Returns at once when a connection exists, whoever dialled it. Raises TransportError.
        """
        messages = self._parts.messages
        connect = messages.ConnectRequest(peer=peer.to_bytes(), addrs=[addr.to_bytes() for addr in addrs])
        connect.timeout = max(1, int(timeout_s))
        request = messages.Request(type=messages.Request.CONNECT, connect=connect)
        async with self._connection(timeout_s) as (reader, writer):
            await self._exchange(reader, writer, request)

    async def list_peers(self) -> list[bytes]:
        """The ids (bytes) of the peers connected now."""
        request = self._parts.messages.Request(type=self._parts.messages.Request.LIST_PEERS)
        async with self._connection(_STOP_TIMEOUT_S) as (reader, writer):
            response = await self._exchange(reader, writer, request)
        return [bytes(info.id) for info in response.peers]

    async def identify(self) -> tuple[bytes, list[str]]:
        """This peer's id (bytes) and the multiaddrs it listens on and was seen at."""
        request = self._parts.messages.Request(type=self._parts.messages.Request.IDENTIFY)
        async with self._connection(_STOP_TIMEOUT_S) as (reader, writer):
            response = await self._exchange(reader, writer, request)
        return bytes(response.identify.id), [str(self._parts.multiaddr(addr)) for addr in response.identify.addrs]

    @contextlib.asynccontextmanager
    async def open_stream(
        self, peer: Any, protocol: str, timeout_s: float
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A stream to a peer that p2pd is connected to or can dial. Raises TransportError when there is none."""
        messages = self._parts.messages
        opening = messages.StreamOpenRequest(peer=peer.to_bytes(), proto=[protocol], timeout=max(1, int(timeout_s)))
        request = messages.Request(type=messages.Request.STREAM_OPEN, streamOpen=opening)
        reader, writer = await self._open_socket()
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(reader, writer, request)
            yield reader, writer
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def _connection(self, timeout_s: float) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._open_socket()
                try:
                    yield reader, writer
                finally:
                    writer.close()
        except TimeoutError as error:
            raise TransportError(f"no connection within {timeout_s:g} s") from error

    async def _open_socket(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(str(self.socket_path))
        except OSError as error:
            raise TransportError("p2pd is not running") from error

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Any) -> Any:
        response = self._parts.messages.Response()
        try:
            await self._parts.write_message(writer, request)
            await self._parts.read_message(reader, response)
        except (OSError, EOFError) as error:
            raise TransportError("p2pd is not running") from error
        if response.type == self._parts.messages.Response.ERROR:
            kind = WrongPeer if "peer id mismatch" in response.error.msg.lower() else TransportError
            raise kind(explain(response.error.msg))
        return response

    async def _until_ready(self) -> None:
        ended = asyncio.create_task(self._process.wait())
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            ready.cancel()
        if not self._ready.is_set():
            await asyncio.wait({self._reader}, timeout=1.0)
            said = self._lines[-1] if self._lines else "nothing"
            raise StopNode(f"p2pd did not start, it said: {said[:200]}")

    async def _read_output(self) -> None:
        # p2pd writes little; whatever it writes must be read, or it blocks once the pipe is full
        output = self._process.stdout
        assert output is not None
        rest = b""
        while piece := await output.read(4096):
            *lines, rest = (rest + piece).split(b"\n")
            rest = rest[-4096:]
            for line in lines:
                text = line.decode("utf-8", "replace").strip()
                self._lines.append(text)
                _LOG.debug("p2pd %s", text[:300])
                if text.startswith("Peer ID:"):
                    self._ready.set()


def explain(message: str) -> str:
    """p2pd's error in a few plain words, for status and logs."""
    text = message.lower()
    known = {
        "peer id mismatch": "another peer answers at this address (its peer id is different)",
        "dial backoff": "it could not be dialled a moment ago",
        "connection refused": "nobody listens at its address",
        "no addresses": "no address of it is known",
        "failed to find any peer": "no address of it is known",
        "routing: not found": "no address of it is known",
        "no route to host": "no route to its address",
        "network is unreachable": "no route to its address",
        "i/o timeout": "its address does not answer",
        "deadline exceeded": "its address does not answer",
        "protocols not supported": "it does not speak this protocol",
        "protocol not supported": "it does not speak this protocol",
        "security protocol": "something that is not a peer listens at its address",
        "no good addresses": "its address can't be dialled from here",
        "stream reset": "it closed the stream",
    }
    for mark, meaning in known.items():
        if mark in text:
            return meaning
    return " ".join(message.split())[:160]
