"""Snapshots: which one to fetch when the chain can't be replayed, taking over a state, and serving one's own."""

from __future__ import annotations

from tscale.protocol.chain import Link
from tscale.protocol.effects import ChunkSource, CopyChunk, KeepRecord, LoadSnapshot, WriteSnapshot
from tscale.protocol.events import SnapshotReady
from tscale.protocol.hashing import BlobRef
from tscale.protocol.records import SignedRecord, SnapshotRecord, seal_record
from tscale.protocol.spread import Spread
from tscale.protocol.view import View

KEPT = 2  # own snapshots in the store


class Snapshots:
    """Offers of the swarm, and the snapshots in this peer's store (`stored`: manifest -> blob root)."""

    def __init__(self, view: View, spread: Spread) -> None:
        self.view = view
        self.spread = spread
        self.offers: dict[bytes, SignedRecord[SnapshotRecord]] = {}
        self.bad: set[bytes] = set()
        self.stored: dict[bytes, bytes] = {}
        self.asked_for: bytes | None = None  # the manifest whose state is being fetched
        self._offered = 0
        self._chosen: tuple[object, SnapshotRecord | None] | None = None

    # -- offers -------------------------------------------------------------------------------------------------

    def offer(self, signed: SignedRecord[SnapshotRecord]) -> None:
        """A peer says it serves the state after a manifest."""
        self.offers[signed.digest] = signed
        self._offered += 1
        want = self.view.transfers.wants.get(signed.record.blob)
        if want is not None:
            want.holders.add(signed.public)
            self.view.fetch_due = True

    def offer_own(self, signed: SignedRecord[SnapshotRecord]) -> None:
        """A snapshot in this peer's store: tell the others."""
        self.stored[signed.record.manifest] = signed.record.blob.root
        self.offers[signed.digest] = signed
        self._offered += 1
        self.spread.add_own(signed)
        self.view.emit(KeepRecord(signed.digest, signed.bytes))

    def restore(self, signed: SignedRecord[SnapshotRecord]) -> None:
        """An own snapshot record from before a restart: offer it again if the blob is still here."""
        if self.view.holds(signed.record.blob.root) and signed.public == self.view.own:
            self.view.kinds[signed.record.blob.root] = "snapshot"
            self.offer_own(signed)

    def holders(self, root: bytes) -> set[bytes]:
        """Who offered a blob."""
        return {s.public for s in self.offers.values() if s.record.blob.root == root}

    def claims(self, manifest: bytes) -> list[SnapshotRecord]:
        """What the offers say about the state after a manifest."""
        return [s.record for s in self.offers.values() if s.record.manifest == manifest]

    def choose(self, target: Link, oldest: int, drifted: bool) -> SnapshotRecord | None:
        """The newest snapshot on the target's chain that most offers agree on and that has not failed.

        A peer's own ones count too, unless it has drifted: they cost no download.
        """
        key = (target.digest, self._offered, len(self.offers), len(self.bad), oldest, drifted)
        if self._chosen is None or self._chosen[0] != key:
            self._chosen = (key, self._choose_anew(target, oldest, drifted))
        return self._chosen[1]

    def _choose_anew(self, target: Link, oldest: int, drifted: bool) -> SnapshotRecord | None:
        states = states_towards(target, oldest)
        counts: dict[bytes, list[SnapshotRecord]] = {}
        for signed in self.offers.values():
            r = signed.record
            known = states.get(r.manifest)
            if known is None or known[0] != r.round or r.blob.root in self.bad:
                continue
            if signed.public == self.view.own and (drifted or not self.view.holds(r.blob.root)):
                continue
            if r.blob.size_bytes > self.view.spec.caps.max_snapshot_bytes or known[1] not in (None, r.state):
                continue
            counts.setdefault(r.blob.root, []).append(r)
        if not counts:
            return None
        return max(counts.values(), key=lambda group: (group[0].round, len(group), group[0].blob.root))[0]

    # -- fetching -----------------------------------------------------------------------------------------------

    def under_way(self, target: Link, oldest: int) -> SnapshotRecord | None:
        """The snapshot that is being fetched, while it moves and lies on the target's chain: no change of horses."""
        if self.asked_for is None or self.asked_for not in states_towards(target, oldest):
            return None
        for record in self.claims(self.asked_for):
            if record.blob.root in self.bad:
                continue
            want = self.view.transfers.wants.get(record.blob)
            moving = want is not None and self.view.now - want.moved_s < 4.0 * self.view.pace.timeout_s
            if moving or self.view.holds(record.blob.root):
                return record
        return None

    def find_moved_s(self) -> float:
        """The local time at which a chunk of a snapshot came last; 0 when none has."""
        wants = [w for w in self.view.transfers.wants.values() if self.view.kinds.get(w.blob.root) == "snapshot"]
        return max((want.moved_s for want in wants if want.moved_s > want.since_s), default=0.0)

    def fetch(self, offer: SnapshotRecord, link: Link) -> bool:
        """Get a snapshot and have the worker load it. True when the worker was asked."""
        self.asked_for = offer.manifest
        if self.view.holds(offer.blob.root):
            self.view.emit(LoadSnapshot(offer.manifest, offer.blob.root, link.round, link.total, offer.state))
            return True
        self._want(offer)
        return False

    def fetch_to_serve(self, offer: SnapshotRecord) -> None:
        """A seed keeps the newest snapshot, and says so when it has it."""
        if offer.manifest in self.stored:
            return
        if self.view.holds(offer.blob.root):
            self.offer_own(seal_record(self.view.config.identity, offer))
        else:
            self._want(offer)

    def _want(self, offer: SnapshotRecord) -> None:
        self.view.want(offer.blob, "snapshot")
        self.view.transfers.wants[offer.blob].holders.update(self.holders(offer.blob.root) - {self.view.own})

    def copy_known_chunks(self, blob: BlobRef) -> None:
        """Take chunks of a wanted snapshot from an older one in the store: a drifted peer fetches what differs."""
        for index, source, at in self.view.transfers.local_copies(blob):
            self.view.emit(CopyChunk(blob, index, ChunkSource(source, at)))
            self.view.transfers.took_chunk(blob, index, self.view.now)

    # -- writing ------------------------------------------------------------------------------------------------

    def maybe_write(self, link: Link) -> None:
        """Have the state after `link` written every few rounds, and after the first manifest of all."""
        every = self.view.spec.rounds.snapshot_every
        before = link.parent.round if link.parent else -1
        if link.round // every != before // every or link.depth == 1:
            self.view.emit(WriteSnapshot(link.digest, link.round))

    def on_ready(self, event: SnapshotReady) -> None:
        """The state lies in the store: tell the others."""
        view = self.view
        view.kinds[event.blob.root] = "snapshot"
        view.transfers.add_complete(event.blob, event.hashes)
        record = SnapshotRecord(view.spec.swarm_id, event.manifest, event.round, event.state, event.blob)
        self.offer_own(seal_record(view.config.identity, record))

    # -- what may go --------------------------------------------------------------------------------------------

    def sweep(self, oldest: int) -> set[bytes]:
        """Forget old offers and snapshots; returns the blob roots that are to stay."""
        newest = sorted(self.stored, key=self._round_of)[-KEPT:]
        self.stored = {m: self.stored[m] for m in newest}
        keep = set(self.stored.values())
        if self.asked_for is not None:
            keep.update(record.blob.root for record in self.claims(self.asked_for))
        self.offers = {d: s for d, s in self.offers.items() if s.record.round >= oldest}
        return keep

    def _round_of(self, manifest: bytes) -> tuple[int, bytes]:
        link = self.view.chain.get(manifest)
        return (link.round if link else -1, manifest)


def states_towards(target: Link, oldest: int) -> dict[bytes, tuple[int, bytes | None]]:
    """(round, state digest) of the manifests on the target's chain; the digest is what the next one says."""
    found: dict[bytes, tuple[int, bytes | None]] = {}
    here: Link | None = target
    state: bytes | None = None
    while here is not None and here.signed is not None and here.round >= oldest:
        found[here.digest] = (here.round, state)
        state = here.signed.record.parent_state
        here = here.parent
    return found
