"""A whole swarm in one process on a virtual clock: real state machines, real codec and fold, seeded faults.

`World` owns the event heap, the network and the peers; `SimPeer` is the driver of one `PeerMachine`: it executes
effects against an in-memory blob store and a worker that runs the production `Replica` on a tiny parameter vector.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tscale.kernels.codec import CodecError, Rung, decode
from tscale.kernels.digest import state_digest
from tscale.kernels.fold import FoldPart, OuterRule
from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.replica import OuterState, Replica
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.hashing import CHUNK_BYTES, BlobRef, blob_root, chunk_hashes
from tscale.protocol.identity import Identity
from tscale.protocol.peer import PeerMachine
from tscale.protocol.presets import preset
from tscale.protocol.records import SignedRecord, open_record
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.view import PeerConfig

LAYOUT = Layout((TensorSpec("a", (64, 64), "matrix"), TensorSpec("b", (30, 40), "matrix"), TensorSpec("n", (16,), "small")))
T0 = 1_000_000.0


def sim_spec(**changes: object) -> SwarmSpec:
    """The spec of simulated swarms: 12 s rounds, the demo's codec and outer step."""
    data = b"call me ishmael " * 8
    ref = BlobRef(blob_root(len(data), chunk_hashes(data)), len(data))
    spec = preset("tiny", data=(ref,), owner=bytes(32), t0_unix_s=T0)
    rounds = replace(
        spec.rounds,
        length_s=12.0,
        grace_min_s=0.5,
        grace_max_s=2.5,
        step_min_s=0.5,
        step_max_s=1.0,
        snapshot_every=4,
    )
    return replace(spec, rounds=replace(rounds, **changes))


@dataclass(frozen=True)
class Faults:
    """Seeded faults of the network and of clocks."""

    loss: float = 0.0
    latency_s: tuple[float, float] = (0.01, 0.08)
    clock_skew_s: float = 0.0
    dead_host_hangs: float = 0.5  # share of requests to a dead peer that time out instead of being refused


@dataclass
class Disk:
    """What survives a crash of one peer."""

    secret: bytes
    records: dict[bytes, bytes] = field(default_factory=dict)
    chunks: dict[bytes, dict[int, bytes]] = field(default_factory=dict)
    refs: dict[bytes, BlobRef] = field(default_factory=dict)
    checkpoint: tuple[bytes, bytes | None, OuterState, OuterState | None] | None = None


class World:
    """The virtual clock, the network, and who is on it."""

    def __init__(self, spec: SwarmSpec, seed: int, faults: Faults = Faults()) -> None:  # noqa: B008
        self.spec = spec
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = faults
        self.now = T0 - 5.0
        self.peers: dict[bytes, SimPeer] = {}
        self.everyone: list[SimPeer] = []
        self.sides: dict[bytes, int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._opened: dict[bytes, SignedRecord] = {}
        self._decoded: dict[bytes, object] = {}
        self.messages = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at virtual time `when`."""
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action))

    def run_until(self, when: float) -> None:
        """Let virtual time pass."""
        while self._heap and self._heap[0][0] <= when:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = when

    def run_rounds(self, count: float) -> None:
        """Let `count` rounds of virtual time pass."""
        self.run_until(self.now + count * self.spec.rounds.length_s)

    def open_record(self, data: bytes, kinds: tuple[type, ...], **options: object) -> SignedRecord:
        """The real parser and signature check; opening is a function of the bytes, so the swarm does it once."""
        found = self._opened.get(data)
        if found is None or not isinstance(found.record, kinds):
            found = self._opened[data] = open_record(data, kinds)
            if len(self._opened) > 20_000:
                del self._opened[next(iter(self._opened))]
        return found

    def decoded(self, root: bytes, blob: bytes) -> object:
        """Decoding is a function of the blob, so the swarm does it once."""
        if root not in self._decoded:
            self._decoded[root] = decode(blob, LAYOUT)
            if len(self._decoded) > 400:
                del self._decoded[next(iter(self._decoded))]
        return self._decoded[root]

    def add(self, *, role: str = "trainer", knows: int = 2, disk: Disk | None = None) -> SimPeer:
        """Start a peer that knows `knows` of the present ones."""
        disk = disk or Disk(self.rng.randbytes(32))
        peer = SimPeer(self, disk, role)
        others = self.rng.sample(sorted(self.peers), min(knows, len(self.peers)))
        self.peers[peer.public] = peer
        self.everyone.append(peer)
        peer.start(tuple((p, (f"/ip4/127.0.0.1/tcp/{4000 + i}",)) for i, p in enumerate(others)))
        return peer

    def crash(self, peer: SimPeer) -> None:
        """kill -9."""
        peer.alive = False
        self.peers.pop(peer.public, None)

    def linked(self, a: bytes, b: bytes) -> bool:
        """Whether frames pass between two peers."""
        return self.sides.get(a, 0) == self.sides.get(b, 0)

    def send(self, source: SimPeer, request: fx.Request) -> None:
        """Carry a request and its answer, with the faults."""
        self.messages += 1
        faults, rng = self.faults, self.rng
        give_up = self.now + request.timeout_s
        state = {"open": True}

        def finish(event: ev.Event) -> None:
            if state["open"] and source.alive:
                state["open"] = False
                source.feed(event)

        def arrive() -> None:
            target = self.peers.get(request.peer)
            if target is None:
                if rng.random() >= faults.dead_host_hangs:
                    self.at(self.now + 0.05, lambda: finish(ev.RequestFailed(request.token, "connection refused")))
                return
            if not self.linked(source.public, request.peer):
                return
            payload = target.answer(source.public, source.payload(request))
            if rng.random() >= faults.loss:
                self.at(self.now + rng.uniform(*faults.latency_s), lambda: finish(ev.Replied(request.token, payload)))

        self.at(give_up, lambda: finish(ev.RequestFailed(request.token, "timed out")))
        if rng.random() >= faults.loss:
            self.at(self.now + rng.uniform(*faults.latency_s), arrive)


class SimPeer:
    """The driver of one peer: executes effects, owns the store and the worker."""

    def __init__(self, world: World, disk: Disk, role: str) -> None:
        self.world = world
        self.disk = disk
        self.role = role
        self.alive = True
        self.identity = Identity.from_secret(disk.secret)
        self.public = self.identity.public
        self.skew_s = world.rng.uniform(-1.0, 1.0) * world.faults.clock_skew_s
        self.notices: list[fx.Notice] = []
        self.folds: dict[int, list[tuple[float, bytes, bytes]]] = {}  # round -> (when, manifest, state)
        self.training = False
        self.tick_s = 0.4
        self.worker = SimWorker(self) if role == "trainer" else None
        config = PeerConfig(
            spec=world.spec,
            identity=self.identity,
            role=role,
            seed=world.rng.getrandbits(63),
            parameters=LAYOUT.numel,
            open_record=world.open_record,
            upload_bps=20e6,
        )
        self.machine = PeerMachine(config)

    @property
    def local_now(self) -> float:
        """This machine's clock."""
        return self.world.now + self.skew_s

    def start(self, contacts: tuple[tuple[bytes, tuple[str, ...]], ...]) -> None:
        """Restore what the disk holds and begin."""
        data = b"call me ishmael " * 8
        self.put_blob(data)
        complete, partial = {}, {}
        for root, ref in self.disk.refs.items():
            parts = self.disk.chunks[root]
            if len(parts) == ref.chunks:
                complete[ref] = chunk_hashes(b"".join(parts[i] for i in range(ref.chunks)))
        self.machine.restore(list(self.disk.records.values()), complete, partial)
        self.addrs = (f"/ip4/127.0.0.1/tcp/{5000 + len(self.world.everyone) % 50000}",)
        self.feed(ev.Contacts(contacts))
        self.feed(ev.AddrsChanged(self.addrs))
        if self.worker is not None:
            self.worker.boot()
        self.world.at(self.world.now + self.world.rng.random() * self.tick_s, self.tick)

    def tick(self) -> None:
        """Feed time."""
        if self.alive:
            self.feed(ev.Tick())
            self.world.at(self.world.now + self.tick_s, self.tick)

    def feed(self, event: ev.Event) -> None:
        """Step the machine and execute what it asks for."""
        if self.alive:
            self.run(self.machine.step(event, self.local_now))

    def answer(self, peer: bytes, frame: bytes) -> bytes:
        """Answer a request."""
        reply, effects = self.machine.answer(peer, frame, self.local_now)
        payload = reply.payload
        if reply.chunk is not None:
            payload += self.disk.chunks[reply.chunk.root][reply.chunk.index]
        self.run(effects)
        return payload

    def payload(self, request: fx.Request) -> bytes:
        """A request's bytes, with its chunk."""
        if request.chunk is None:
            return request.payload
        return request.payload + self.disk.chunks.get(request.chunk.root, {}).get(request.chunk.index, b"")

    def put_blob(self, data: bytes) -> tuple[BlobRef, tuple[bytes, ...]]:
        """Keep a whole blob."""
        hashes = chunk_hashes(data)
        ref = BlobRef(blob_root(len(data), hashes), len(data))
        self.disk.refs[ref.root] = ref
        self.disk.chunks[ref.root] = {i: data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES] for i in range(ref.chunks)}
        return ref, hashes

    def blob(self, root: bytes) -> bytes:
        """A whole blob's bytes."""
        parts = self.disk.chunks[root]
        return b"".join(parts[i] for i in range(len(parts)))

    def run(self, effects: list[fx.Effect]) -> None:
        """Execute effects in order."""
        for effect in effects:
            if isinstance(effect, fx.Request):
                self.world.send(self, effect)
            elif isinstance(effect, fx.StoreChunk):
                self.disk.refs[effect.blob.root] = effect.blob
                self.disk.chunks.setdefault(effect.blob.root, {})[effect.index] = effect.data
            elif isinstance(effect, fx.CopyChunk):
                data = self.disk.chunks[effect.source.root][effect.source.index]
                self.disk.refs[effect.blob.root] = effect.blob
                self.disk.chunks.setdefault(effect.blob.root, {})[effect.index] = data
            elif isinstance(effect, fx.DropBlob):
                self.disk.refs.pop(effect.root, None)
                self.disk.chunks.pop(effect.root, None)
            elif isinstance(effect, fx.KeepRecord):
                self.disk.records[effect.digest] = effect.record
            elif isinstance(effect, fx.Notice):
                self.notices.append(effect)
            elif isinstance(effect, fx.SetTraining):
                self.training = effect.on
            elif self.worker is not None:
                self.worker.take(effect)


class SimWorker:
    """Training is a noisy pull towards a target that all peers share; everything else is the production code."""

    DURATIONS = {fx.MakeContribution: 0.15, fx.VerifyBlob: 0.02, fx.Fold: 0.1, fx.WriteSnapshot: 0.1, fx.LoadSnapshot: 0.2}

    def __init__(self, peer: SimPeer) -> None:
        self.peer = peer
        self.world = peer.world
        outer = self.world.spec.outer
        self.rng = np.random.default_rng(self.world.rng.getrandbits(63))
        self.replica = Replica(LAYOUT, np.zeros(LAYOUT.numel, np.float32), outer.rho, outer.beta, OuterRule(outer.eta, outer.mu))
        self.target = np.linspace(-1.0, 1.0, LAYOUT.numel, dtype=np.float32)
        self.at: bytes = peer_genesis(self.world.spec)
        self.before: bytes | None = None
        self.free_at = 0.0
        self.speed = 1 + self.world.rng.randrange(4)
        self.flip = 0.0  # a fault: added to the state after the next fold

    def boot(self) -> None:
        """Start from the checkpoint, or from the initial model."""
        saved = self.peer.disk.checkpoint
        if saved is not None:
            self.at, self.before, state, parent = saved
            self.replica.load(state, parent)
            self.replica.go_to_start()
        self._later(1.0, lambda: self.peer.feed(ev.WorkerReady(self.at, self._digest(), self.before)))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.free_at = max(self.free_at, self.world.now) + seconds
        self.world.at(self.free_at, lambda: action() if self.peer.alive else None)

    def _digest(self) -> bytes:
        return state_digest(LAYOUT, self.replica.head.anchor, self.replica.head.momentum)

    def take(self, effect: fx.Effect) -> None:
        """Queue a command; the worker does one at a time."""
        seconds = self.DURATIONS.get(type(effect))
        if seconds is None:
            return
        done: dict[type, Callable[[fx.Effect], ev.Event]] = {
            fx.MakeContribution: self._contribute,
            fx.VerifyBlob: self._verify,
            fx.Fold: self._fold,
            fx.WriteSnapshot: self._snapshot,
            fx.LoadSnapshot: self._load,
        }
        self._later(seconds, lambda: self.peer.feed(done[type(effect)](effect)))

    def _contribute(self, effect: fx.MakeContribution) -> ev.Event:
        w = self.replica.local
        steps = self.speed
        for _ in range(steps):
            w += 0.05 * (self.target - w) + self.rng.normal(0, 0.01, w.size).astype(np.float32)
        rung = self.world.spec.codec.rungs[effect.rung]
        blob = self.replica.close(Rung(rung.kept_per_chunk, rung.bits))
        ref, hashes = self.peer.put_blob(blob)
        return ev.ContributionMade(effect.round, self.at, ref, hashes, 100 * steps, steps, 1.0, effect.rung)

    def _verify(self, effect: fx.VerifyBlob) -> ev.Event:
        if effect.root not in self.peer.disk.chunks:
            return ev.BlobMissing(effect.root)
        try:
            self.world.decoded(effect.root, self.peer.blob(effect.root))
        except CodecError as error:
            return ev.BlobVerified(effect.root, False, str(error))
        return ev.BlobVerified(effect.root, True, "")

    def _fold(self, effect: fx.Fold) -> ev.Event:
        onto_parent = effect.parent == self.before
        if effect.parent != self.at and not onto_parent:
            return ev.FoldFailed(effect.manifest, "no such state", False)
        try:
            parts = [FoldPart(self.world.decoded(r, self.peer.blob(r)), w) for r, w in effect.parts]
        except KeyError:
            return ev.FoldFailed(effect.manifest, "a blob is gone", False)
        self.replica.fold(parts, onto_parent=onto_parent)
        if self.flip:
            self.replica.head.anchor[3] += self.flip
            self.flip = 0.0
        self.replica.rebase()
        self.before, self.at = effect.parent, effect.manifest
        state = self._digest()
        self.peer.folds.setdefault(effect.round, []).append((self.world.now, effect.manifest, state))
        self.peer.disk.checkpoint = (self.at, self.before, self.replica.head, self.replica.parent)
        return ev.Folded(effect.manifest, state)

    def _snapshot(self, effect: fx.WriteSnapshot) -> ev.Event:
        if effect.manifest != self.at:
            return ev.Tick()
        ref, hashes = self.peer.put_blob(self.replica.head.anchor.tobytes())
        return ev.SnapshotReady(self.at, effect.round, self._digest(), ref, hashes)

    def _load(self, effect: fx.LoadSnapshot) -> ev.Event:
        data = self.peer.blob(effect.root)
        if len(data) != LAYOUT.numel * 4:
            return ev.SnapshotRefused(effect.manifest, effect.root, "wrong size")
        self.replica.load(OuterState(np.frombuffer(data, np.float32).copy(), None))
        self.replica.go_to_start()
        self.at, self.before = effect.manifest, None
        self.peer.disk.checkpoint = (self.at, None, self.replica.head, None)
        return ev.SnapshotLoaded(self.at, self._digest())


def peer_genesis(spec: SwarmSpec) -> bytes:
    """The digest of the state before the first manifest."""
    from tscale.protocol.chain import genesis_digest

    return genesis_digest(spec.swarm_id)
