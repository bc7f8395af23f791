"""How records travel: gossip that swaps digests of what is known, and eager pushes of what is new.

Every gossip interval a peer tells another one the short ids of its live records and of the blobs it can serve; the
answer brings what it lacks and asks for what the other lacks. New announcements, manifests and goodbyes don't wait
for that: they are pushed to a few peers at the next flush, and on by those. Other records ride along.
"""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3

from tscale.protocol.effects import LearnAddrs, Publish
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.kinds import is_announcement, is_peer
from tscale.protocol.membership import RECORD_HEARTBEATS
from tscale.protocol.messages import (
    MAX_IDS,
    MAX_RECORDS,
    RECORDS_BUDGET_BYTES,
    Ack,
    Envelope,
    Gossip,
    GossipReply,
    Push,
    split_ids,
)
from tscale.protocol.records import (
    Announcement,
    Manifest,
    PeerRecord,
    Record,
    SignedRecord,
    SnapshotRecord,
    seal_record,
)
from tscale.protocol.uplink import Uplink
from tscale.protocol.versions import WIRE_MIN, WIRE_VERSION
from tscale.protocol.view import View

FANOUT = 3
STRANGERS_LAST = 3  # how urgent the record of an unknown peer is
FRAME_BYTES = 100  # of a gossip frame beside its ids, about
RETRY_GOSSIPS = 0.5  # gossip intervals after one that failed
MAX_REFUSED_IDS = 20_000
MAX_HAVE_IDS = 2048  # remembered of a peer


class Spread:
    """The live records of a peer and their exchange. `take` gets every new announcement, manifest, snapshot record."""

    def __init__(self, view: View, take: Callable[[SignedRecord[Record], bytes], bool]) -> None:
        self.view = view
        self.take = take
        self.uplink = Uplink(view.config.upload_bps, view.pace.timeout_s)
        self.live: dict[bytes, SignedRecord[Record]] = {}
        self.fresh: list[SignedRecord[Record]] = []
        self.urgent = False  # something fresh is not to wait for gossip
        self.gossiped = False  # a peer has said what it knows
        self.passed: dict[bytes, None] = {}  # ids seen and not wanted again
        self._seen: dict[bytes, None] = {}  # hashes of the bytes of records taken or passed: opening one is costly
        self.addrs: tuple[str, ...] = ()
        self.own_record: SignedRecord[PeerRecord] | None = None
        self.leaving = False
        self._gossip_at = 0.0
        self._retry_at = 0.0
        self._flush_at = 0.0
        self._beat_at = 0.0
        self._opened: dict[bytes, SignedRecord[Announcement]] = {}

    # -- own record ---------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Sign a fresh peer record of this node."""
        view = self.view
        now = max(view.swarm_now, self.own_record.record.issued_unix_s + 1e-3 if self.own_record else 0.0)
        record = PeerRecord(
            swarm=view.spec.swarm_id,
            role=view.config.role,
            addrs=self.addrs,
            name=view.config.name,
            wire_min=WIRE_MIN,
            wire_max=WIRE_VERSION,
            issued_unix_s=now,
            expires_unix_s=now + RECORD_HEARTBEATS * view.pace.heartbeat_s,
            leaving=self.leaving,
        )
        if self.own_record is not None:
            self.live.pop(self.own_record.digest[:8], None)
        self.own_record = seal_record(view.config.identity, record)
        self.live[self.own_record.digest[:8]] = self.own_record
        view.emit(Publish(self.own_record.bytes, record.expires_unix_s))
        self._beat_at = view.now + view.pace.heartbeat_s

    # -- time ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Heartbeat, gossip and flush when they are due."""
        view = self.view
        if view.now >= self._beat_at:
            first = self.own_record is None
            self.beat()
            if first and self.own_record is not None:
                self.fresh.append(self.own_record)
                self.urgent = True
        if view.now >= self._gossip_at:
            self._gossip_at = view.now + view.pace.gossip_s * (0.75 + 0.5 * view.dice.unit())
            targets = view.members.gossip_targets(view.dice, view.now, 1)
            for peer in targets[:1] if self.uplink.is_slow else targets:
                self.gossip_with(peer)
        if self.urgent and view.now >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Push what is new to a few living peers."""
        view = self.view
        fresh, self.fresh, self.urgent = self.fresh, [], False
        self._flush_at = view.now + view.pace.flush_s
        fresh.sort(key=self._urgency)
        if self.uplink.is_slow:  # who the strangers are is said in gossip
            fresh = [signed for signed in fresh if self._urgency(signed) < STRANGERS_LAST]
        records = self._affordable(fresh)
        if not records:
            records = _within_budget([s for s in fresh if s.public == view.own], self._budget_bytes)
        size_bytes = sum(map(len, records))
        count = 1 + sum(self.uplink.spend_on_records(size_bytes, view.now) for _ in range(FANOUT - 1)) if records else 0
        for peer in view.members.push_targets(view.dice, view.now, count):
            view.request(peer, Push(records), lambda env, why: None)

    def _affordable(self, records: list[SignedRecord[Record]]) -> tuple[bytes, ...]:
        """What of these goes into one message: nothing when a slow uplink's share is used up. Others carry them."""
        chosen = _within_budget(records, self._budget_bytes)
        return chosen if self.uplink.spend_on_records(sum(map(len, chosen)), self.view.now) else ()

    @property
    def _budget_bytes(self) -> int:
        return min(RECORDS_BUDGET_BYTES, self.uplink.records_bytes) if self.uplink.is_slow else RECORDS_BUDGET_BYTES

    def say_goodbye(self) -> None:
        """This node is about to stop: tell a few peers, they tell the others."""
        self.leaving = True
        self.beat()
        if self.own_record is not None:
            self.fresh.append(self.own_record)
        self.flush()

    # -- digests ------------------------------------------------------------------------------------------------

    def known_ids(self) -> bytes:
        """Short ids of the live records, the newest ones where there are too many."""
        most = min(MAX_IDS, self._budget_bytes // 16) if self.uplink.is_slow else MAX_IDS
        ids = list(self.live)
        if len(ids) > most:
            ids.sort(key=lambda short: not is_peer(self.live[short]))
        return b"".join(ids[-most:])

    def have_ids(self) -> bytes:
        """Short ids of the blobs this peer can serve in time, the newest ones where there are too many."""
        complete = self.view.transfers.complete
        if self.uplink.is_slow:
            fitting = [root for root, (blob, _) in complete.items() if self.uplink.fits(blob.size_bytes)]
            return b"".join(root[:8] for root in fitting[-min(MAX_IDS, self._budget_bytes // 64) :])
        return b"".join(root[:8] for root in list(complete)[-MAX_IDS:])

    def gossip_with(self, peer: bytes) -> None:
        """Swap digests with a peer."""

        def done(env: Envelope | None, reason: str) -> None:
            if env is None:
                # with another one, and soon; but many that fail at once must not make a storm
                self._gossip_at = min(self._gossip_at, max(self.view.now, self._retry_at))
            if env is None or not isinstance(env.message, GossipReply):
                return
            reply = env.message
            self.learn_have(peer, reply.have)
            for data in reply.records:
                self.receive(data, peer)
            self.gossiped = True
            wanted = [self.live[i] for i in sorted(split_ids(reply.want)) if i in self.live]
            if wanted:
                push = Push(_within_budget(sorted(wanted, key=self._urgency), self._budget_bytes))
                self.view.request(peer, push, lambda env, why: None)

        message = Gossip(self.known_ids(), self.have_ids())
        pause_s = self.uplink.gossip_pause_s(FRAME_BYTES + len(message.known) + len(message.have))
        self._gossip_at = max(self._gossip_at, self.view.now + pause_s)
        self._retry_at = self.view.now + max(pause_s, RETRY_GOSSIPS * self.view.pace.gossip_s)
        self.view.request(peer, message, done)

    def answer_gossip(self, peer: bytes, message: Gossip) -> GossipReply:
        """What the asker lacks, and what this peer lacks."""
        theirs = split_ids(message.known)
        self.learn_have(peer, message.have)
        lacking = sorted((s for i, s in self.live.items() if i not in theirs), key=self._urgency)
        want = b"".join(sorted(i for i in theirs if i not in self.live and i not in self.passed))
        return GossipReply(want, self.have_ids(), self._affordable(lacking))

    def answer_push(self, peer: bytes, message: Push) -> Ack:
        """Take pushed records."""
        for data in message.records:
            self.receive(data, peer)
        return Ack()

    def _urgency(self, signed: SignedRecord[Record]) -> int:
        """What goes first where there is no room for all: this peer's own, then rounds and snapshots, strangers last.

        Anybody can invent peers; a flood of their records must not displace a round's.
        """
        if signed.public == self.view.own or not is_peer(signed):
            return int(signed.public != self.view.own)
        contact = self.view.members.contacts.get(signed.public)
        return 2 if contact is not None and self.view.members.is_alive(contact, self.view.swarm_now) else STRANGERS_LAST

    def learn_have(self, peer: bytes, have: bytes) -> None:
        """Which blobs a peer can serve."""
        contact = self.view.members.contacts.get(peer)
        if contact is None:
            return
        contact.have = have[-8 * MAX_HAVE_IDS :]
        for blob, want in self.view.transfers.wants.items():
            if blob.root[:8] in contact.have and peer not in want.holders:
                want.holders.add(peer)
                self.view.fetch_due = True

    # -- records ------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, source: bytes) -> None:
        """Open a record from another peer and take it in; a bad one counts against the sender."""
        key = blake3(data).digest(16)
        if key in self._seen:
            return
        try:
            signed = self.view.config.open_record(
                data, (PeerRecord, Announcement, Manifest, SnapshotRecord), known=self._opened.get
            )
        except RefuseFrame:
            self.view.members.contact(source).strikes += 1
            return
        self.admit(signed, source)
        if signed.digest[:8] in self.live or signed.digest[:8] in self.passed:
            self._seen[key] = None
            if len(self._seen) > MAX_REFUSED_IDS:
                del self._seen[next(iter(self._seen))]

    def admit(self, signed: SignedRecord[Record], source: bytes) -> None:
        """Take in an opened record, and pass it on when it is new."""
        short = signed.digest[:8]
        if short in self.live or short in self.passed:
            return
        if signed.record.swarm != self.view.spec.swarm_id:
            self._pass(short)
        elif is_peer(signed):
            self._take_peer(signed, short)
        elif self.take(signed, source):
            self._make_live(signed)
        elif not isinstance(signed.record, Manifest):
            self._pass(short)

    def _make_live(self, signed: SignedRecord[Record]) -> None:
        self.live[signed.digest[:8]] = signed
        self.fresh.append(signed)
        if is_announcement(signed):
            self._opened[signed.bytes] = signed
        self.urgent = self.urgent or not isinstance(signed.record, SnapshotRecord)

    def add_own(self, signed: SignedRecord[Announcement | Manifest | SnapshotRecord]) -> None:
        """A record of this peer's own making: live, and pushed at the next flush."""
        self._make_live(signed)
        if self.urgent:
            self._flush_at = self.view.now

    def _take_peer(self, signed: SignedRecord[PeerRecord], short: bytes) -> None:
        view, record = self.view, signed.record
        old = view.members.contacts.get(signed.public)
        old_signed = old.signed if old else None
        known = old is not None and old.record is not None
        if not view.members.learn(signed, view.swarm_now):
            self._pass(short)
            return
        if old_signed is not None:
            self.live.pop(old_signed.digest[:8], None)
            self._pass(old_signed.digest[:8])
        self.live[short] = signed
        if record.addrs:
            view.emit(LearnAddrs(signed.public, record.addrs))
        if record.leaving or not known:
            self.fresh.append(signed)
            self.urgent = self.urgent or record.leaving

    def _pass(self, short: bytes) -> None:
        self.passed[short] = None
        while len(self.passed) > MAX_REFUSED_IDS:
            del self.passed[next(iter(self.passed))]

    def drop(self, digest: bytes) -> None:
        """A record is no longer live."""
        gone = self.live.pop(digest[:8], None)
        if gone is not None:
            self._opened.pop(gone.bytes, None)
            self._pass(digest[:8])

    def sweep(self, oldest_round: int, oldest_snapshot_round: int) -> None:
        """Let go of records that nobody needs: old rounds, expired peers, old snapshots."""
        for signed in list(self.live.values()):
            record = signed.record
            if isinstance(record, PeerRecord):
                old = not self._is_current(signed.public, record)
            elif isinstance(record, SnapshotRecord):
                old = record.round < oldest_snapshot_round
            else:
                old = record.round < oldest_round
            if old:
                self.drop(signed.digest)

    def _is_current(self, public: bytes, record: PeerRecord) -> bool:
        """Whether a peer record is the one that its contact is known by, and not too old."""
        members = self.view.members
        if self.own_record is not None and record is self.own_record.record:
            return True
        contact = members.contacts.get(public)
        return contact is not None and contact.record is record and not members.is_expired(record, self.view.swarm_now)


def _within_budget(records: list[SignedRecord[Record]], budget_bytes: int) -> tuple[bytes, ...]:
    """As many records as fit one message, one at least; the rest is found missing at the next exchange."""
    taken: list[bytes] = []
    size = 0
    for signed in records[:MAX_RECORDS]:
        size += len(signed.bytes) + 8
        if taken and size > budget_bytes:
            break
        taken.append(signed.bytes)
    return tuple(taken)
