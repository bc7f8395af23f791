"""A whole swarm in one process on a virtual clock: real state machines, real codec and fold, seeded faults.

`World` owns the event heap, the network with its faults, the DHT's stand-in and the peers. Everything that is random
comes from its seed, so a run is repeated exactly by its seed alone.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.sim.simpeer import DATASET, Disk, PeerKnobs, SimPeer, peer_config
from tests.sim.simworker import Kernels
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.hashing import BlobRef, blob_root, chunk_hashes
from tscale.protocol.identity import Identity
from tscale.protocol.presets import preset
from tscale.protocol.records import SignedRecord, open_record
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.view import PeerConfig

T0 = 1_000_000.0
LINK_LASTS_S = 60.0  # how long a connection that a peer without a reachable port has dialled stays open
DISCOVER_MAX = 16
SMALL_BYTES, SMALL_S = 16 * 1024, 2.0  # frames up to this size pass ahead of longer ones, as on the node's transport


GAINS = {"1/64": 3.0, "1/32": 2.0, "1/16": 2.0}


def sim_spec(**changes: Any) -> SwarmSpec:
    """The spec of simulated swarms: 12 s rounds, the demo's ladder, gains of its own. `changes` replace round fields.

    Identities and draws come from the spec's digest: other gains in the presets must not be other swarms here.
    """
    ref = BlobRef(blob_root(len(DATASET), chunk_hashes(DATASET)), len(DATASET))
    spec = preset("nano", data=(ref,), owner=bytes(32), t0_unix_s=T0)
    rounds = replace(
        spec.rounds,
        length_s=12.0,
        grace_min_s=0.5,
        grace_max_s=2.5,
        step_min_s=0.5,
        step_max_s=1.0,
        snapshot_every=4,
    )
    rungs = tuple(replace(rung, gain=GAINS.get(rung.name, rung.gain)) for rung in spec.codec.rungs)
    return replace(spec, codec=replace(spec.codec, rungs=rungs), rounds=replace(rounds, **changes))


@dataclass(frozen=True)
class Faults:
    """Seeded faults of the network and of clocks. `loss` counts once for a request and once for its answer."""

    loss: float = 0.0
    latency_s: tuple[float, float] = (0.01, 0.08)
    clock_skew_s: float = 0.0
    dead_host_hangs: float = 0.5  # share of requests to a dead peer that time out instead of being refused


class World:
    """The virtual clock, the network, and who is on it."""

    def __init__(self, spec: SwarmSpec, seed: int, faults: Faults | None = None) -> None:
        self.spec = spec
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = faults or Faults()
        self.now = T0 - 5.0
        self.kernels = Kernels()
        self.peers: dict[bytes, SimPeer] = {}
        self.everyone: list[SimPeer] = []
        self.sides: dict[bytes, int] = {}
        self.cut: set[frozenset[bytes]] = set()
        self.messages = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._opened: dict[bytes, SignedRecord[Any]] = {}
        self._directory: dict[bytes, tuple[bytes, float]] = {}
        self._dialled: dict[tuple[bytes, bytes], float] = {}
        self._uplinks: dict[bytes, tuple[float, float]] = {}  # when small frames, and long ones, are all out

    # -- time ---------------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at virtual time `when`."""
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action))

    def run_until(self, when: float) -> None:
        """Let virtual time pass."""
        heap = self._heap
        while heap and heap[0][0] <= when:
            self.now, _, action = heapq.heappop(heap)
            action()
        self.now = when

    def run_rounds(self, count: float) -> None:
        """Let `count` rounds of virtual time pass."""
        self.run_until(self.now + count * self.spec.rounds.length_s)

    def close_of(self, round_: int) -> float:
        """When a round's box ends."""
        return T0 + (round_ + 1) * self.spec.rounds.length_s

    # -- peers --------------------------------------------------------------------------------------------------

    def add(
        self, knobs: PeerKnobs | None = None, *, knows: int = 2, disk: Disk | None = None, side: int = 0
    ) -> SimPeer:
        """Start a peer that knows `knows` of the present ones of its side."""
        disk = disk or Disk(self.rng.randbytes(32))
        knobs = replace(knobs or PeerKnobs(), seed=self.rng.getrandbits(62), tick_phase=self.rng.random())
        if not knobs.skew_s:
            knobs = replace(knobs, skew_s=self.rng.uniform(-1.0, 1.0) * self.faults.clock_skew_s)
        base = PeerConfig(self.spec, Identity.from_secret(disk.secret), "trainer", 0, open_record=self.open_record)
        config = peer_config(base, knobs, disk.secret)
        peer = SimPeer(self, disk, config, knobs)
        near = [p for p in sorted(self.peers) if self.sides.get(p, 0) == side and self.peers[p].knobs.dialable]
        contacts = self.rng.sample(near, min(knows, len(near)))
        if side or self.sides:
            self.sides[peer.public] = side
        self.peers[peer.public] = peer
        self.everyone.append(peer)
        number = len(self.everyone) % 50_000
        addrs = (f"/ip4/127.0.0.1/tcp/{5000 + number}",) if knobs.dialable else ()
        peer.start(tuple((p, (f"/ip4/127.0.0.1/tcp/{4000 + i}",)) for i, p in enumerate(contacts)), addrs)
        return peer

    def crash(self, peer: SimPeer) -> None:
        """kill -9."""
        peer.alive = False
        if self.peers.get(peer.public) is peer:
            del self.peers[peer.public]

    def trainers(self) -> list[SimPeer]:
        """The living peers that have a worker."""
        return [p for p in self.peers.values() if p.worker is not None]

    # -- what the machines are given ------------------------------------------------------------------------------

    def open_record(self, data: bytes, kinds: tuple[type[Any], ...], **_: Any) -> SignedRecord[Any]:
        """The real parser and signature check; opening is a function of the bytes, so the swarm does it once."""
        found = self._opened.get(data)
        if found is None or not isinstance(found.record, kinds):
            found = self._opened[data] = open_record(data, kinds, known=self._opened.get)
            if len(self._opened) > 20_000:
                del self._opened[next(iter(self._opened))]
        return found

    def publish(self, source: SimPeer, record: bytes, expires_unix_s: float) -> None:
        """Put a peer record into the directory."""
        self._directory[source.public] = (record, expires_unix_s)

    def discover(self, source: SimPeer) -> tuple[bytes, ...]:
        """Unexpired records of the asker's side, dead peers' included; at most DISCOVER_MAX of them."""
        self._directory = {p: item for p, item in self._directory.items() if item[1] > self.now}
        seen = [p for p in sorted(self._directory) if p != source.public and self.linked(p, source.public)]
        picked = self.rng.sample(seen, min(DISCOVER_MAX, len(seen)))
        return tuple(self._directory[p][0] for p in picked)

    # -- network ------------------------------------------------------------------------------------------------

    def linked(self, a: bytes, b: bytes) -> bool:
        """Whether frames can pass between two peers."""
        return self.sides.get(a, 0) == self.sides.get(b, 0) and frozenset((a, b)) not in self.cut

    def _reachable(self, source: SimPeer, target: SimPeer) -> bool:
        """A peer that can't be dialled is reached over a connection that it has dialled itself."""
        if target.knobs.dialable or self._dialled.get((target.public, source.public), 0.0) > self.now:
            if not source.knobs.dialable:
                self._dialled[(source.public, target.public)] = self.now + LINK_LASTS_S
            return True
        return False

    def _delay(self, one: SimPeer, other: SimPeer) -> float:
        return self.rng.uniform(*self.faults.latency_s) + one.knobs.slow_s + other.knobs.slow_s

    def send(self, source: SimPeer, request: fx.Request) -> None:
        """Carry a request and its answer, with the faults. A lost one is reported when its timeout has passed."""
        self.messages += 1
        if self.rng.random() < self.faults.loss:
            self._lose(source, request, self.now)
            return
        sent, payload = self.now, source.payload(request)
        target = self.peers.get(request.peer, source)
        out = sent + self._upload_s(source, len(payload), request.timeout_s)
        self.at(out + self._delay(source, target), lambda: self._arrive(source, request, payload, sent))

    def _upload_s(self, peer: SimPeer, size_bytes: int, timeout_s: float) -> float:
        """How long a frame waits for a limited uplink and is on it. One that nobody waits for any more is cut off."""
        if not peer.knobs.uplink:
            return 0.0
        rate = peer.knobs.upload_bps / 8.0
        is_long = size_bytes > min(SMALL_BYTES, SMALL_S * rate)
        small, long = (max(self.now, free) for free in self._uplinks.get(peer.public, (0.0, 0.0)))
        end = (max(small, long) if is_long else small) + size_bytes / rate
        kept = max(small, min(end, self.now + timeout_s))
        self._uplinks[peer.public] = (small, kept) if is_long else (kept, long + size_bytes / rate)
        return end - self.now

    def _lose(self, source: SimPeer, request: fx.Request, sent: float) -> None:
        failed = ev.RequestFailed(request.token, "timed out")
        self.at(max(self.now, sent + request.timeout_s), lambda: source.feed(failed))

    def _arrive(self, source: SimPeer, request: fx.Request, payload: bytes, sent: float) -> None:
        target, rng = self.peers.get(request.peer), self.rng
        if target is None or not self.linked(source.public, request.peer):
            if target is None and rng.random() >= self.faults.dead_host_hangs:
                self._refuse(source, request, "connection refused")
            else:
                self._lose(source, request, sent)
            return
        if not self._reachable(source, target):
            self._refuse(source, request, "no address of it is known")
            return
        answer = target.answer(source.public, payload)
        back = (
            self.now
            + self._upload_s(target, len(answer), sent + request.timeout_s - self.now)
            + self._delay(source, target)
        )
        if rng.random() < self.faults.loss or back > sent + request.timeout_s:
            self._lose(source, request, sent)
        else:
            self.at(back, lambda: source.feed(ev.Replied(request.token, answer)))

    def _refuse(self, source: SimPeer, request: fx.Request, reason: str) -> None:
        failed = ev.RequestFailed(request.token, reason)
        self.at(self.now + 0.05, lambda: source.feed(failed))
