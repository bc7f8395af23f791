"""The real network: a p2pd process for connections, streams for requests, hivemind's DHT for the directory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tscale.node.netaddr import advertised, believable, listen_addrs, look_at_machine, require_free_port
from tscale.node.transport.base import MAX_PAYLOAD_BYTES, RequestHandler, SeedStatus, TransportError
from tscale.node.transport.directory import Directory, DirectoryConfig, RecordCheck
from tscale.node.transport.gate import UnaryGate, close_p2p
from tscale.node.transport.hivemind_parts import HivemindParts, load_hivemind
from tscale.node.transport.joining import JoinCalls, JoinTimes, SeedKeeper, probe_any
from tscale.node.transport.p2pd import P2pd, P2pdOptions
from tscale.node.transport.privatedir import FolderGuard, make_private_dir
from tscale.node.transport.serving import RequestServer, ServerLimits
from tscale.node.transport.wire import PROTOCOL, Link, ask
from tscale.protocol.addrs import PeerAddr, parse_addr
from tscale.protocol.errors import BadInput, StopNode
from tscale.protocol.identity import find_public, peer_id

_LOG = logging.getLogger("tscale.transport")
_MAX_KNOWN_PEERS = 4096
_MAX_OUTGOING = 64
_MEET_PER_ROUND = 8
_RESTART_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)


def _accept_any(peer: str, record: bytes) -> bool:
    return True


@dataclass(frozen=True)
class P2PConfig:
    """What the network needs to know.

    `key_file` holds the Ed25519 key in libp2p's form. `host` and `port`: where to listen, port 0 for any free one;
    `listen=False` dials out only. `announce`: multiaddrs to tell others instead of those the machine shows.
    `serve_dht=False` for a node that others can't dial: it must not hold records for them.
    `check_record` sees each directory entry before it is stored; `now_unix_s` is the clock for their expiry.
    """

    key_file: Path
    swarm_id: str
    host: str = "0.0.0.0"
    port: int = 0
    listen: bool = True
    seeds: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    serve_dht: bool = True
    connect_timeout_s: float = 8.0
    check_record: RecordCheck = _accept_any
    now_unix_s: Callable[[], float] = time.time
    limits: ServerLimits = field(default_factory=ServerLimits)
    times: JoinTimes = field(default_factory=JoinTimes)


@dataclass
class _Running:
    """What exists only while p2pd runs."""

    guard: FolderGuard
    p2pd: P2pd
    p2p: Any
    server: RequestServer
    directory: Directory
    connected: set[bytes] = field(default_factory=set)
    tasks: tuple[asyncio.Task[Any], ...] = ()


class P2PTransport:
    """The Transport over p2pd. `link` holds the byte counters and the rate limits, which may be changed at any time."""

    def __init__(self, config: P2PConfig) -> None:
        self.link = Link()
        self._config = config
        self._seeds = tuple(_seed(text) for text in config.seeds)
        self._handler: RequestHandler | None = None
        self._known: dict[bytes, tuple[PeerAddr, ...]] = {}
        self._parts: HivemindParts | None = None
        self._running: _Running | None = None
        self._keeper: SeedKeeper | None = None
        self._restarter: asyncio.Task[None] | None = None
        self._outgoing = asyncio.Semaphore(_MAX_OUTGOING)
        self._port = config.port
        self._own_addrs: list[str] = []
        self._public = b""

    async def start(self) -> None:
        """Start p2pd and begin to join. Raises PortInUse, BadInput (the host or the key) or StopNode."""
        self._parts = load_hivemind()
        _require_host(self._config.host)
        if self._config.listen:
            require_free_port(self._config.host, self._config.port)
        await self._launch()
        self._restarter = asyncio.create_task(self._keep_running())

    async def close(self) -> None:
        """Stop; afterwards p2pd and its sockets are gone and requests raise TransportError."""
        if self._restarter is not None:
            self._restarter.cancel()
            await asyncio.gather(self._restarter, return_exceptions=True)
            self._restarter = None
        await self._tear_down()

    async def request(self, peer_public: bytes, payload: bytes, timeout_s: float) -> bytes:
        """Ask a peer; connects first when needed."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TransportError(f"a request of {len(payload)} bytes is longer than {MAX_PAYLOAD_BYTES}")
        try:
            async with asyncio.timeout(timeout_s), self._outgoing, self._stream(peer_public) as (reader, writer):
                return await ask(reader, writer, payload, self.link)
        except TimeoutError as error:
            raise TransportError(f"no reply within {timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            self._forget_connection(peer_public)
            raise TransportError(f"the connection broke ({type(error).__name__})") from error

    def set_handler(self, handler: RequestHandler) -> None:
        """Answer requests with this, also those that come after a restart of p2pd."""
        self._handler = handler
        if self._running is not None:
            self._running.server.handler = handler

    def learn_addrs(self, peer_public: bytes, addrs: tuple[str, ...]) -> None:
        """Remember where a peer says it is; the peer heard of longest ago is forgotten when there are too many."""
        wanted = believable(addrs, peer_public, self._config.host)
        self._known.pop(peer_public, None)
        if wanted and peer_public != self._public:
            self._known[peer_public] = wanted
        if len(self._known) > _MAX_KNOWN_PEERS:
            del self._known[next(iter(self._known))]

    def own_addrs(self) -> list[str]:
        """Addresses with this peer's id; as of the last look, a few seconds old."""
        return list(self._own_addrs)

    async def publish(self, record: bytes, expires_unix_s: float) -> None:
        """Put the record under this peer's id into the DHT."""
        await self._require_running().directory.publish(peer_id(self._public), record, expires_unix_s)

    async def discover(self) -> list[bytes]:
        """What the DHT holds for the swarm."""
        return await self._require_running().directory.discover()

    def seeds_status(self) -> tuple[SeedStatus, ...]:
        """The seeds and whether they answer; a seed that is this very node is left out."""
        return () if self._keeper is None else self._keeper.status

    async def connected_peers(self) -> tuple[bytes, ...]:
        """The public keys of the peers with an open connection, whoever dialled."""
        ids = await self._require_running().p2pd.list_peers()
        found = (find_public(str(self._hivemind.peer_id(raw))) for raw in ids)
        return tuple(public for public in found if public is not None)

    @property
    def up_bytes(self) -> int:
        """Bytes sent."""
        return self.link.traffic.up_bytes

    @property
    def down_bytes(self) -> int:
        """Bytes received."""
        return self.link.traffic.down_bytes

    @property
    def helper_pid(self) -> int | None:
        """The process id of p2pd, while it runs."""
        return None if self._running is None else self._running.p2pd.pid

    async def _launch(self) -> None:
        parts, config = self._hivemind, self._config
        folder = make_private_dir()
        guard = FolderGuard(folder)
        p2pd = None
        try:
            listens = tuple(listen_addrs(config.host, self._port)) if config.listen else ()
            options = P2pdOptions(config.key_file, listens, config.announce, config.serve_dht)
            p2pd = await P2pd.spawn(parts, options, folder)
            self._running = await self._attach(p2pd, folder, guard)
        except BaseException:
            if p2pd is not None:
                await p2pd.stop()
            guard.end()
            raise
        self._running.tasks = (asyncio.create_task(self._join_forever(), name="transport-join"),)

    async def _attach(self, p2pd: P2pd, folder: Path, guard: FolderGuard) -> _Running:
        parts, config = self._hivemind, self._config
        # hivemind puts its client socket at a fixed prefix in /tmp; a subclass is the way to move it
        private_p2p: Any = type("PrivateP2P", (parts.p2p,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
        p2p = await private_p2p.replicate(parts.multiaddr(f"/unix{p2pd.socket_path}"))
        UnaryGate(parts, p2p, self.link.traffic)
        server = RequestServer(config.limits, self.link)
        server.handler = self._handler
        self._public = find_public(str(p2p.peer_id)) or b""
        if not self._public:
            raise BadInput(f"{config.key_file} does not hold an Ed25519 key: create a new identity")

        async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            public = find_public(str(info.peer_id))
            if public is None:
                writer.close()
            else:
                await server.serve(public, reader, writer)

        await p2p.add_binary_stream_handler(PROTOCOL, serve)
        directory_config = DirectoryConfig(config.swarm_id, config.serve_dht, config.now_unix_s, config.check_record)
        directory = await Directory.create(parts, p2p, directory_config)
        running = _Running(guard, p2pd, p2p, server, directory)
        await self._look_at_addrs(running)
        return running

    async def _tear_down(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        for task in running.tasks:
            task.cancel()
        await asyncio.gather(*running.tasks, return_exceptions=True)
        await running.server.close()
        await running.directory.close()
        await close_p2p(running.p2p)
        await running.p2pd.stop()
        running.guard.end()

    async def _keep_running(self) -> None:
        """Start p2pd again when it ends by itself."""
        failures = 0
        while True:
            if self._running is not None:
                started_s = time.monotonic()
                said = await self._running.p2pd.wait()
                _LOG.warning("p2pd_ended said=%s", said[:200])
                failures = 0 if time.monotonic() - started_s > 60 else failures
                await self._tear_down()
            await asyncio.sleep(_RESTART_WAITS_S[min(failures, len(_RESTART_WAITS_S) - 1)])
            failures += 1
            try:
                await self._launch()
            except (StopNode, TransportError, OSError) as error:
                _LOG.warning("p2pd_restart_failed reason=%s", error)

    @contextlib.asynccontextmanager
    async def _stream(self, public: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        running = self._require_running()
        peer = self._hivemind.peer_id.from_base58(peer_id(public))
        timeout_s = self._config.connect_timeout_s
        async with contextlib.AsyncExitStack() as stack:
            try:
                if public not in running.connected:
                    await self._connect(running, public)
                stream = await stack.enter_async_context(running.p2pd.open_stream(peer, PROTOCOL, timeout_s))
            except TransportError:
                if public not in running.connected:
                    raise
                # the connection is gone since the last request: dial again, once
                running.connected.discard(public)
                await self._connect(running, public)
                stream = await stack.enter_async_context(running.p2pd.open_stream(peer, PROTOCOL, timeout_s))
            yield stream

    async def _connect(self, running: _Running, public: bytes) -> None:
        if public == self._public:
            raise TransportError("a peer does not dial itself")
        parts, timeout_s = self._hivemind, self._config.connect_timeout_s
        given = tuple(seed for seed in self._seeds if seed.public == public)
        known = tuple(dict.fromkeys(_bare(addr) for addr in (*given, *self._known.get(public, ()))))
        peer = parts.peer_id.from_base58(peer_id(public))
        if known and peer.to_bytes() not in await running.p2pd.list_peers():
            # see SeedKeeper: p2pd must not be asked to dial a closed port, or it will not dial the open one later
            await probe_any(tuple(parse_addr(text) for text in known), timeout_s)
        await running.p2pd.connect(peer, tuple(parts.multiaddr(text) for text in known), timeout_s)
        if len(running.connected) >= _MAX_KNOWN_PEERS:
            running.connected.clear()
        running.connected.add(public)

    async def _join_forever(self) -> None:
        running = self._require_running()

        async def dial(seed: PeerAddr, timeout_s: float) -> None:
            peer = self._hivemind.peer_id.from_base58(peer_id(_named(seed)))
            await running.p2pd.connect(peer, (self._hivemind.multiaddr(_bare(seed)),), timeout_s)
            if not await running.directory.greet(peer):
                raise TransportError("it is connected, but does not answer as a node of a swarm")

        async def meet_others() -> None:
            await self._meet_others(running)

        seeds = tuple(seed for seed in self._seeds if seed.public != self._public)
        self._keeper = SeedKeeper(seeds, JoinCalls(dial, meet_others), self._config.times, random.Random())
        await self._keeper.run()

    async def _meet_others(self, running: _Running) -> None:
        """Greet connected peers that the DHT does not know; with no neighbour left, dial a few known peers."""
        parts = self._hivemind
        with contextlib.suppress(TransportError, OSError, EOFError):
            await self._look_at_addrs(running)
            if running.directory.neighbours == 0:
                some = random.sample(list(self._known), min(_MEET_PER_ROUND, len(self._known)))
                await asyncio.gather(*(self._connect(running, public) for public in some), return_exceptions=True)
            peers = [parts.peer_id(raw) for raw in await running.p2pd.list_peers()]
            new = [peer for peer in peers if not running.directory.knows(peer)]
            chosen = random.sample(new, min(_MEET_PER_ROUND, len(new)))
            await asyncio.gather(*(running.directory.greet(peer) for peer in chosen), return_exceptions=True)

    async def _look_at_addrs(self, running: _Running) -> None:
        _, seen = await running.p2pd.identify()
        if self._port == 0 and self._config.listen and seen:
            # a restart of p2pd listens where the peers know it
            self._port = parse_addr(seen[0]).port
        shown = list(self._config.announce) or advertised(seen, look_at_machine(), self._config.host)
        tail = f"/p2p/{peer_id(self._public)}"
        self._own_addrs = [addr if "/p2p/" in addr else addr + tail for addr in shown]

    def _forget_connection(self, public: bytes) -> None:
        if self._running is not None:
            self._running.connected.discard(public)

    def _require_running(self) -> _Running:
        if self._running is None:
            raise TransportError("the network is not running")
        return self._running

    @property
    def _hivemind(self) -> HivemindParts:
        if self._parts is None:
            raise TransportError("the network is not running")
        return self._parts


def _seed(text: str) -> PeerAddr:
    addr = parse_addr(text)
    if addr.public is None:
        raise BadInput(f"the seed {text!r} names no peer: a seed ends in /p2p/<peer id>")
    return addr


def _named(addr: PeerAddr) -> bytes:
    assert addr.public is not None
    return addr.public


def _bare(addr: PeerAddr) -> str:
    return PeerAddr(addr.family, addr.host, addr.port, None).text


def _require_host(host: str) -> None:
    from ipaddress import ip_address

    try:
        ip_address(host)
    except ValueError as error:
        raise BadInput(f"{host!r} is not an IP address to listen on: give one, or 0.0.0.0 for all") from error
