"""The driver of one simulated peer: executes the effects of its machine on an in-memory disk and a simulated worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tests.sim.simworker import BOOT_S, DURATIONS_S, LAYOUT, Checkpoint, Kernels, SimWorker
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.hashing import CHUNK_BYTES, BlobRef, blob_root, chunk_hashes
from tscale.protocol.identity import Identity
from tscale.protocol.peer import PeerMachine
from tscale.protocol.view import PeerConfig

DATASET = b"call me ishmael " * 8
DISCOVER_ALONE_S, DISCOVER_S = 2.0, 30.0  # as the node's daemon looks into the DHT


class Surroundings(Protocol):
    """What a peer needs of its world."""

    now: float
    kernels: Kernels

    def at(self, when: float, action: Callable[[], None]) -> None: ...

    def send(self, source: SimPeer, request: fx.Request) -> None: ...

    def publish(self, source: SimPeer, record: bytes, expires_unix_s: float) -> None: ...

    def discover(self, source: SimPeer) -> tuple[bytes, ...]: ...


@dataclass
class Disk:
    """What survives a crash of one peer."""

    secret: bytes
    records: dict[bytes, bytes] = field(default_factory=dict)
    chunks: dict[bytes, dict[int, bytes]] = field(default_factory=dict)
    refs: dict[bytes, BlobRef] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class PeerKnobs:
    """How one simulated machine differs from the next. `dialable` False: it can dial out only."""

    role: str = "trainer"
    seed: int = 0
    tick_phase: float = 0.5
    tick_s: float = 0.6
    skew_s: float = 0.0
    dialable: bool = True
    upload_bps: float = 20e6
    uplink: bool = False  # whether `upload_bps` limits what it sends, and is not only what it is told
    slow_s: float = 0.0  # more delay on every message from and to it


class SimPeer:
    """One life of a peer: from its start to its crash. `rounds` are what the tests look at."""

    def __init__(self, world: Surroundings, disk: Disk, config: PeerConfig, knobs: PeerKnobs) -> None:
        self.world = world
        self.disk = disk
        self.knobs = knobs
        self.alive = True
        self.identity = config.identity
        self.public = config.identity.public
        self.skew_s = knobs.skew_s
        self.started_s = world.now
        self.first_trained_s: float | None = None
        self.notices: list[fx.Notice] = []
        self.states: dict[bytes, bytes] = {}  # manifest -> state digest, of everything folded or loaded in this life
        self.loads: list[bytes] = []
        self.training = False
        self.training_reason = ""
        self.worker = SimWorker(config.spec, self, world.kernels, knobs.seed) if knobs.role == "trainer" else None
        self.free_at = 0.0
        self.machine = PeerMachine(config)

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, contacts: tuple[tuple[bytes, tuple[str, ...]], ...], addrs: tuple[str, ...]) -> None:
        """Restore what the disk holds and begin."""
        self.put_blob(DATASET)
        complete, partial = {}, {}
        for root, ref in self.disk.refs.items():
            parts = self.disk.chunks[root]
            if len(parts) == ref.chunks:
                complete[ref] = chunk_hashes(b"".join(parts[i] for i in range(ref.chunks)))
        self.machine.restore(list(self.disk.records.values()), complete, partial)
        self.feed(ev.Contacts(contacts))
        self.feed(ev.AddrsChanged(addrs))
        if self.worker is not None:
            self._later(BOOT_S, lambda: self._boot())
        self.world.at(self.world.now + self.knobs.tick_phase * self.knobs.tick_s, self._tick)
        self.world.at(self.world.now + 0.3, self._discover)

    def _boot(self) -> None:
        assert self.worker is not None
        ready = self.worker.boot(self.disk.checkpoint)
        self.states[ready.manifest] = ready.state
        self.feed(ready)

    def _tick(self) -> None:
        if self.alive:
            self.feed(ev.Tick())
            self.world.at(self.world.now + self.knobs.tick_s, self._tick)

    def _discover(self) -> None:
        if self.alive:
            self.feed(ev.Discovered(self.world.discover(self)))
            alone = not self.machine.rounds.others()
            self.world.at(self.world.now + (DISCOVER_ALONE_S if alone else DISCOVER_S), self._discover)

    @property
    def local_now(self) -> float:
        """This machine's clock."""
        return self.world.now + self.skew_s

    def feed(self, event: ev.Event) -> None:
        """Step the machine and execute what it asks for."""
        if self.alive:
            self.run(self.machine.step(event, self.local_now))

    def answer(self, peer: bytes, frame: bytes) -> bytes:
        """Answer a request."""
        reply, effects = self.machine.answer(peer, frame, self.local_now)
        payload = reply.payload
        for chunk in reply.chunks:
            payload += self.disk.chunks[chunk.root][chunk.index]
        self.run(effects)
        return payload

    def payload(self, request: fx.Request) -> bytes:
        """A request's bytes, with its chunk."""
        if request.chunk is None:
            return request.payload
        return request.payload + self.disk.chunks.get(request.chunk.root, {}).get(request.chunk.index, b"")

    # -- disk ---------------------------------------------------------------------------------------------------

    def put_blob(self, data: bytes) -> tuple[BlobRef, tuple[bytes, ...]]:
        """Keep a whole blob."""
        hashes = chunk_hashes(data)
        ref = BlobRef(blob_root(len(data), hashes), len(data))
        self.disk.refs[ref.root] = ref
        self.disk.chunks[ref.root] = {i: data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES] for i in range(ref.chunks)}
        return ref, hashes

    def read_blob(self, root: bytes) -> bytes | None:
        """A whole blob's bytes, or None."""
        ref, parts = self.disk.refs.get(root), self.disk.chunks.get(root, {})
        if ref is None or len(parts) < ref.chunks:
            return None
        return parts[0] if ref.chunks == 1 else b"".join(parts[i] for i in range(ref.chunks))

    # -- effects ------------------------------------------------------------------------------------------------

    def run(self, effects: list[fx.Effect]) -> None:
        """Execute effects in order."""
        for effect in effects:
            action = _ACTIONS.get(type(effect))
            if action is not None:
                action(self, effect)

    def _request(self, effect: fx.Request) -> None:
        self.world.send(self, effect)

    def _store_chunk(self, effect: fx.StoreChunk) -> None:
        self.disk.refs[effect.blob.root] = effect.blob
        self.disk.chunks.setdefault(effect.blob.root, {})[effect.index] = effect.data

    def _copy_chunk(self, effect: fx.CopyChunk) -> None:
        data = self.disk.chunks[effect.source.root][effect.source.index]
        self._store_chunk(fx.StoreChunk(effect.blob, effect.index, data))

    def _drop_blob(self, effect: fx.DropBlob) -> None:
        self.disk.refs.pop(effect.root, None)
        self.disk.chunks.pop(effect.root, None)

    def _keep_record(self, effect: fx.KeepRecord) -> None:
        self.disk.records[effect.digest] = effect.record

    def _notice(self, effect: fx.Notice) -> None:
        self.notices.append(effect)

    def _publish(self, effect: fx.Publish) -> None:
        self.world.publish(self, effect.record, effect.expires_unix_s)

    def _set_training(self, effect: fx.SetTraining) -> None:
        self.training, self.training_reason = effect.on, effect.reason
        if effect.on and self.first_trained_s is None:
            self.first_trained_s = self.world.now

    def _start_over(self, effect: fx.RestartFromGenesis) -> None:
        assert self.worker is not None
        self.disk.checkpoint = None
        spec = self.machine.view.spec
        self.worker = SimWorker(spec, self, self.world.kernels, self.knobs.seed + 1)
        self.machine.step(ev.WorkerDied(effect.reason), self.local_now)
        self._later(BOOT_S, self._boot)

    # -- worker -------------------------------------------------------------------------------------------------

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.free_at = max(self.free_at, self.world.now) + seconds
        self.world.at(self.free_at, lambda: action() if self.alive else None)

    def _work(self, effect: fx.Effect) -> None:
        """Queue a command; the worker does one at a time."""

        def done() -> None:
            worker = self.worker
            assert worker is not None
            event = worker.do(effect)
            if isinstance(event, (ev.Folded, ev.SnapshotLoaded)):
                self.states[event.manifest] = event.state
                self.disk.checkpoint = worker.checkpoint()
            if isinstance(event, ev.SnapshotLoaded):
                self.loads.append(event.manifest)
            self.feed(event)

        if self.worker is not None:
            self._later(DURATIONS_S[type(effect)], done)


_ACTIONS: dict[type[Any], Callable[[SimPeer, Any], None]] = {
    fx.Request: SimPeer._request,
    fx.StoreChunk: SimPeer._store_chunk,
    fx.CopyChunk: SimPeer._copy_chunk,
    fx.DropBlob: SimPeer._drop_blob,
    fx.KeepRecord: SimPeer._keep_record,
    fx.Notice: SimPeer._notice,
    fx.Publish: SimPeer._publish,
    fx.SetTraining: SimPeer._set_training,
    fx.RestartFromGenesis: SimPeer._start_over,
    fx.MakeContribution: SimPeer._work,
    fx.VerifyBlob: SimPeer._work,
    fx.Fold: SimPeer._work,
    fx.WriteSnapshot: SimPeer._work,
    fx.LoadSnapshot: SimPeer._work,
}


def peer_config(base: PeerConfig, knobs: PeerKnobs, secret: bytes) -> PeerConfig:
    """The machine's configuration of one peer."""
    return replace(
        base,
        identity=Identity.from_secret(secret),
        role=knobs.role,
        seed=knobs.seed,
        parameters=LAYOUT.numel,
        upload_bps=knobs.upload_bps,
    )
