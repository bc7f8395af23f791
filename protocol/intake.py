"""Records from others: which announcements, manifests and snapshots are taken in, and how the chain is asked for."""

from __future__ import annotations

from tscale.protocol.errors import RefuseFrame
from tscale.protocol.kinds import is_announcement, is_manifest, is_snapshot
from tscale.protocol.messages import ChainReply, Envelope, GetChain
from tscale.protocol.records import Announcement, Manifest, Record, SignedRecord, SnapshotRecord
from tscale.protocol.spread import Spread
from tscale.protocol.sync import Sync
from tscale.protocol.view import View

KEEP_ROUNDS = 3
FLOOR_GAP_ROUNDS = 64
MAX_OFFERS = 1024
MAX_OFFERS_PER_PEER = 16


class Intake:
    """The gate between gossip and the state of a peer."""

    def __init__(self, view: View, spread: Spread, sync: Sync) -> None:
        self.view = view
        self.spread = spread
        self.sync = sync
        self._asking: dict[bytes, float] = {}  # peer -> when its silence counts as no answer

    @property
    def is_asking(self) -> bool:
        """Whether a question for manifests is out."""
        return any(until > self.view.now for until in self._asking.values())

    def take(self, signed: SignedRecord[Record], source: bytes) -> bool:
        """Take in a new announcement, manifest or snapshot record. True when it is to be passed on."""
        if is_announcement(signed):
            return self._take_announcement(signed, source)
        self.view.dirty = True
        if is_snapshot(signed):
            return self._take_offer(signed)
        return is_manifest(signed) and self._take_manifest(signed, source)

    def _take_offer(self, signed: SignedRecord[SnapshotRecord]) -> bool:
        """A few of each author, of rounds of this time: offers are kept as long as their rounds are."""
        offers = self.sync.snapshots.offers
        newest = self.view.times.round_at(self.view.swarm_now) + 1
        if not self.sync.oldest_snapshot_round <= signed.record.round <= newest:
            return False
        if sum(other.public == signed.public for other in offers.values()) >= MAX_OFFERS_PER_PEER:
            return False
        if len(offers) >= MAX_OFFERS and not self._make_room(signed.public):
            return False
        self.sync.offer(signed)
        return True

    def _make_room(self, public: bytes) -> bool:
        """Let a stranger's offer go for one of a peer that is none. False when there is no such room."""
        view, offers = self.view, self.sync.snapshots.offers
        if view.members.is_stranger(public, view.swarm_now):
            return False
        others = (d for d, s in offers.items() if s.public != view.own)
        weakest = next((d for d in others if view.members.is_stranger(offers[d].public, view.swarm_now)), None)
        if weakest is not None:
            del offers[weakest]
            self.spread.drop(weakest)
        return weakest is not None

    def _take_announcement(self, signed: SignedRecord[Announcement], source: bytes) -> bool:
        view, caps, record = self.view, self.view.spec.caps, signed.record
        now_round = view.times.round_at(view.swarm_now)
        if not now_round - KEEP_ROUNDS <= record.round <= now_round:
            return False
        if record.blob.size_bytes > caps.max_blob_bytes or record.tokens > caps.max_contribution_tokens:
            return False
        if record.rung >= len(view.spec.codec.rungs) or not view.chain.admits(signed.public):
            return False
        if not view.pool.add(signed, regular=not view.members.is_stranger(signed.public, view.swarm_now)):
            return False
        view.want(record.blob, "contribution", signed.public, is_new=True)
        if view.holds(record.blob.root):
            self.sync.checks.blob_whole(record.blob.root)
        if view.chain.get(record.base) is None:
            self.ask_chain(source)  # its author follows a manifest that is not known here
        self.sync.check_head(signed)
        return True

    def _take_manifest(self, signed: SignedRecord[Manifest], source: bytes) -> bool:
        view = self.view
        if signed.record.round > view.times.round_at(view.swarm_now):
            return False
        why = self.sync.insert(signed)
        if why == "added":
            view.unchecked = True
            for part in signed.contributions:
                if part.record.round >= signed.record.round - KEEP_ROUNDS:
                    view.pool.add(part)
            return True
        if why == "its parent is not known":
            self.ask_chain(source)
        elif why != "known":
            view.notice("manifest_refused", round=signed.record.round, reason=why)
        return False

    # -- chain --------------------------------------------------------------------------------------------------

    def ask_chain(self, peer: bytes) -> None:
        """A manifest of a chain we don't know: ask for what lies between."""
        view = self.view
        if peer == view.own or self._asking.get(peer, 0.0) > view.now:
            return
        self._asking[peer] = view.now + view.pace.timeout_s

        def done(env: Envelope | None, reason: str) -> None:
            self._asking.pop(peer, None)
            if env is not None and isinstance(env.message, ChainReply):
                self._take_chain(env.message, peer)

        view.request(peer, GetChain(view.chain.locator(self.sync.target())), done)

    def _lacks_the_chain(self) -> bool:
        """Whether this peer may need a chain from somebody's floor: it is new here, or was away for long.

        Nobody can check what lies below a floor, so a peer that follows a chain of this time takes none.
        """
        target = self.sync.target()
        gap_rounds = self.view.times.round_at(self.view.swarm_now) - target.round
        return target.signed is None or gap_rounds > FLOOR_GAP_ROUNDS

    def _take_chain(self, reply: ChainReply, peer: bytes) -> None:
        view, added = self.view, 0
        for i, data in enumerate(reply.manifests):
            try:
                signed = view.config.open_record(data, (Manifest,))
            except RefuseFrame:
                view.members.contact(peer).strikes += 1
                return
            if signed.record.round > view.times.round_at(view.swarm_now):
                return
            why = self.sync.insert(signed, as_floor=reply.floor and i == 0 and self._lacks_the_chain())
            if why == "added":
                added += 1
                view.dirty = view.unchecked = True
                self.spread.live[signed.digest[:8]] = signed
            elif why != "known":
                view.notice("manifest_refused", round=signed.record.round, reason=why)
                return
        if added and len(reply.manifests) > 1:
            self.ask_chain(peer)  # there may be more than one reply holds
