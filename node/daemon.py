"""The daemon: puts a peer's state machine, its transport, its store and its worker together and runs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tscale.node.assembly import (
    NodeOptions,
    count_parameters,
    keep_port,
    make_machine,
    make_transport,
    make_worker_config,
    open_store,
    restore,
    scratch_dir,
)
from tscale.node.blobs import BlobStore
from tscale.node.board import Board, BoardConfig
from tscale.node.bootstrap import Contact, contacts_of, contacts_of_links, fetch_spec
from tscale.node.driver import Driver, DriverParts
from tscale.node.local_peers import find_local
from tscale.node.recordfile import RecordFile
from tscale.node.statedir import StateDir, atomic_write, load_or_create_identity, write_error
from tscale.node.trainer import Trainer, TrainerHooks
from tscale.node.transport.base import Transport, TransportError
from tscale.node.worker.messages import WorkerConfig
from tscale.protocol import events as ev
from tscale.protocol.errors import BadInput, DiskFull, StopNode
from tscale.protocol.identity import Identity
from tscale.protocol.links import SwarmLink, format_link
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.status import StatusSnapshot

__all__ = ["Node", "NodeEvents", "NodeOptions", "NodeParts", "contacts_of_links", "run_node"]

_LOG = logging.getLogger("tscale.node")
STATUS_EVERY_S = 1.0
DISCOVER_EVERY_S = (2.0, 30.0)  # while alone, and else
LOCAL_EVERY_S = 3.0
KEEP_PEERS_EVERY_S = (5.0, 20.0)  # at first, and else
LOOP_FAILURES = 3  # of one loop, in a row: then the node stops
GOODBYE_S = 1.0
SAVE_S = 6.0
"""How long an ending node waits for its worker's checkpoint. With the goodbye and the helper processes' end it must
stay under the 10 s that a person (and systemd, and docker) grants."""

T = TypeVar("T")


class NodeEvents(Protocol):
    """What a node tells whoever runs it."""

    def on_ready(self, link: str, addrs: list[str]) -> None: ...

    def on_status(self, snapshot: StatusSnapshot) -> None: ...

    def on_notice(self, line: str) -> None: ...


TrainerFactory = Callable[[WorkerConfig, BlobStore, TrainerHooks, Path], Trainer]


@dataclass(frozen=True)
class NodeParts:
    """What a test replaces: the network, the worker, the clock."""

    transport: Transport | None = None
    make_trainer: TrainerFactory = Trainer
    now_unix_s: Callable[[], float] = time.time


async def run_node(options: NodeOptions, events: NodeEvents) -> int:
    """Run until a signal, a leave request or an error that only a person can mend. Returns 0; raises StopNode."""
    node = Node(options, events)
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    caught = _signals()
    with contextlib.suppress(NotImplementedError):
        for number in caught:
            loop.add_signal_handler(number, node.on_signal, task)
    try:
        await node.run()
    finally:
        with contextlib.suppress(NotImplementedError):
            for number in caught:
                loop.remove_signal_handler(number)
    return 0


def _signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, SIGTERM, and a closed terminal unless nohup said to ignore that."""
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, hangup)


class Node:
    """The running daemon."""

    def __init__(self, options: NodeOptions, events: NodeEvents, parts: NodeParts | None = None) -> None:
        self.options = options
        self.events = events
        self.state = StateDir(options.swarm_dir)
        self.parts = parts or NodeParts()
        self.driver: Driver | None = None
        self.board: Board | None = None
        self.trainer: Trainer | None = None
        self._stop = asyncio.Event()
        self._fatal: StopNode | None = None
        self._signals = 0
        self._records = RecordFile(self.state.chain)

    def on_signal(self, task: asyncio.Task[Any] | None) -> None:
        """The first signal stops the node in good order, the second at once and unsaved."""
        self._signals += 1
        if self._signals == 1:
            self._stop.set()
        elif task is not None:
            if self.trainer is not None:
                self.trainer.kill()
            task.cancel()

    def fail(self, error: StopNode) -> None:
        """Something only a person can mend: stop in good order, then raise it."""
        if self._fatal is None:
            self._fatal = error
            _LOG.error("stopping reason=%s", error)
        self._stop.set()

    async def run(self) -> None:
        """The whole life of the node."""
        self._clean_folder()
        identity = load_or_create_identity(self.state)
        known = contacts_of(RecordFile(self.state.peers).load())
        transport = self.parts.transport or make_transport(self.options, self.state, self._swarm_unix_s)
        leave = asyncio.create_task(self._repeat("leave", self._look_for_leave_request))
        try:
            await self._live(identity, transport, known)
        finally:
            leave.cancel()
            await asyncio.gather(leave, return_exceptions=True)
            await self._close(transport)
        if self._fatal is not None:
            raise self._fatal

    async def _live(self, identity: Identity, transport: Transport, known: tuple[Contact, ...]) -> None:
        """From joining the network to the last goodbye."""
        spec = await self._unless_stopped(self._join(transport, known))
        if spec is not None:
            await self._serve(identity, transport, spec, known)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run `work`; None when the node is to stop before it is done."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        return None if task.cancelled() else task.result()

    async def _join(self, transport: Transport, known: tuple[Contact, ...]) -> SwarmSpec:
        """Start the network and have the swarm's spec, fetched if need be."""
        await transport.start()
        for public, addrs in known:
            transport.learn_addrs(public, addrs)
        options, spec = self.options, self.options.spec
        if spec is None:
            spec = await fetch_spec(transport, options.swarm_id, options.seeds, self.events.on_notice)
        if spec.swarm_id != options.swarm_id:
            raise BadInput(f"the spec is {spec.swarm_id}'s, not {options.swarm_id}'s: check the link or the file")
        atomic_write(self.state.spec, spec.to_bytes())
        return spec

    async def _close(self, transport: Transport) -> None:
        # a second Ctrl-C does not wait: p2pd ends with this process anyway
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self._signals < 2 else GOODBYE_S):
                await transport.close()

    def _swarm_unix_s(self) -> float:
        now = self.parts.now_unix_s()
        return self.driver.machine.view.clock.swarm_unix_s(now) if self.driver is not None else now

    def _clean_folder(self) -> None:
        """Remove what an earlier run left half done."""
        scratch = scratch_dir(self.state)
        try:
            scratch.mkdir(mode=0o700, exist_ok=True)
            for path in scratch.iterdir():
                path.unlink(missing_ok=True)
            self._leave_request.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(scratch, error) from error

    @property
    def _leave_request(self) -> Path:
        return self.state.path / "leave.request"

    # -- running ------------------------------------------------------------------------------------------------

    async def _serve(
        self, identity: Identity, transport: Transport, spec: SwarmSpec, known: tuple[Contact, ...]
    ) -> None:
        options, parameters = self.options, count_parameters(spec)
        store = open_store(options, self.state, spec, parameters)
        machine = make_machine(options, identity, spec, parameters)
        bad = restore(machine, store, self._records)
        if bad:
            self.events.on_notice(f"{bad} damaged records in {self.state.chain} were left out")
        hooks = (self.fail, self.events.on_notice, self.parts.now_unix_s)
        parts = DriverParts(machine, transport, store, self._records, self.state.rounds, *hooks)
        driver = self.driver = Driver(parts)
        board_config = BoardConfig(options.role, options.name, str(self.state.path), parameters, spec.model.kind)
        board = self.board = Board(board_config, machine, transport, driver.screening)
        driver.on_dataset = lambda: self._start_worker(identity, store, driver, board)
        transport.set_handler(driver.answer)
        driver.feed(ev.Contacts((*known, *contacts_of_links(options.seeds))))
        driver.feed(ev.AddrsChanged(tuple(transport.own_addrs())))
        link = format_link(SwarmLink(spec.swarm_id, tuple(transport.own_addrs())))
        keep_port(self.state, transport.own_addrs())
        self.events.on_ready(link, transport.own_addrs())
        try:
            await self._until_stopped(transport, driver, board)
        finally:
            await self._say_goodbye(transport, driver, board)

    def _start_worker(self, identity: Identity, store: BlobStore, driver: Driver, board: Board) -> None:
        """The dataset is whole: a trainer gets its worker."""
        if self.options.role != "trainer" or self.trainer is not None:
            return
        hooks = TrainerHooks(
            feed=driver.feed,
            on_ready=board.on_ready,
            on_progress=board.on_progress,
            on_evaluated=board.on_evaluated,
            on_trouble=board.on_trouble,
            on_notice=self.events.on_notice,
            on_fatal=self.fail,
        )
        config = make_worker_config(self.options, self.state, identity, driver.machine.view.spec, store)
        self.state.log.mkdir(mode=0o700, parents=True, exist_ok=True)
        trainer = self.parts.make_trainer(config, store, hooks, self.state.log / "worker.log")
        self.trainer = driver.trainer = trainer
        trainer.start()

    async def _until_stopped(self, transport: Transport, driver: Driver, board: Board) -> None:
        seen: set[str] = set()
        loops: dict[str, Callable[[], Awaitable[float]]] = {
            "tick": lambda: self._tick(driver),
            "discover": lambda: self._look_for_peers(transport, driver),
            "nearby": lambda: self._look_nearby(transport, driver, seen),
            "status": lambda: self._show_status(board),
            "keep": lambda: self._keep_records(driver),
            "store": driver.check_store,
        }
        tasks = [asyncio.create_task(self._repeat(name, once)) for name, once in loops.items()]
        try:
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, name: str, once: Callable[[], Awaitable[float]]) -> None:
        """Do `once`, wait the seconds it returns, and again. The boundary of the node's loops: an error in one turn is
        logged and the loop goes on; an error turn after turn stops the node with a reason."""
        failures = 0
        while True:
            try:
                wait_s = await once()
                failures = 0
            except StopNode as error:
                self.fail(error)
                return
            except Exception as error:  # noqa: BLE001 - see above
                failures, wait_s = failures + 1, STATUS_EVERY_S
                _LOG.exception("loop_failed loop=%s failures=%d", name, failures)
                if failures >= LOOP_FAILURES:
                    reason = f"an unexpected error stopped the node ({type(error).__name__}): see {self.state.log}"
                    self.fail(StopNode(reason))
                    return
            await asyncio.sleep(wait_s)

    async def _say_goodbye(self, transport: Transport, driver: Driver, board: Board) -> None:
        """Tell the others, save, end the worker and the network. Saving and the network's end go side by side."""
        if self._signals >= 2:
            await self._end_at_once(driver)
            return
        saving = asyncio.create_task(self.trainer.stop(SAVE_S)) if self.trainer is not None else None
        try:
            board.phase = "stopping"
            self._try("last_status", lambda: self._write_status(board))
            self._try("goodbye", lambda: driver.feed(ev.Leaving()))
            await driver.settle(GOODBYE_S)
            self._try("peers_kept", lambda: self._keep_good_peers(driver))
            self._try("chain_kept", lambda: self._keep_chain(driver))
            await transport.close()
            note = await saving if saving is not None else ""
            if note and not isinstance(self._fatal, DiskFull):  # which says it already
                self.events.on_notice(note)
            board.phase = "stopped"
            self._try("last_status", lambda: self._write_status(board))
        finally:
            if saving is not None and not saving.done():
                saving.cancel()
                await asyncio.gather(saving, return_exceptions=True)
            await self._end_at_once(driver)

    async def _end_at_once(self, driver: Driver) -> None:
        if self.trainer is not None:
            await self.trainer.stop(0.0)
        await driver.close()

    def _try(self, what: str, step: Callable[[], None]) -> None:
        """A step of the goodbye whose failure must not cost the others: the terminal or the disk may be gone."""
        try:
            step()
        except (StopNode, OSError) as error:
            _LOG.warning("%s_failed reason=%s", what, error)
        except Exception:  # noqa: BLE001 - logged; the checkpoint is what matters now
            _LOG.exception("%s_failed", what)

    # -- the loops ----------------------------------------------------------------------------------------------

    async def _tick(self, driver: Driver) -> float:
        driver.feed(ev.Tick())
        return max(0.02, min(0.25, driver.machine.view.pace.flush_s))

    async def _look_for_peers(self, transport: Transport, driver: Driver) -> float:
        with contextlib.suppress(TransportError):
            driver.feed(ev.Discovered(tuple(await transport.discover())))
        driver.feed(ev.AddrsChanged(tuple(transport.own_addrs())))
        return DISCOVER_EVERY_S[0] if not driver.machine.rounds.others() else DISCOVER_EVERY_S[1]

    async def _look_nearby(self, transport: Transport, driver: Driver, seen: set[str]) -> float:
        """Other nodes of this user on this machine."""
        new = tuple(addr for addr in find_local(self.options.swarm_id) if addr not in seen)
        seen.update(new)
        for public, addrs in contacts_of_links(new):
            if public != driver.machine.view.own:
                transport.learn_addrs(public, addrs)
                driver.feed(ev.Contacts(((public, addrs),)))
        return LOCAL_EVERY_S

    async def _look_for_leave_request(self) -> float:
        if self._leave_request.exists() and not self._stop.is_set():
            self.events.on_notice("leaving the swarm: another command asked for it")
            self._stop.set()
        return STATUS_EVERY_S

    async def _show_status(self, board: Board) -> float:
        self._write_status(board)
        return STATUS_EVERY_S

    def _write_status(self, board: Board) -> None:
        snapshot = board.snapshot(self.parts.now_unix_s())
        atomic_write(self.state.status, snapshot.to_json().encode(), durable=False)
        try:
            self.events.on_status(snapshot)
        except OSError as error:
            raise StopNode(f"the output can't be written any more ({error.strerror}): the node stops") from error

    async def _keep_records(self, driver: Driver) -> float:
        """Remember the last good peers, so that a restart needs no seed, and keep the record file short."""
        self._keep_good_peers(driver)
        if self._records.has_grown:
            self._keep_chain(driver)
        return KEEP_PEERS_EVERY_S[0] if not driver.machine.rounds.others() else KEEP_PEERS_EVERY_S[1]

    def _keep_good_peers(self, driver: Driver) -> None:
        view = driver.machine.view
        good = [c.signed.bytes for c in view.members.alive(view.swarm_now) if c.signed is not None and c.addrs]
        if good:
            RecordFile(self.state.peers).rewrite(good[:256])

    def _keep_chain(self, driver: Driver) -> None:
        """Rewrite the record file without what was pruned."""
        chain = driver.machine.view.chain
        links = sorted((link for link in chain.links.values() if link.signed), key=lambda link: link.depth)
        own = [s.bytes for s in driver.machine.sync.offers.values() if s.public == driver.machine.view.own]
        self._records.rewrite([*(link.signed.bytes for link in links if link.signed), *own])
