"""One peer's state machine alone: events and frames go in, what it asks for is collected, nothing else happens.

`Others` are identities that sign whatever a test wants. States are made up: the state after a manifest is `state_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.chain import genesis_digest
from tscale.protocol.hashing import BlobRef, blob_ref, chunk_hashes, digest
from tscale.protocol.identity import Identity
from tscale.protocol.messages import Message, Push, PutChunk, decode, encode, with_bulk
from tscale.protocol.peer import PeerMachine
from tscale.protocol.pool import claim_of
from tscale.protocol.presets import preset
from tscale.protocol.records import (
    Announcement,
    Manifest,
    PeerRecord,
    SignedRecord,
    SnapshotRecord,
    open_record,
    seal_record,
)
from tscale.protocol.spec import RungSpec, SwarmSpec
from tscale.protocol.view import PeerConfig

T0 = 1_000_000.0
LENGTH_S = 12.0
E = TypeVar("E")


def solo_spec(**rounds: Any) -> SwarmSpec:
    """Rounds of 12 s from T0, a dataset of 128 bytes; grace 0.5 to 2.5 s, 0.5 to 1 s between candidates."""
    spec = preset("nano", data=(blob_ref(DATA),), owner=bytes(32), t0_unix_s=T0)
    times = {"length_s": LENGTH_S, "grace_min_s": 0.5, "grace_max_s": 2.5, "step_min_s": 0.5, "step_max_s": 1.0}
    box = replace(spec.rounds, **{**times, "snapshot_every": 4, **rounds})
    return replace(spec, codec=replace(spec.codec, rungs=RUNGS), rounds=box)


RUNGS = (
    RungSpec("1/64", kept_per_chunk=64, bits=2, gain=2.0, lone_only=False),
    RungSpec("1/32", kept_per_chunk=128, bits=2, gain=2.0, lone_only=False),
    RungSpec("1/16", kept_per_chunk=256, bits=2, gain=1.75, lone_only=False),
    RungSpec("dense32", kept_per_chunk=4096, bits=32, gain=1.0, lone_only=True),
)
DATA = b"call me ishmael " * 8
SPEC = solo_spec()
GENESIS = genesis_digest(SPEC.swarm_id)


def other(number: int) -> Identity:
    """Another peer's identity."""
    return Identity.from_secret(digest("test", b"other", number.to_bytes(4, "little")))


def state_of(manifest: bytes) -> bytes:
    """The made-up digest of the state after a manifest."""
    return digest("test", b"state", manifest)


def blob_of(identity: Identity, round_: int, size: int = 100) -> bytes:
    """The bytes of a made-up contribution."""
    return (digest("test", identity.public, round_.to_bytes(4, "little")) * (size // 32 + 1))[:size]


def announce(identity: Identity, round_: int, base: bytes = GENESIS, **changes: Any) -> SignedRecord[Announcement]:
    """A contribution of `blob_of` at the first rung."""
    fields: dict[str, Any] = {
        "swarm": SPEC.swarm_id,
        "round": round_,
        "base": base,
        "base_state": state_of(base),
        "blob": blob_ref(blob_of(identity, round_)),
        "tokens": 100,
        "steps": 1,
        "loss": 2.0,
        "rung": 0,
    }
    return seal_record(identity, Announcement(**{**fields, **changes}))


def manifest(
    sealer: Identity, round_: int, parts: list[SignedRecord[Announcement]], parent: bytes = GENESIS, **changes: Any
) -> SignedRecord[Manifest]:
    """A manifest of these contributions; `before` is the total of tokens up to its parent."""
    before = changes.pop("before", 0)
    parts = sorted(parts, key=lambda part: (part.public, part.record.round))
    fields: dict[str, Any] = {
        "swarm": SPEC.swarm_id,
        "round": round_,
        "parent": parent,
        "parent_state": state_of(parent),
        "total_tokens": before + sum(part.record.tokens for part in parts),
        "contributions": tuple(part.bytes for part in parts),
    }
    return seal_record(sealer, Manifest(**{**fields, **changes}))


def peer_record(identity: Identity, now: float, **changes: Any) -> SignedRecord[PeerRecord]:
    """A fresh heartbeat."""
    addr = f"/ip4/127.0.0.1/tcp/{4000 + identity.public[0]}"
    fields: dict[str, Any] = {
        "swarm": SPEC.swarm_id,
        "role": "trainer",
        "addrs": (addr,),
        "name": "",
        "wire_min": 1,
        "wire_max": 1,
        "issued_unix_s": now,
        "expires_unix_s": now + 600.0,
        "leaving": False,
    }
    return seal_record(identity, PeerRecord(**{**fields, **changes}))


def snapshot_record(identity: Identity, of: SignedRecord[Manifest], data: bytes) -> SignedRecord[SnapshotRecord]:
    """An offer of the state after a manifest."""
    record = SnapshotRecord(SPEC.swarm_id, of.digest, of.record.round, state_of(of.digest), blob_ref(data))
    return seal_record(identity, record)


class Solo:
    """A machine with its collected effects. Time is `now`, local and swarm time alike until clocks differ."""

    def __init__(self, *, role: str = "trainer", number: int = 999, spec: SwarmSpec = SPEC, **config: Any) -> None:
        self.identity = other(number)
        self.now = T0 + 1.0
        opened: Callable[..., Any] = config.pop("open_record", open_record)
        self.machine = PeerMachine(
            PeerConfig(spec, self.identity, role, seed=number, parameters=50_000, open_record=opened, **config)
        )
        self.spec = spec
        self.effects: list[fx.Effect] = []
        self.sources: tuple[fx.ChunkSource, ...] = ()  # what the driver would append to the last answer

    def boot(self, manifest_: bytes = GENESIS) -> Solo:
        """The dataset is here and the worker is up at the state after a manifest."""
        self.machine.restore([], {blob_ref(DATA): chunk_hashes(DATA)}, {})
        self.feed(ev.AddrsChanged(("/ip4/127.0.0.1/tcp/3999",)))
        if self.machine.view.trains:
            self.feed(ev.WorkerReady(manifest_, state_of(manifest_), None))
        return self

    def feed(self, event: ev.Event) -> list[fx.Effect]:
        """One step; what it asked for."""
        made = self.machine.step(event, self.now)
        self.effects.extend(made)
        return made

    def at(self, when: float) -> Solo:
        """Let time pass in steps of a fifth of a second."""
        while self.now < when:
            self.now = min(self.now + 0.2, when)
            self.feed(ev.Tick())
        return self

    def ask(self, peer: Identity, message: Message, bulk: bytes = b"") -> Message:
        """A peer's request and the answer."""
        return self.answer(peer.public, with_bulk(encode(self.spec.swarm_id, message, self.now), bulk)).message

    def answer(self, peer: bytes, frame: bytes) -> Any:
        """Any frame from a peer and the opened answer."""
        reply, made = self.machine.answer(peer, frame, self.now)
        self.effects.extend(made)
        self.sources = reply.chunks
        return decode(reply.payload)

    def take(self, kind: type[E]) -> list[E]:
        """The collected effects of a kind, which are forgotten."""
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, kind)]
        return found

    def requests(self) -> list[tuple[fx.Request, Message]]:
        """The collected requests with their opened messages, which are forgotten."""
        found = self.take(fx.Request)
        return [(request, decode(request.payload).message) for request in found]

    def reply(self, request: fx.Request, message: Message, bulk: bytes = b"") -> list[fx.Effect]:
        """Answer one of the machine's requests."""
        frame = with_bulk(encode(self.spec.swarm_id, message, self.now), bulk)
        return self.feed(ev.Replied(request.token, frame))

    def contribute(self, tokens: int = 100) -> SignedRecord[Announcement] | None:
        """Let the worker answer the last MakeContribution; the announcement, if one was made."""
        (make,) = self.take(fx.MakeContribution)
        data = blob_of(self.identity, make.round)
        ref = BlobRef(blob_ref(data).root, len(data))
        made = ev.ContributionMade(make.round, make.base, ref, chunk_hashes(data), tokens, 1, 2.0, make.rung)
        self.feed(made)
        return self.machine.view.pool.of_round(make.round).get(self.identity.public)

    def fold(self) -> fx.Fold:
        """Let the worker answer the one Fold that was asked for."""
        (asked,) = self.take(fx.Fold)
        self.feed(ev.Folded(asked.manifest, state_of(asked.manifest)))
        return asked

    def meet(self, *identities: Identity, **changes: Any) -> Solo:
        """Fresh heartbeats of other peers."""
        for identity in identities:
            self.ask(identity, Push((peer_record(identity, self.now, **changes).bytes,)))
        return self

    def sealed(self) -> list[SignedRecord[Manifest]]:
        """The manifests that this peer sealed and asked to keep, which are forgotten."""
        kept = [effect.record for effect in self.take(fx.KeepRecord)]
        opened = [open_record(data, (Manifest, SnapshotRecord)) for data in kept]
        return [s for s in opened if s.kind == "manifest" and s.public == self.identity.public]  # type: ignore[misc]

    def hold(self, identity: Identity, signed: SignedRecord[Announcement], ok: bool = True) -> None:
        """Another peer's contribution arrives by push, whole, and the worker has checked it."""
        data = blob_of(identity, signed.record.round)
        self.ask(identity, PutChunk(signed.bytes, b"".join(chunk_hashes(data)), 0), data)
        self.feed(ev.BlobVerified(claim_of(signed.record), ok, "" if ok else "too large"))
