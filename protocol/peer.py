"""One peer's state machine: `step(event, now) -> effects` and `answer(peer, frame, now) -> (answer, effects)`.

Pure: bytes, time and a seed come in, effects come out. The parts are Spread (records), Intake (what of them is taken),
Fetching (blobs), Sync (following the chain), Rounds (closing and sealing) and Serve (answering); this file routes
events to them and runs them in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tscale.protocol.chain import Link
from tscale.protocol.effects import Answer, DropBlob, Effect, RestartFromGenesis, SetTraining
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.events import (
    AddrsChanged,
    BlobMissing,
    BlobVerified,
    Contacts,
    ContributionFailed,
    ContributionMade,
    Discovered,
    Event,
    Folded,
    FoldFailed,
    Leaving,
    Replied,
    RequestFailed,
    SnapshotLoaded,
    SnapshotReady,
    SnapshotRefused,
    Tick,
    TrainingAllowed,
    WorkerDied,
    WorkerReady,
)
from tscale.protocol.fetching import Fetching
from tscale.protocol.hashing import BlobRef
from tscale.protocol.intake import KEEP_ROUNDS, Intake
from tscale.protocol.kinds import is_manifest, is_snapshot
from tscale.protocol.messages import Refused, decode
from tscale.protocol.pool import claim_of
from tscale.protocol.records import Manifest, Record, SignedRecord, SnapshotRecord
from tscale.protocol.rounds import MAX_RANK, Rounds
from tscale.protocol.serve import Serve
from tscale.protocol.spread import Spread
from tscale.protocol.sync import Sync
from tscale.protocol.view import PeerConfig, View

VOUCHING_LINKS = 4  # of the chain: who contributed to one of them is a real peer
SEAL_LAST = 0.75  # of a round after the close: when a peer with a slow uplink seals at the latest


class PeerMachine:
    """A peer of one swarm. The driver feeds events and executes the effects in order."""

    def __init__(self, config: PeerConfig) -> None:
        self.view = View.create(config)
        self.spread = Spread(self.view, self._take)
        self.sync = Sync(self.view, self.spread)
        self.intake = Intake(self.view, self.spread, self.sync)
        self.fetching = Fetching(self.view, self.spread, self._whole)
        self.fetching.on_hashes = self.sync.snapshots.copy_known_chunks
        self.rounds = Rounds(self.view, self.spread, self.sync)
        self.serve = Serve(self.view, self.spread, self.sync)
        self._allowed = (True, "")
        self._started_s: float | None = None
        self._settled_in = False
        self._swept_round: int | None = None
        self._vouched_at: Link | None = None
        self._told: tuple[bool, str] | None = None
        self._on: dict[type[Any], Callable[[Any], object]] = {
            Tick: lambda event: None,
            Replied: self._replied,
            RequestFailed: self._request_failed,
            AddrsChanged: self._addrs_changed,
            Contacts: self._contacts,
            Discovered: self._discovered,
            TrainingAllowed: self._training_allowed,
            Leaving: self._leaving,
            ContributionMade: self._contribution_made,
            ContributionFailed: self._contribution_failed,
            BlobVerified: self._blob_verified,
            BlobMissing: lambda event: self.sync.on_missing(event.root),
            Folded: self.sync.on_folded,
            FoldFailed: self.sync.on_fold_failed,
            SnapshotReady: self.sync.snapshots.on_ready,
            SnapshotLoaded: self.sync.on_snapshot_loaded,
            SnapshotRefused: self.sync.on_snapshot_refused,
            WorkerReady: self._worker_ready,
            WorkerDied: self._worker_died,
        }

    # -- life ---------------------------------------------------------------------------------------------------

    def restore(
        self,
        records: list[bytes],
        complete: dict[BlobRef, tuple[bytes, ...]],
        partial: dict[BlobRef, tuple[tuple[bytes, ...], set[int]]],
    ) -> int:
        """Take in what the last run kept: records oldest first, and the store's blobs. Returns how many were bad."""
        bad = 0
        for blob, hashes in complete.items():
            self.view.transfers.add_complete(blob, hashes)
        for blob, (hashes, have) in partial.items():
            self.view.transfers.partial[blob] = (hashes, have)
        for data in records:
            try:
                signed = self.view.config.open_record(data, (Manifest, SnapshotRecord))
            except RefuseFrame:
                bad += 1
                continue
            if is_manifest(signed):
                # the oldest one kept has no parent here once the chain was pruned
                as_floor = not self.view.chain.genesis.children
                if self.sync.insert(signed, as_floor) == "added":
                    self.spread.live[signed.digest[:8]] = signed
            elif is_snapshot(signed):
                self.sync.snapshots.restore(signed)
        self.view.unchecked = True
        self.view.effects.clear()  # nothing of this needs to be kept or sent again
        return bad

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take an event at local time `now`; returns the effects in order."""
        self.view.set_now(now)
        if self._started_s is None:
            self._started_s = now
        if not isinstance(event, (Replied, RequestFailed, BlobVerified)):
            self.view.dirty = True
        if isinstance(event, Tick):
            self.view.fetch_due = True
        self._on[type(event)](event)
        return self._settle()

    def answer(self, peer: bytes, frame: bytes, now: float) -> tuple[Answer, list[Effect]]:
        """Answer a peer's request; `peer` is authenticated by the transport. Never raises for what is in the frame."""
        self.view.set_now(now)
        self.view.members.contact(peer)
        self.view.members.heard(peer, self.view.swarm_now)
        message, chunks = self.serve.answer(peer, frame, self.fetching.take_pushed)
        if not self.fetching.may_serve(chunks):
            message, chunks = Refused("this peer's uplink is too slow for it now"), ()
        self.fetching.note_asked(peer, message, chunks)
        return Answer(self.view.frame(message), chunks), self._settle()

    def _settle(self) -> list[Effect]:
        """Let every part do what has become due, and hand out the effects."""
        view = self.view
        self.spread.tick()
        if view.dirty:
            view.dirty = False
            self._vouch()
            self._steer_training()
            self.rounds.close()
            self.sync.verify_pending()
            self.sync.plan()
            if self._may_seal() and self.rounds.seal() is not None:
                self.sync.plan()
            self.fetching.want_dataset()
            self._sweep()
        self.fetching.tick()
        effects, view.effects = view.effects, []
        return effects

    def _may_seal(self) -> bool:
        """A peer whose uplink takes long for a manifest is the last one to seal: another one of the round is there."""
        view, rounds = self.view, self.rounds
        if self.spread.uplink.carries_manifests or not rounds.others():
            return True
        late_s = view.swarm_now - view.times.closes_unix_s(view.times.round_at(view.swarm_now) - 1)
        return late_s >= min(rounds.grace_s() + (MAX_RANK + 1) * rounds.step_s(), SEAL_LAST * view.times.length_s)

    def _vouch(self) -> None:
        """Tell the membership whose contributions were folded last."""
        head = self.sync.head
        if head is self._vouched_at or not self.view.trains:
            return
        self._vouched_at = head
        authors: set[bytes] = set()
        for _ in range(VOUCHING_LINKS):
            if head is not None:
                authors |= head.authors
                head = head.parent
        self.view.members.vouch(frozenset(authors))

    def _sweep(self) -> None:
        view = self.view
        round_ = view.times.round_at(view.swarm_now)
        if round_ == self._swept_round:
            return
        self._swept_round = round_
        oldest = min(round_, self.sync.target().round + 2) - KEEP_ROUNDS
        view.pool.forget_before(round_ - KEEP_ROUNDS)
        self.spread.sweep(oldest, self.sync.oldest_snapshot_round)
        self.sync.sweep()
        self.rounds.sweep()
        view.members.sweep(view.swarm_now)

    # -- training -----------------------------------------------------------------------------------------------

    def _steer_training(self) -> None:
        """Train when allowed and in step with the swarm."""
        view = self.view
        if not view.trains or self.sync.head is None:
            return
        on, reason = self._allowed
        if on and self.sync.drifted:
            on, reason = False, "repairing the state"
        elif on and not self._has_settled_in():
            on, reason = False, "looking for peers"
        elif on and not self.sync.joined():
            on, reason = False, "catching up with the swarm"
        elif on and self.sync.following.is_out_of_touch():
            on, reason = False, "catching up with the swarm: its chain does not arrive, the link may be too slow"
        self.rounds.training, self.rounds.reason = on, reason
        if self._told != (on, reason):
            self._told = (on, reason)
            view.emit(SetTraining(on, reason))

    def _has_settled_in(self) -> bool:
        """A fresh peer hears what its contacts know, for a moment at most, before it trains on what it has."""
        if not self._settled_in:
            self._settled_in = self._is_informed() or self._has_waited()
        return self._settled_in

    def _is_informed(self) -> bool:
        contacts = self.view.members.contacts
        if not contacts:
            return not self.view.config.has_seeds
        return self.spread.gossiped and not self.intake.is_asking

    def _has_waited(self) -> bool:
        return self._started_s is not None and self.view.now - self._started_s >= self.view.pace.join_wait_s

    # -- events -------------------------------------------------------------------------------------------------

    def _replied(self, event: Replied) -> None:
        view = self.view
        pending = view.pending.pop(event.token, None)
        if pending is None:
            return
        try:
            envelope = decode(event.payload)
            if envelope.swarm != view.spec.swarm_id:
                raise RefuseFrame("an answer about another swarm")
        except RefuseFrame as error:
            view.members.contact(pending.peer).strikes += 1
            pending.done(None, str(error))
            return
        view.members.contact(pending.peer)
        view.clock.observe(pending.peer, envelope.sent_unix_s, pending.sent_unix_s, view.now)
        view.set_now(view.now)
        view.members.heard(pending.peer, view.swarm_now)
        pending.done(envelope, "")

    def _request_failed(self, event: RequestFailed) -> None:
        pending = self.view.pending.pop(event.token, None)
        if pending is not None:
            self.view.members.failed(pending.peer, self.view.now)
            pending.done(None, event.reason)

    def _addrs_changed(self, event: AddrsChanged) -> None:
        if event.addrs != self.spread.addrs:
            self.spread.addrs = event.addrs
            self.spread.beat()

    def _contacts(self, event: Contacts) -> None:
        for public, addrs in event.peers:
            self.view.members.bootstrap(public, addrs)

    def _discovered(self, event: Discovered) -> None:
        for data in event.records:
            self.spread.receive(data, self.view.own)

    def _training_allowed(self, event: TrainingAllowed) -> None:
        self._allowed = (event.allowed, event.reason)

    def _leaving(self, event: Leaving) -> None:
        self.spread.say_goodbye()

    def _contribution_made(self, event: ContributionMade) -> None:
        late = bool(self.rounds.others()) and not self.fetching.can_deliver(event.blob)
        self.fetching.undelivered_bytes = event.blob.size_bytes if late else 0
        if late:  # announced, it would be waited for, and a manifest with it could be folded by nobody else
            self.rounds.waiting = False
            self.view.emit(DropBlob(event.blob.root))
            self.view.notice("not_announced", round=event.round, reason="the uplink is too slow")
            return
        signed = self.rounds.on_contribution(event)
        if signed is not None:
            self.fetching.push_blob(signed, event.hashes)

    def _contribution_failed(self, event: ContributionFailed) -> None:
        self.rounds.waiting = False
        self.view.notice("no_contribution", round=event.round, reason=event.reason)

    def _blob_verified(self, event: BlobVerified) -> None:
        version = self.sync.usables.version
        awaited = self.rounds.awaits(event.claim.blob.root)
        self.sync.checks.on_verified(event)
        if awaited or not event.ok or self.sync.usables.version != version:
            self.view.dirty = True  # a fold or a seal may go ahead; else the next tick is early enough
        arrived = [s for s in self.view.pool.naming(event.claim.blob.root) if claim_of(s.record) == event.claim]
        if arrived and event.ok:
            self.rounds.note_arrival(arrived[0])
            for signed in arrived:
                self.sync.check_head(signed)

    def _worker_ready(self, event: WorkerReady) -> None:
        self.rounds.waiting = False
        self._told = None
        if not self.sync.on_worker(event):
            self.view.emit(RestartFromGenesis("its checkpoint belongs to no manifest this node knows"))

    def _worker_died(self, event: WorkerDied) -> None:
        self.rounds.waiting = False
        self.sync.on_worker_died()

    # -- between the parts --------------------------------------------------------------------------------------

    def _take(self, signed: SignedRecord[Record], source: bytes) -> bool:
        return self.intake.take(signed, source)

    def _whole(self, root: bytes) -> None:
        self.sync.checks.blob_whole(root)

    # -- for the status -----------------------------------------------------------------------------------------

    @property
    def allowed(self) -> tuple[bool, str]:
        """Whether the person (or a limit) allows training, and why not."""
        return self._allowed

    @property
    def head(self) -> Link | None:
        """The manifest this peer's state follows."""
        return self.sync.head
