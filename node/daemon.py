"""The daemon: puts a peer's state machine, its transport, its store and its worker together and runs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.node.blobs import BlobStore
from tscale.node.board import Board, BoardConfig
from tscale.node.bootstrap import contacts_of, fetch_spec, is_peer_record
from tscale.node.config import NodeConfig
from tscale.node.data.corpus import load_text_file
from tscale.node.driver import Driver, DriverParts
from tscale.node.local_peers import find_local
from tscale.node.recordfile import RecordFile
from tscale.node.statedir import StateDir, atomic_write, load_or_create_identity
from tscale.node.trainer import Trainer, TrainerHooks
from tscale.node.transport.base import Transport, TransportError
from tscale.node.transport.p2p import P2PConfig, P2PTransport
from tscale.node.worker.messages import Ready, WorkerConfig
from tscale.protocol import events as ev
from tscale.protocol.chain import genesis_digest
from tscale.protocol.errors import BadInput, StopNode
from tscale.protocol.hashing import BlobRef
from tscale.protocol.identity import Identity
from tscale.protocol.links import SwarmLink, format_link
from tscale.protocol.peer import PeerMachine
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.status import StatusSnapshot
from tscale.protocol.view import PeerConfig

_LOG = logging.getLogger("tscale.node")
STATUS_EVERY_S = 1.0
DISCOVER_EVERY_S = (2.0, 30.0)  # while alone, and else
LOCAL_EVERY_S = 3.0
KEEP_PEERS_EVERY_S = 20.0
GOODBYE_S = 1.0
DEFAULT_UPLOAD_BPS = 20e6


class NodeEvents(Protocol):
    """What a node tells whoever runs it."""

    def on_ready(self, link: str, addrs: list[str]) -> None: ...

    def on_status(self, snapshot: StatusSnapshot) -> None: ...

    def on_notice(self, line: str) -> None: ...


@dataclass(frozen=True)
class NodeOptions:
    """One node of one swarm. `spec` None: fetch it from the seeds and check it against the id. The caller holds the
    lock of `swarm_dir`. `dataset_files` are texts of the spec's dataset that lie on this machine."""

    swarm_id: str
    spec: SwarmSpec | None
    swarm_dir: Path
    role: str
    seeds: tuple[str, ...]
    host: str
    port: int
    name: str
    config: NodeConfig
    dataset_files: tuple[Path, ...] = ()


async def run_node(options: NodeOptions, events: NodeEvents) -> int:
    """Run until a signal, a leave request or an error that only a person can mend. Returns 0; raises StopNode."""
    node = Node(options, events)
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    with contextlib.suppress(NotImplementedError):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, node.on_signal, task)
    try:
        await node.run()
    finally:
        with contextlib.suppress(NotImplementedError):
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    return 0


class Node:
    """The running daemon."""

    def __init__(self, options: NodeOptions, events: NodeEvents, transport: Transport | None = None) -> None:
        self.options = options
        self.events = events
        self.state = StateDir(options.swarm_dir)
        self._given_transport = transport
        self._stop = asyncio.Event()
        self._fatal: StopNode | None = None
        self._signals = 0
        self.driver: Driver | None = None
        self.board: Board | None = None
        self.trainer: Trainer | None = None

    def on_signal(self, task: asyncio.Task[object] | None) -> None:
        """The first signal stops the node in good order, the second at once."""
        self._signals += 1
        if self._signals == 1:
            self._stop.set()
        elif task is not None:
            task.cancel()

    def fail(self, error: StopNode) -> None:
        """Something only a person can mend: stop in good order, then raise it."""
        if self._fatal is None:
            self._fatal = error
            _LOG.error("stopping reason=%s", error)
        self._stop.set()

    async def run(self) -> None:
        """The whole life of the node."""
        self._clean_scratch()
        identity = load_or_create_identity(self.state)
        known = contacts_of(RecordFile(self.state.peers).load())
        transport = self._given_transport or self._transport()
        await transport.start()
        try:
            for public, addrs in known:
                transport.learn_addrs(public, addrs)
            spec = await self._spec(transport)
            if spec is not None:
                await self._serve(identity, transport, spec, known)
        finally:
            await transport.close()
        if self._fatal is not None:
            raise self._fatal

    # -- setting up ---------------------------------------------------------------------------------------------

    def _transport(self) -> Transport:
        options, network = self.options, self.options.config.network
        transport = P2PTransport(
            P2PConfig(
                key_file=self.state.identity_key,
                swarm_id=options.swarm_id,
                host=options.host,
                port=options.port,
                listen=network.listen,
                seeds=options.seeds,
                announce=network.announce,
                serve_dht=network.reachable and network.listen,
                check_record=is_peer_record,
                now_unix_s=self._swarm_unix_s,
            )
        )
        transport.link.upload.set_rate(network.upload_bytes_per_s or None)
        transport.link.download.set_rate(network.download_bytes_per_s or None)
        return transport

    def _swarm_unix_s(self) -> float:
        now = time.time()
        return self.driver.machine.view.clock.swarm_unix_s(now) if self.driver is not None else now

    async def _spec(self, transport: Transport) -> SwarmSpec | None:
        """The swarm's spec, fetched if need be. None when the node is stopped before it came."""
        spec = self.options.spec
        if spec is None:
            fetch = asyncio.create_task(
                fetch_spec(transport, self.options.swarm_id, self.options.seeds, self.events.on_notice)
            )
            stop = asyncio.create_task(self._stop.wait())
            await asyncio.wait({fetch, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not fetch.done():
                fetch.cancel()
                await asyncio.gather(fetch, return_exceptions=True)
                return None
            spec = fetch.result()
        if spec.swarm_id != self.options.swarm_id:
            raise BadInput(f"the spec is {spec.swarm_id}'s, not {self.options.swarm_id}'s: check the link or the file")
        atomic_write(self.state.spec, spec.to_bytes())
        return spec

    def _parameters(self, spec: SwarmSpec) -> int:
        m = spec.model
        try:
            return model_layout(
                ModelConfig(m.kind, m.width, m.heads, m.head_dim, m.layers, m.window, m.vocab, m.relu, m.combine)
            ).numel
        except ValueError as error:
            raise BadInput(f"this version can't train the model of the spec: {error}") from error

    def _machine(self, identity: Identity, spec: SwarmSpec, store: BlobStore, parameters: int) -> PeerMachine:
        upload = 8.0 * self.options.config.network.upload_bytes_per_s or DEFAULT_UPLOAD_BPS
        machine = PeerMachine(
            PeerConfig(
                spec=spec,
                identity=identity,
                role=self.options.role,
                seed=secrets.randbits(63),
                name=self.options.name,
                parameters=parameters,
                upload_bps=upload,
                has_seeds=bool(self.options.seeds),
            )
        )
        wanted = {shard.root for shard in spec.data.shards}
        for path in self.options.dataset_files:
            store.add_bytes(load_text_file(path))
        complete: dict[BlobRef, tuple[bytes, ...]] = {}
        for ref in store.refs():
            hashes = store.hashes(ref.root)
            if hashes is not None:
                complete[ref] = hashes
        partial = {ref: (h, set(store.have(ref.root))) for ref in store.parts() if (h := store.hashes(ref.root))}
        records = RecordFile(self.state.chain)
        kept = records.load()
        bad = machine.restore(kept, complete, partial)
        if bad:
            self.events.on_notice(f"{bad} damaged records in {self.state.chain} were left out")
        store.set_pins(wanted)
        return machine

    def _trainer(self, identity: Identity, spec: SwarmSpec, store: BlobStore, driver: Driver, board: Board) -> Trainer:
        def on_ready(ready: Ready) -> None:
            board.progress = None

        hooks = TrainerHooks(
            feed=driver.feed,
            on_ready=on_ready,
            on_progress=board.on_progress,
            on_evaluated=board.on_evaluated,
            on_notice=self.events.on_notice,
            on_fatal=self.fail,
        )
        config = WorkerConfig(
            spec=spec.to_bytes(),
            public=identity.public,
            genesis=genesis_digest(spec.swarm_id),
            genesis_round=-1,
            data=tuple(str(store.path(shard.root)) for shard in spec.data.shards),
            checkpoint_dir=str(self.state.checkpoint),
            scratch_dir=str(self._scratch()),
            threads=self.options.config.compute.threads or 1,
            paused=True,
            checkpoint_every_folds=spec.rounds.snapshot_every,
        )
        log = self.state.log / "worker.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return Trainer(config, store, hooks, log)

    def _scratch(self) -> Path:
        return self.state.path / "scratch"

    def _clean_scratch(self) -> None:
        scratch = self._scratch()
        scratch.mkdir(mode=0o700, exist_ok=True)
        for path in scratch.iterdir():
            path.unlink(missing_ok=True)
        (self.state.path / "leave.request").unlink(missing_ok=True)

    # -- running ------------------------------------------------------------------------------------------------

    async def _serve(
        self,
        identity: Identity,
        transport: Transport,
        spec: SwarmSpec,
        known: tuple[tuple[bytes, tuple[str, ...]], ...],
    ) -> None:
        store = BlobStore(self.state.blobs, self.options.config.storage.blob_quota_bytes)
        parameters = self._parameters(spec)
        machine = self._machine(identity, spec, store, parameters)
        parts = DriverParts(machine, transport, store, RecordFile(self.state.chain), self.state.rounds, self.fail)
        driver = self.driver = Driver(parts)
        board_config = BoardConfig(
            self.options.role, self.options.name, str(self.state.path), parameters, spec.model.kind
        )
        board = self.board = Board(board_config, machine, transport)

        def start_worker() -> None:
            store.set_pins({shard.root for shard in spec.data.shards})
            if self.options.role == "trainer" and self.trainer is None:
                trainer = self._trainer(identity, spec, store, driver, board)
                self.trainer = driver.trainer = trainer
                trainer.start()

        driver.on_dataset = start_worker
        transport.set_handler(driver.answer)
        driver.feed(ev.Contacts((*known, *contacts_of_links(self.options.seeds))))
        driver.feed(ev.AddrsChanged(tuple(transport.own_addrs())))
        link = format_link(SwarmLink(spec.swarm_id, tuple(transport.own_addrs())))
        self.events.on_ready(link, transport.own_addrs())
        await self._until_stopped(transport, driver, board)
        await self._say_goodbye(driver, board)

    async def _until_stopped(self, transport: Transport, driver: Driver, board: Board) -> None:
        loops = (
            self._tick(driver),
            self._look_for_peers(transport, driver),
            self._look_nearby(transport, driver),
            self._show_status(driver, board),
            self._keep_peers(driver),
        )
        tasks = [asyncio.create_task(self._task(loop)) for loop in loops]
        try:
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _task(self, coroutine: object) -> None:
        """A task boundary: what ends a loop of the node ends the node, with a reason."""
        try:
            await coroutine  # type: ignore[misc]
        except StopNode as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - logged with its context; the node stops in good order
            _LOG.exception("task_failed")
            self.fail(StopNode(f"an unexpected error stopped the node ({type(error).__name__}): see {self.state.log}"))

    async def _say_goodbye(self, driver: Driver, board: Board) -> None:
        board.stopping = True
        self._write_status(board)
        try:
            driver.feed(ev.Leaving())
            if self.trainer is not None:
                note = await self.trainer.stop()
                if note:
                    self.events.on_notice(note)
            await driver.settle(GOODBYE_S)
        finally:
            if self.trainer is not None:
                await self.trainer.stop()
            await driver.close()
        self._keep_chain(driver)

    async def _tick(self, driver: Driver) -> None:
        every_s = max(0.02, min(0.25, driver.machine.view.pace.flush_s))
        while True:
            driver.feed(ev.Tick())
            await asyncio.sleep(every_s)

    async def _look_for_peers(self, transport: Transport, driver: Driver) -> None:
        while True:
            with contextlib.suppress(TransportError):
                found = await transport.discover()
                driver.feed(ev.Discovered(tuple(found)))
            addrs = tuple(transport.own_addrs())
            driver.feed(ev.AddrsChanged(addrs))
            alone = not driver.machine.rounds.others()
            await asyncio.sleep(DISCOVER_EVERY_S[0] if alone else DISCOVER_EVERY_S[1])

    async def _look_nearby(self, transport: Transport, driver: Driver) -> None:
        """Other nodes of this user on this machine."""
        seen: set[str] = set()
        while True:
            new = [addr for addr in find_local(self.options.swarm_id) if addr not in seen]
            for public, addrs in contacts_of_links(tuple(new)):
                if public != driver.machine.view.own:
                    transport.learn_addrs(public, addrs)
                    driver.feed(ev.Contacts(((public, addrs),)))
            seen.update(new)
            await asyncio.sleep(LOCAL_EVERY_S)

    async def _show_status(self, driver: Driver, board: Board) -> None:
        leave = self.state.path / "leave.request"
        while True:
            self._write_status(board)
            if leave.exists():
                self.events.on_notice("leaving the swarm: another command asked for it")
                self._stop.set()
            await asyncio.sleep(STATUS_EVERY_S)

    def _write_status(self, board: Board) -> None:
        snapshot = board.snapshot(time.time())
        atomic_write(self.state.status, snapshot.to_json().encode(), durable=False)
        self.events.on_status(snapshot)

    async def _keep_peers(self, driver: Driver) -> None:
        """Remember the last good peers, so that a restart needs no seed."""
        while True:
            await asyncio.sleep(KEEP_PEERS_EVERY_S)
            view = driver.machine.view
            good = [c.signed.bytes for c in view.members.alive(view.swarm_now) if c.signed is not None and c.addrs]
            if good:
                RecordFile(self.state.peers).rewrite(good[:256])

    def _keep_chain(self, driver: Driver) -> None:
        """Rewrite the record file without what was pruned."""
        chain = driver.machine.view.chain
        links = sorted((link for link in chain.links.values() if link.signed), key=lambda link: link.depth)
        own = [s.bytes for s in driver.machine.sync.offers.values() if s.public == driver.machine.view.own]
        RecordFile(self.state.chain).rewrite([*(link.signed.bytes for link in links if link.signed), *own])


def contacts_of_links(seeds: tuple[str, ...]) -> tuple[tuple[bytes, tuple[str, ...]], ...]:
    """The peers in a list of multiaddrs."""
    from tscale.protocol.addrs import parse_multiaddr_peer

    found: dict[bytes, list[str]] = {}
    for text in seeds:
        addr, public = parse_multiaddr_peer(text)
        found.setdefault(public, []).append(addr)
    return tuple((public, tuple(addrs)) for public, addrs in found.items())
