"""Whole daemons in one process: the network in memory, the clock virtual, the worker's session called directly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tscale.node.assembly import NodeOptions
from tscale.node.config import NodeConfig
from tscale.node.daemon import Node, NodeParts
from tscale.node.specs import shipped_book_path
from tscale.node.statedir import StateDir, load_or_create_identity, open_state_dir
from tscale.node.trainer import Trainer
from tscale.node.transport.memory import MemoryNetwork
from tscale.node.worker import messages as m
from tscale.node.worker.resume import open_session
from tscale.node.worker.session import Session
from tscale.node.worker.supervisor import WorkerDied
from tscale.protocol.hashing import blob_ref
from tscale.protocol.identity import Identity
from tscale.protocol.presets import preset
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.status import StatusSnapshot

T0 = 1_800_000_000.0
STEPS = 2
BOOK = shipped_book_path().read_bytes()[:40_000]


def nano_spec(**changes: Any) -> SwarmSpec:
    """Rounds of 2 s over a short text."""
    return replace(preset("nano", data=(blob_ref(BOOK),), owner=bytes(32), t0_unix_s=T0), **changes)


class InlineHandle:
    """What a WorkerHandle does, without a process. A close does STEPS steps first."""

    def __init__(self, on_event: Callable[[m.Event], None], faults: list[Exception]) -> None:
        self._on_event = on_event
        self._faults = faults
        self._session: Session | None = None
        self._dead = asyncio.Event()
        self._reason = "the worker was not started"
        self.saves = 0
        self.hangs = False
        self.after: Callable[[Any], None] = lambda command: None

    @property
    def pid(self) -> int | None:
        return None if self._session is None else 1

    @property
    def alive(self) -> bool:
        return self._session is not None and not self._dead.is_set()

    async def start(self, config: m.WorkerConfig) -> m.Ready:
        if self._faults:
            raise self._faults.pop(0)
        self._session, ready = open_session(config, lambda work: work(), self._on_event)
        return ready

    async def call(self, command: Any, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        if self._session is None or not self.alive:
            raise WorkerDied(self._reason)
        if isinstance(command, m.Close):
            for _ in range(STEPS if self._session.may_step() else 0):
                self._session.step()
        answer = self._session.handle(command)
        self._session.after_command()
        self.after(command)
        return answer

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return self._reason

    async def stop(self, timeout_s: float, *, save: bool = True) -> str:
        if self.alive and save and timeout_s > 0 and self._session is not None:
            if self.hangs:
                await asyncio.sleep(timeout_s)
                self.die("stopped")
                return f"the worker did not answer Stop within {timeout_s:g} s"
            self._session.save()
            self.saves += 1
        self.die("stopped")
        return ""

    def kill(self) -> None:
        self.die("signal 9 ended the worker")

    def die(self, reason: str) -> None:
        if not self._dead.is_set():
            self._reason = reason
            self._dead.set()


class InlineTrainer(Trainer):
    """The real trainer over inline workers. `faults` are raised by the next starts, one each."""

    faults: list[Exception]

    def _make_handle(self) -> Any:
        self.handle = InlineHandle(self._on_event, self.faults)
        return self.handle


@dataclass
class Running:
    """One daemon: what it said, and what it runs on."""

    node: Node
    task: asyncio.Task[None]
    identity: Identity
    state: StateDir
    ready: list[str] = field(default_factory=list)
    notices: list[tuple[float, str]] = field(default_factory=list)
    shown: list[StatusSnapshot] = field(default_factory=list)

    def on_ready(self, link: str, addrs: list[str]) -> None:
        self.ready.append(link)

    def on_status(self, snapshot: StatusSnapshot) -> None:
        self.shown.append(snapshot)

    def on_notice(self, line: str) -> None:
        self.notices.append((round(asyncio.get_running_loop().time(), 1), line))

    @property
    def rounds(self) -> dict[int, dict[str, Any]]:
        if not self.state.rounds.exists():
            return {}
        lines = [json.loads(line) for line in self.state.rounds.read_text().splitlines()]
        return {line["round"]: line for line in lines}

    @property
    def last_round(self) -> int:
        return max(self.rounds, default=-1)

    @property
    def handle(self) -> InlineHandle:
        assert isinstance(self.node.trainer, InlineTrainer)
        return self.node.trainer.handle

    @property
    def status(self) -> StatusSnapshot:
        return StatusSnapshot.from_json(self.state.status.read_bytes())

    def sees(self, other: Running) -> bool:
        return any(peer.alive and peer.peer_id == other.identity.peer_id for peer in self.shown[-1].peers)

    async def end(self) -> None:
        """The first Ctrl-C, and wait."""
        self.node.on_signal(self.task)
        await self.task


class InlineSwarm:
    """Makes daemons below a folder, on one network in memory."""

    def __init__(self, folder: Path, spec: SwarmSpec | None = None) -> None:
        self.folder = folder
        self.spec = spec or nano_spec()
        self.book = folder / "book.txt"
        self.book.write_bytes(BOOK)
        self.loop = asyncio.get_running_loop()
        self.network = MemoryNetwork(1, self.now_unix_s)
        self.faults: list[Exception] = []

    def now_unix_s(self) -> float:
        return T0 + self.loop.time()

    def start(self, name: str, *seeds: Running, knows: bool = False, **options: Any) -> Running:
        """A daemon in the folder `name`. `knows`: it has the spec and the book; else it fetches both."""
        state = open_state_dir(self.folder / name, self.spec.swarm_id)
        identity = load_or_create_identity(state)
        transport = self.network.transport(identity.public)
        chosen = {
            "swarm_id": self.spec.swarm_id,
            "spec": self.spec if knows else None,
            "swarm_dir": state.path,
            "role": "trainer",
            "seeds": tuple(self.addr(seed.identity) for seed in seeds),
            "host": "127.0.0.1",
            "port": 0,
            "name": name,
            "config": NodeConfig(),
            "dataset_files": (self.book,) if knows else (),
        }
        run = Running(None, None, identity, state)  # type: ignore[arg-type]

        def make_trainer(*args: Any) -> Trainer:
            trainer = InlineTrainer(*args)
            trainer.faults = self.faults
            return trainer

        parts = NodeParts(transport, make_trainer, self.now_unix_s)
        run.node = Node(NodeOptions(**{**chosen, **options}), run, parts)
        run.task = asyncio.create_task(run.node.run(), name=name)
        return run

    def addr(self, identity: Identity) -> str:
        """Where the network in memory says that this peer is."""
        return self.network.transport(identity.public).own_addrs()[0]

    async def until(self, what: Callable[[], object], said: str, *needed: Running, limit_s: float = 120.0) -> None:
        """Let virtual time pass until `what` holds."""
        deadline = self.loop.time() + limit_s
        while not what():
            for run in needed:
                if run.task.done():
                    run.task.result()
                    raise AssertionError(f"{run.state.path} ended")
            assert self.loop.time() < deadline, f"{said} did not happen within {limit_s:g} virtual seconds"
            await asyncio.sleep(0.1)
