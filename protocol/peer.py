"""One peer's state machine: `step(event, now) -> effects` and `answer(peer, frame, now) -> (answer, effects)`.

Pure: bytes, time and a seed come in, effects come out. The parts are Spread (records), Sync (following the chain),
Rounds (closing and sealing) and Serve (answering); this file routes events to them and runs them in order.
"""

from __future__ import annotations

from tscale.protocol.chain import Link
from tscale.protocol.effects import (
    Answer,
    ChunkSource,
    DatasetReady,
    Effect,
    RestartFromGenesis,
    SetTraining,
    StoreChunk,
)
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
    TrainingAllowed,
    WorkerDied,
    WorkerReady,
)
from tscale.protocol.hashing import BlobRef
from tscale.protocol.messages import (
    Ack,
    ChainReply,
    ChunkReply,
    Envelope,
    GetChain,
    GetChunk,
    GetHashes,
    HashesReply,
    PutChunk,
    decode,
    split_hashes,
)
from tscale.protocol.records import Announcement, Manifest, SignedRecord, SnapshotRecord
from tscale.protocol.rounds import Rounds
from tscale.protocol.serve import Serve
from tscale.protocol.spread import Spread
from tscale.protocol.sync import Sync
from tscale.protocol.transfer import Ask
from tscale.protocol.view import PeerConfig, View

PUSH_PEERS = 2
KEEP_ROUNDS = 3


class PeerMachine:
    """A peer of one swarm. The driver feeds events and executes the effects in order."""

    def __init__(self, config: PeerConfig) -> None:
        self.view = View.create(config)
        self.spread = Spread(self.view, self._take)
        self.sync = Sync(self.view, self.spread)
        self.rounds = Rounds(self.view, self.spread, self.sync)
        self.serve = Serve(self.view, self.spread, self.sync)
        self._allowed = (True, "")
        self._asking_chain: dict[bytes, float] = {}
        self._started_s: float | None = None
        self._dataset_told = False
        self._swept_round = -1
        self._told: tuple[bool, str] | None = None

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
            self.view.transfers.partial[blob.root] = (hashes, have)
        for data in records:
            try:
                signed = self.view.config.open_record(data, (Manifest, SnapshotRecord))
            except RefuseFrame:
                bad += 1
                continue
            if isinstance(signed.record, Manifest):
                # the oldest one kept has no parent here once the chain was pruned
                as_floor = not self.view.chain.genesis.children
                if self.sync.insert(signed, as_floor) == "added":  # type: ignore[arg-type]
                    self.spread.live[signed.digest[:8]] = signed
            else:
                self.sync.restore_offer(signed)  # type: ignore[arg-type]
        self.view.unchecked = True
        self.view.effects.clear()  # nothing of this needs to be kept or sent again
        return bad

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take an event at local time `now`; returns the effects in order."""
        self.view.set_now(now)
        if self._started_s is None:
            self._started_s = now
        if not isinstance(event, (Replied, RequestFailed)):
            self.view.dirty = self.view.fetch_due = True
        self._route(event)
        return self._settle()

    def answer(self, peer: bytes, frame: bytes, now: float) -> tuple[Answer, list[Effect]]:
        """Answer a peer's request; `peer` is authenticated by the transport. Never raises for what is in the frame."""
        self.view.set_now(now)
        self.view.members.contact(peer)
        self.view.members.heard(peer, self.view.swarm_now)
        message, chunk = self.serve.answer(peer, frame, self._take_pushed)
        return Answer(self.view.frame(message), chunk), self._settle()

    def _settle(self) -> list[Effect]:
        """Let every part do what has become due, and hand out the effects."""
        view = self.view
        self.spread.tick()
        if view.dirty:
            view.dirty = False
            self._steer_training()
            self.rounds.close()
            self.sync.verify_pending()
            self.sync.plan()
            if self.rounds.seal() is not None:
                self.sync.plan()
            self._want_dataset()
            self._sweep()
        self._fetch()
        effects, view.effects = view.effects, []
        return effects

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

    def _steer_training(self) -> None:
        """Train when allowed and in step with the swarm; a fresh node waits a moment for its seeds first."""
        view = self.view
        if not view.trains or self.sync.head is None:
            return
        on, reason = self._allowed
        if on and self.sync.drifted:
            on, reason = False, "repairing the state"
        elif on and not self.sync.joined():
            on, reason = False, "catching up with the swarm"
        elif on and self._is_waiting_for_seeds():
            on, reason = False, "looking for peers"
        self.rounds.training, self.rounds.reason = on, reason
        if self._told != (on, reason):
            self._told = (on, reason)
            view.emit(SetTraining(on, reason))

    def _is_waiting_for_seeds(self) -> bool:
        view = self.view
        if not view.config.has_seeds or self._started_s is None:
            return False
        if any(c.heard_unix_s > 0.0 for c in view.members.contacts.values()):
            return False
        return view.now - self._started_s < view.pace.join_wait_s

    # -- events -------------------------------------------------------------------------------------------------

    def _route(self, event: Event) -> None:
        if isinstance(event, Replied):
            self._replied(event)
        elif isinstance(event, RequestFailed):
            pending = self.view.pending.pop(event.token, None)
            if pending is not None:
                self.view.members.failed(pending.peer, self.view.now)
                pending.done(None, event.reason)
        elif isinstance(event, (AddrsChanged, Contacts, Discovered, Leaving, TrainingAllowed)):
            self._route_outside(event)
        else:
            self._route_worker(event)

    def _route_outside(self, event: AddrsChanged | Contacts | Discovered | Leaving | TrainingAllowed) -> None:
        if isinstance(event, AddrsChanged):
            if event.addrs != self.spread.addrs:
                self.spread.addrs = event.addrs
                self.spread.beat()
        elif isinstance(event, Contacts):
            for public, addrs in event.peers:
                self.view.members.bootstrap(public, addrs)
        elif isinstance(event, Discovered):
            for data in event.records:
                self.spread.receive(data, self.view.own)
        elif isinstance(event, TrainingAllowed):
            self._allowed = (event.allowed, event.reason)
        else:
            self.spread.leaving = True
            self.spread.beat()
            if self.spread.own_record is not None:
                self.spread.fresh.append(self.spread.own_record)
            self.spread.flush()

    def _route_worker(self, event: Event) -> None:
        sync = self.sync
        if isinstance(event, ContributionMade):
            signed = self.rounds.on_contribution(event)
            if signed is not None:
                self._push_blob(signed, event.hashes)
        elif isinstance(event, ContributionFailed):
            self.rounds.waiting = False
            self.view.notice("no_contribution", round=event.round, reason=event.reason)
        elif isinstance(event, BlobVerified):
            sync.on_verified(event)
            arrived = self.view.pool.by_root.get(event.root)
            if arrived is not None and event.ok:
                self.rounds.note_arrival(arrived)
        elif isinstance(event, BlobMissing):
            sync.on_missing(event.root)
        elif isinstance(event, Folded):
            sync.on_folded(event)
        elif isinstance(event, FoldFailed):
            sync.on_fold_failed(event)
        elif isinstance(event, SnapshotReady):
            sync.on_snapshot_ready(event)
        elif isinstance(event, SnapshotLoaded):
            sync.on_snapshot_loaded(event)
        elif isinstance(event, SnapshotRefused):
            sync.on_snapshot_refused(event)
        elif isinstance(event, WorkerReady):
            self.rounds.waiting = False
            self._told = None
            if not sync.on_worker(event):
                self.view.emit(RestartFromGenesis("its checkpoint belongs to no manifest this node knows"))
        elif isinstance(event, WorkerDied):
            self.rounds.waiting = False
            sync.on_worker_died()

    def _replied(self, event: Replied) -> None:
        pending = self.view.pending.pop(event.token, None)
        if pending is None:
            return
        try:
            envelope = decode(event.payload)
            if envelope.swarm != self.view.spec.swarm_id:
                raise RefuseFrame("an answer about another swarm")
        except RefuseFrame as error:
            self.view.members.contact(pending.peer).strikes += 1
            pending.done(None, str(error))
            return
        self.view.members.contact(pending.peer)
        self.view.members.heard(pending.peer, self.view.swarm_now)
        self.view.clock.observe(pending.peer, envelope.sent_unix_s, pending.sent_unix_s, self.view.now)
        self.view.set_now(self.view.now)
        pending.done(envelope, "")

    # -- records from others ------------------------------------------------------------------------------------

    def _take(self, signed: SignedRecord[Announcement | Manifest | SnapshotRecord], source: bytes) -> bool:
        """Take in a new announcement, manifest or snapshot record. True when it is to be passed on."""
        record = signed.record
        self.view.dirty = True
        if isinstance(record, Announcement):
            return self._take_announcement(signed, record, source)  # type: ignore[arg-type]
        if isinstance(record, SnapshotRecord):
            if record.round < self.sync.oldest_snapshot_round:
                return False
            self.sync.offer(signed)  # type: ignore[arg-type]
            return True
        return self._take_manifest(signed, source)  # type: ignore[arg-type]

    def _take_announcement(self, signed: SignedRecord[Announcement], record: Announcement, source: bytes) -> bool:
        view, caps = self.view, self.view.spec.caps
        now_round = view.times.round_at(view.swarm_now)
        if not now_round - KEEP_ROUNDS <= record.round <= now_round:
            return False
        if record.blob.size_bytes > caps.max_blob_bytes or record.tokens > caps.max_contribution_tokens:
            return False
        if record.rung >= len(view.spec.codec.rungs) or not view.chain.admits(signed.public):
            return False
        if not view.pool.add(signed):
            return False
        view.want(record.blob, "contribution", signed.public)
        self.sync.check_head()
        return True

    def _take_manifest(self, signed: SignedRecord[Manifest], source: bytes) -> bool:
        view = self.view
        if signed.record.round > view.times.round_at(view.swarm_now):
            return False
        why = self.sync.insert(signed)
        if why == "added":
            view.unchecked = True
            for part in signed.contributions:
                view.pool.add(part)
            return True
        if why == "its parent is not known":
            self._ask_chain(source)
        elif why != "known":
            view.notice("manifest_refused", round=signed.record.round, reason=why)
        return False

    def _ask_chain(self, peer: bytes) -> None:
        """A manifest of a chain we don't know: ask for what lies between."""
        view = self.view
        if peer == view.own or self._asking_chain.get(peer, 0.0) > view.now:
            return
        self._asking_chain[peer] = view.now + view.pace.timeout_s

        def done(env: Envelope | None, reason: str) -> None:
            self._asking_chain.pop(peer, None)
            if env is None or not isinstance(env.message, ChainReply):
                return
            self._take_chain(env.message, peer)

        view.request(peer, GetChain(view.chain.locator(self.sync.target())), done)

    def _take_chain(self, reply: ChainReply, peer: bytes) -> None:
        added = 0
        for i, data in enumerate(reply.manifests):
            try:
                signed = self.view.config.open_record(data, (Manifest,))
            except RefuseFrame:
                self.view.members.contact(peer).strikes += 1
                return
            if signed.record.round > self.view.times.round_at(self.view.swarm_now):
                return
            why = self.sync.insert(signed, as_floor=reply.floor and i == 0)
            if why == "added":
                added += 1
                self.view.dirty = self.view.unchecked = True
                self.spread.live[signed.digest[:8]] = signed
            elif why != "known":
                self.view.notice("manifest_refused", round=signed.record.round, reason=why)
                return
        if added and len(reply.manifests) > 1:
            self._ask_chain(peer)  # there may be more than one reply holds

    def _take_pushed(self, peer: bytes, message: PutChunk, data: bytes) -> bool:
        """A pushed chunk of a contribution; the announcement that comes with it is taken in first."""
        try:
            signed = self.view.config.open_record(message.record, (Announcement,))
            hashes = split_hashes(message.hashes)
        except RefuseFrame:
            self.view.members.contact(peer).strikes += 1
            return False
        self.spread.admit(signed, peer)
        root = signed.record.blob.root
        if self.view.holds(root):
            return True
        return self.view.transfers.take_hashes(root, hashes) and self._store(root, message.index, data)

    # -- blobs --------------------------------------------------------------------------------------------------

    def _store(self, root: bytes, index: int, data: bytes) -> bool:
        transfers = self.view.transfers
        if not transfers.check_chunk(root, index, data):
            return False
        self.view.emit(StoreChunk(transfers.wants[root].blob, index, data))
        if transfers.took_chunk(root, index):
            self.view.dirty = True
            self.sync.check_blob(root)
            self.view.usable_version += 1
        return True

    def _fetch(self) -> None:
        view = self.view
        if not view.transfers.wants or not view.fetch_due:
            return
        view.fetch_due = False
        for ask in view.transfers.schedule(view.dice, view.now, self._can_ask):
            self._ask(ask)

    def _can_ask(self, peer: bytes) -> int:
        """2 for a peer that answers, 1 for one that has been silent, 0 for one to leave alone for now."""
        contact = self.view.members.contacts.get(peer)
        if contact is None or contact.retry_unix_s > self.view.now:
            return 0
        return 2 if self.view.members.is_alive(contact, self.view.swarm_now) else 1

    def _ask(self, ask: Ask) -> None:
        view = self.view

        def done(env: Envelope | None, reason: str) -> None:
            good = False
            message = env.message if env is not None else None
            if ask.index < 0 and isinstance(message, HashesReply) and message.root == ask.root:
                good = view.transfers.take_hashes(ask.root, split_hashes(message.hashes))
                self.sync.copy_known_chunks(ask.root)
            elif isinstance(message, ChunkReply) and env is not None and message.root == ask.root:
                held = view.holds(ask.root) or ask.root not in view.transfers.wants
                good = held or self._store(ask.root, ask.index, env.bulk)
                if not good:
                    view.members.contact(ask.peer).strikes += 1
            view.transfers.ended(ask, good, view.now)
            view.fetch_due = True

        message = GetHashes(ask.root) if ask.index < 0 else GetChunk(ask.root, ask.index)
        view.request(ask.peer, message, done)

    def _push_blob(self, signed: SignedRecord[Announcement], hashes: tuple[bytes, ...]) -> None:
        """Push an own contribution to a few peers, chunk by chunk: nobody may be able to dial this one."""
        for peer in self.view.members.push_targets(self.view.dice, self.view.swarm_now, PUSH_PEERS):
            self._push_chunk(peer, signed, b"".join(hashes), 0)

    def _push_chunk(self, peer: bytes, signed: SignedRecord[Announcement], hashes: bytes, index: int) -> None:
        blob = signed.record.blob

        def done(env: Envelope | None, reason: str) -> None:
            if env is not None and isinstance(env.message, Ack) and index + 1 < blob.chunks:
                if self.view.holds(blob.root):
                    self._push_chunk(peer, signed, hashes, index + 1)

        message = PutChunk(signed.bytes, hashes, index)
        self.view.request(peer, message, done, ChunkSource(blob.root, index))

    def _want_dataset(self) -> None:
        view = self.view
        if self._dataset_told:
            return
        shards = view.spec.data.shards
        if all(view.holds(shard.root) for shard in shards):
            self._dataset_told = True
            for shard in shards:
                view.kinds[shard.root] = "dataset"
            view.emit(DatasetReady())
            return
        for shard in shards:
            if not view.holds(shard.root):
                view.want(shard, "dataset")

    # -- for the status -----------------------------------------------------------------------------------------

    @property
    def allowed(self) -> tuple[bool, str]:
        """Whether the person (or a limit) allows training, and why not."""
        return self._allowed

    @property
    def head(self) -> Link | None:
        """The manifest this peer's state follows."""
        return self.sync.head
