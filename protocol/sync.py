"""Following the chain: which manifest to fold next, when to go back one, and when to fetch a snapshot instead.

The worker holds two states: `head` and the one before it. A fork of one round is settled by folding its sibling on
the older of the two. A head that can't be reached from either is reached through a snapshot and the manifests after it.
"""

from __future__ import annotations

from tscale.protocol.chain import Link, majority_state
from tscale.protocol.effects import (
    ChunkSource,
    CopyChunk,
    DropBlob,
    Fold,
    KeepRecord,
    LoadSnapshot,
    VerifyBlob,
    WriteSnapshot,
)
from tscale.protocol.events import (
    BlobVerified,
    Folded,
    FoldFailed,
    SnapshotLoaded,
    SnapshotReady,
    SnapshotRefused,
    WorkerReady,
)
from tscale.protocol.records import Manifest, SignedRecord, SnapshotRecord, seal_record
from tscale.protocol.spread import Spread
from tscale.protocol.view import View

REPLAY_MARGIN = 3


class Sync:
    """Where this peer's state stands in the chain, and how it moves on."""

    def __init__(self, view: View, spread: Spread) -> None:
        self.view = view
        self.spread = spread
        self.head: Link | None = None if view.trains else view.chain.genesis
        self.previous: Link | None = None
        self.states: dict[bytes, bytes] = {}
        self.folded: set[bytes] = {view.chain.genesis.digest}
        self.busy: bytes | None = None
        self.verifying: set[bytes] = set()
        self.ready: set[bytes] = set()  # manifests found usable
        self._fetch_at = 0.0
        self._offered = 0
        self._chosen: tuple[object, SnapshotRecord | None] | None = None
        self.drifted = False
        self.offers: dict[bytes, SignedRecord[SnapshotRecord]] = {}
        self.bad_snapshots: set[bytes] = set()
        self.snapshots: dict[bytes, bytes] = {}  # manifest -> blob root of the ones in the store
        self.asked_for: bytes | None = None  # the snapshot manifest being fetched
        self._target: tuple[int, Link] | None = None
        self._best: tuple[tuple[int, int], Link] | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def replay_limit(self) -> int:
        """How many manifests are replayed rather than a snapshot fetched."""
        return self.view.spec.rounds.snapshot_every + REPLAY_MARGIN

    @property
    def oldest_snapshot_round(self) -> int:
        """Snapshots of older rounds are of no use to a joiner."""
        return self.target().round - 4 * self.view.spec.rounds.snapshot_every - 4

    def target(self) -> Link:
        """The head of the best chain, whether its blobs are here or not."""
        version = self.view.chain.version
        if self._target is None or self._target[0] != version:
            self._target = (version, self.view.chain.best())
        return self._target[1]

    def best_usable(self) -> Link:
        """The best manifest that this peer could fold up to now."""
        key = (self.view.chain.version, self.view.usable_version)
        if self._best is None or self._best[0] != key:
            self._best = (key, self.view.chain.best(self.usable))
        return self._best[1]

    def usable(self, link: Link) -> bool:
        """Whether a manifest's blobs are all here (and verified, where this peer folds)."""
        if link.digest in self.folded:
            return True
        if link.signed is None:
            return False
        if link.digest in self.ready:
            return True
        good = self.view.pool.verified if self.view.trains else self.view.transfers.complete
        for part in link.signed.contributions:
            if part.record.blob.root not in good:
                return False
        self.ready.add(link.digest)
        return True

    def joined(self) -> bool:
        """Whether this peer's state is at most one manifest behind the best chain."""
        if self.head is None:
            return False
        target = self.target()
        if target is self.head or target.parent is self.head:
            return True
        return self.head.parent is not None and target.parent is self.head.parent

    # -- worker events ------------------------------------------------------------------------------------------

    def on_worker(self, event: WorkerReady) -> bool:
        """The worker is up. False when the chain doesn't know its state: it has to start over."""
        link = self.view.chain.get(event.manifest)
        self.busy, self.asked_for, self.drifted = None, None, False
        self.verifying.clear()
        self.view.unchecked = True
        self.view.usable_version += 1
        if link is None:
            return False
        previous = self.view.chain.get(event.previous) if event.previous else None
        self.head, self.previous = link, previous
        self.states[link.digest] = event.state
        here: Link | None = link
        while here is not None:
            self.folded.add(here.digest)
            here = here.parent
        return True

    def on_worker_died(self) -> None:
        """No state until the worker is back."""
        self.head = self.previous = self.busy = None

    def on_verified(self, event: BlobVerified) -> None:
        """A contribution's blob is good, or its author is at fault."""
        self.verifying.discard(event.root)
        self.view.usable_version += 1
        if event.ok:
            self.view.pool.verified.add(event.root)
            return
        self.view.pool.refused[event.root] = event.reason
        self.view.notice("contribution_refused", root=event.root.hex()[:12], reason=event.reason)
        for link in list(self.view.chain.links.values()):
            if link.signed and any(p.record.blob.root == event.root for p in link.signed.contributions):
                self.view.chain.mark_invalid(link)

    def on_missing(self, root: bytes) -> None:
        """The store lost a blob: forget it, so that it is fetched again when it is needed."""
        self.verifying.discard(root)
        self.ready.clear()
        self.view.usable_version += 1
        self.view.pool.verified.discard(root)
        self.view.transfers.forget(root)

    def on_folded(self, event: Folded) -> bool:
        """A fold is done. Returns whether the head moved."""
        self.busy = None
        link = self.view.chain.get(event.manifest)
        if link is None or self.head is None:
            return False
        if link.parent is self.head:
            self.previous = self.head
        self.head = link
        self.states[link.digest] = event.state
        self.folded.add(link.digest)
        self.view.usable_version += 1
        self._check_drift(link)
        self._maybe_snapshot(link)
        return True

    def on_fold_failed(self, event: FoldFailed) -> None:
        """A fold could not be done; an invalid manifest is not tried again."""
        self.busy = None
        link = self.view.chain.get(event.manifest)
        self.view.notice("fold_failed", manifest=event.manifest.hex()[:12], reason=event.reason)
        if link is not None and event.invalid:
            self.view.chain.mark_invalid(link)

    # -- drift --------------------------------------------------------------------------------------------------

    def _check_drift(self, link: Link) -> None:
        """Compare this peer's digest with the one most tokens vouch for; a peer that drifted fetches the state."""
        votes = [s for r in self.view.pool.by_round.values() for s in r.values() if s.record.base == link.digest]
        votes = [s for s in votes if s.public != self.view.own]
        majority = majority_state(tuple(votes), link.digest)
        for child in link.children:
            if majority is None and child.signed is not None and not child.invalid:
                majority = child.signed.record.parent_state if child.signed.public != self.view.own else None
        mine = self.states.get(link.digest)
        if majority is None or mine is None or majority == mine:
            return
        if len(votes) == 1 and self.view.own < votes[0].public:
            return  # one against one: the higher key gives way
        self.drifted = True
        self.view.notice("drifted", round=link.round, mine=mine.hex()[:12], majority=majority.hex()[:12])

    def check_head(self) -> None:
        """Look again for drift, when announcements from the head have come in."""
        if self.head is not None and not self.drifted and self.busy is None:
            self._check_drift(self.head)

    # -- manifests ----------------------------------------------------------------------------------------------

    def insert(self, signed: SignedRecord[Manifest], as_floor: bool = False) -> str:
        """Add a manifest to the chain, remember it and fetch its blobs. Returns 'added', 'known' or a reason."""
        link, why = self.view.chain.insert(signed, as_floor)
        if link is None or why == "known":
            return why
        self.view.emit(KeepRecord(signed.digest, signed.bytes))
        for part in signed.contributions:
            self.view.kinds.setdefault(part.record.blob.root, "contribution")
        return why

    def check_blob(self, root: bytes) -> None:
        """A blob is whole: have the worker check it if it is a contribution."""
        signed = self.view.pool.by_root.get(root)
        if signed is None:
            self.view.unchecked = True  # of a manifest ahead, or none of these
        elif self.head is not None and self.view.trains and root not in self.verifying:
            self.verifying.add(root)
            self.view.emit(VerifyBlob(root, signed.record.rung))

    def verify_pending(self) -> None:
        """Have the worker check every contribution that is here and unchecked, of the pool and of manifests ahead."""
        view = self.view
        if self.head is None or not view.trains or not view.unchecked:
            return
        view.unchecked = False
        parts = [s for authors in view.pool.by_round.values() for s in authors.values()]
        here: Link | None = self.target()
        for _ in range(self.replay_limit):
            if here is None or here.signed is None or here.digest in self.folded:
                break
            parts.extend(here.signed.contributions)
            here = here.parent
        for part in parts:
            root = part.record.blob.root
            if root in view.pool.verified or root in view.pool.refused or root in self.verifying:
                continue
            if view.holds(root):
                self.verifying.add(root)
                view.emit(VerifyBlob(root, part.record.rung))

    def plan(self) -> None:
        """Move the state towards the best chain: fold, fetch, or load a snapshot."""
        view = self.view
        target = self.target()
        if not view.trains:
            self.head = target
            self._fetch_recent(target)
            self._fetch_snapshots(target)
            return
        if self.head is None or self.busy is not None:
            return
        if not self.drifted and self._fold_towards(self.best_usable()):
            return
        if target is self.head and not self.drifted:
            self.asked_for = None
            return
        if view.now < self._fetch_at:
            return
        self._fetch_at = view.now + view.pace.flush_s
        steps = self._steps(target)
        if steps is not None and not self.drifted and self._is_cheaper(steps, target) and not self._fetch(steps):
            return
        self._load_snapshot(target)

    def _is_cheaper(self, steps: list[Link], target: Link) -> bool:
        """Whether replaying these manifests takes fewer bytes than the newest snapshot and what follows it."""
        if len(steps) <= 2:
            return True
        offer = self._choose(target)
        if offer is None:
            return len(steps) <= 4 * self.replay_limit
        if len(steps) > self.replay_limit:
            return False  # the blobs of older manifests may be gone everywhere
        after = [link for link in steps if link.round > offer.round]
        if len(after) == len(steps):
            return True
        return self._missing_bytes(steps) <= offer.blob.size_bytes + self._missing_bytes(after)

    def _missing_bytes(self, steps: list[Link]) -> int:
        blobs = [p.record.blob for link in steps if link.signed for p in link.signed.contributions]
        return sum(blob.size_bytes for blob in blobs if not self.view.holds(blob.root))

    def _steps(self, target: Link) -> list[Link] | None:
        """The manifests from the head (or from the state before it) to `target`."""
        for base in (self.head, self.previous):
            if base is not None:
                steps = self.view.chain.path(base, target)
                if steps is not None:
                    return steps
        return None

    def _fold_towards(self, best: Link) -> bool:
        """Ask for the next fold on the way to `best`. True when one was asked for."""
        if best is self.head or self.head is None:
            return False
        steps = self._steps(best)
        if not steps:
            return False
        link = steps[0]
        parent = link.parent
        if parent is None:
            return False
        parts = self.view.chain.parts(link)
        if not all(self.view.holds(p.announcement.record.blob.root) for p in parts):
            return False
        self.busy = link.digest
        roots = tuple((p.announcement.record.blob.root, p.weight) for p in parts)
        self.view.emit(Fold(link.digest, parent.digest, link.round, link.total, roots))
        return True

    def _fetch(self, steps: list[Link]) -> bool:
        """Want the blobs of these manifests. True when one seems lost: long wanted, and nobody has it."""
        view, lost = self.view, False
        for link in steps:
            for part in link.signed.contributions if link.signed else ():
                root = part.record.blob.root
                if view.holds(root):
                    continue
                want = view.transfers.wants.get(root)
                if want is None:
                    view.want(part.record.blob, "contribution", part.public)
                    want = view.transfers.wants[root]
                waited_s = view.now - want.since_s
                lost = lost or waited_s > view.spec.rounds.length_s
        return lost

    def _fetch_recent(self, target: Link) -> None:
        """A seed keeps the blobs of the last rounds, to serve them."""
        here: Link | None = target
        for _ in range(self.replay_limit):
            if here is None or here.signed is None:
                return
            self._fetch([here])
            here = here.parent

    # -- snapshots ----------------------------------------------------------------------------------------------

    def offer(self, signed: SignedRecord[SnapshotRecord]) -> None:
        """A peer says it serves the state after a manifest."""
        self.offers[signed.digest] = signed
        self._offered += 1
        want = self.view.transfers.wants.get(signed.record.blob.root)
        if want is not None:
            want.holders.add(signed.public)

    def _choose(self, target: Link) -> SnapshotRecord | None:
        """The newest snapshot on the target's chain that most offers agree on and that has not failed."""
        key = (self.view.chain.version, len(self.offers), len(self.bad_snapshots), target.digest, self._offered)
        if self._chosen is None or self._chosen[0] != key:
            self._chosen = (key, self._choose_anew(target))
        return self._chosen[1]

    def _choose_anew(self, target: Link) -> SnapshotRecord | None:
        states = self._states_towards(target)
        counts: dict[bytes, list[SnapshotRecord]] = {}
        for signed in self.offers.values():
            r = signed.record
            known = states.get(r.manifest)
            if known is None or known[0] != r.round or r.blob.root in self.bad_snapshots:
                continue
            if signed.public == self.view.own or r.blob.size_bytes > self.view.spec.caps.max_snapshot_bytes:
                continue
            if known[1] not in (None, r.state):
                continue
            counts.setdefault(r.blob.root, []).append(r)
        if not counts:
            return None
        best = max(counts.values(), key=lambda group: (group[0].round, len(group), group[0].blob.root))
        return best[0]

    def _states_towards(self, target: Link) -> dict[bytes, tuple[int, bytes | None]]:
        """(round, state digest) of the manifests on the target's chain; the digest is what the next one says."""
        found: dict[bytes, tuple[int, bytes | None]] = {}
        here: Link | None = target
        state: bytes | None = None
        while here is not None and here.signed is not None and here.round >= self.oldest_snapshot_round:
            found[here.digest] = (here.round, state)
            state = here.signed.record.parent_state
            here = here.parent
        return found

    def _known_state(self, link: Link) -> bytes | None:
        """The digest of the state after `link`, as the manifest after it on the best chain says."""
        steps = self.view.chain.path(link, self.target())
        if steps and steps[0].signed is not None:
            return steps[0].signed.record.parent_state
        return None

    def _load_snapshot(self, target: Link) -> None:
        offer = self._offer_under_way(target) or self._choose(target)
        if offer is None:
            return
        link = self.view.chain.links[offer.manifest]
        if self.head is not None and not self.drifted:
            gain = self.view.chain.path(self.head, link)
            if gain is not None and len(gain) == 0:
                return
        self.asked_for = offer.manifest
        self._forget_wants_before(offer.round)
        if self.view.holds(offer.blob.root):
            self.busy = offer.manifest
            self.view.emit(LoadSnapshot(offer.manifest, offer.blob.root, link.round, link.total, offer.state))
            return
        self.view.want(offer.blob, "snapshot")
        want = self.view.transfers.wants[offer.blob.root]
        want.holders.update(s.public for s in self.offers.values() if s.record.blob.root == offer.blob.root)

    def _offer_under_way(self, target: Link) -> SnapshotRecord | None:
        """The snapshot that is being fetched, while it moves and is still on the target's chain: no change of horses."""
        if self.asked_for is None or self.asked_for not in self._states_towards(target):
            return None
        for signed in self.offers.values():
            want = self.view.transfers.wants.get(signed.record.blob.root)
            if signed.record.manifest == self.asked_for and signed.record.blob.root not in self.bad_snapshots:
                moving = want is not None and self.view.now - want.moved_s < 4.0 * self.view.pace.timeout_s
                if moving or self.view.holds(signed.record.blob.root):
                    return signed.record
        return None

    def _forget_wants_before(self, round_: int) -> None:
        """Contributions that the snapshot makes needless must not take its place on the line."""
        needless = [
            part.record.blob.root
            for link in self.view.chain.links.values()
            if link.signed is not None and link.round <= round_
            for part in link.signed.contributions
        ]
        for root in needless:
            if root in self.view.transfers.wants:
                self.view.transfers.forget(root)

    def on_snapshot_loaded(self, event: SnapshotLoaded) -> None:
        """The worker took over a downloaded state: believe it only if its digest is the one the chain vouches for."""
        self.busy = self.asked_for = None
        link = self.view.chain.get(event.manifest)
        claims = [s.record for s in self.offers.values() if s.record.manifest == event.manifest]
        known = self._known_state(link) if link is not None else None
        good = event.state == known if known is not None else any(c.state == event.state for c in claims)
        if link is None or not good:
            self.bad_snapshots.update(c.blob.root for c in claims)
            self.view.notice("snapshot_wrong", manifest=event.manifest.hex()[:12])
            self.drifted = True  # the worker holds a state nobody vouches for: it must not contribute
            return
        self.drifted = False
        self.view.usable_version += 1
        self.head, self.previous = link, None
        self.states[link.digest] = event.state
        here: Link | None = link
        while here is not None:
            self.folded.add(here.digest)
            here = here.parent

    def on_snapshot_refused(self, event: SnapshotRefused) -> None:
        """A downloaded state did not fit."""
        self.busy = self.asked_for = None
        self.bad_snapshots.add(event.root)
        self.view.notice("snapshot_refused", manifest=event.manifest.hex()[:12], reason=event.reason)

    def _maybe_snapshot(self, link: Link) -> None:
        every = self.view.spec.rounds.snapshot_every
        before = link.parent.round if link.parent else -1
        if link.round // every != before // every and not self.drifted:
            self.view.emit(WriteSnapshot(link.digest, link.round))

    def on_snapshot_ready(self, event: SnapshotReady) -> None:
        """The state lies in the store: tell the others."""
        view = self.view
        view.kinds[event.blob.root] = "snapshot"
        view.transfers.add_complete(event.blob, event.hashes)
        record = SnapshotRecord(view.spec.swarm_id, event.manifest, event.round, event.state, event.blob)
        signed = seal_record(view.config.identity, record)
        self._offer_own(signed)

    def _offer_own(self, signed: SignedRecord[SnapshotRecord]) -> None:
        self.snapshots[signed.record.manifest] = signed.record.blob.root
        self.offers[signed.digest] = signed
        self.spread.add_own(signed)
        self.view.emit(KeepRecord(signed.digest, signed.bytes))

    def restore_offer(self, signed: SignedRecord[SnapshotRecord]) -> None:
        """An own snapshot record from before a restart: offer it again if the blob is still here."""
        if self.view.holds(signed.record.blob.root) and signed.public == self.view.own:
            self.view.kinds[signed.record.blob.root] = "snapshot"
            self._offer_own(signed)

    def _fetch_snapshots(self, target: Link) -> None:
        """A seed keeps the newest snapshot, to serve it, and says so when it has it."""
        offer = self._choose(target)
        if offer is None or offer.manifest in self.snapshots:
            return
        if not self.view.holds(offer.blob.root):
            self.view.want(offer.blob, "snapshot")
            want = self.view.transfers.wants[offer.blob.root]
            want.holders.update(s.public for s in self.offers.values() if s.record.blob.root == offer.blob.root)
            return
        self._offer_own(seal_record(self.view.config.identity, offer))

    # -- what may go --------------------------------------------------------------------------------------------

    def copy_known_chunks(self, root: bytes) -> None:
        """Take chunks of a wanted snapshot from an older one in the store: a drifted peer fetches what differs."""
        want = self.view.transfers.wants.get(root)
        if want is None:
            return
        for index, source, at in self.view.transfers.local_copies(root):
            self.view.emit(CopyChunk(want.blob, index, ChunkSource(source, at)))
            self.view.transfers.took_chunk(root, index)

    def sweep(self) -> None:
        """Drop blobs and offers that no joiner will ask for."""
        view = self.view
        keep: set[bytes] = set()
        here: Link | None = self.target()
        for _ in range(2 * self.replay_limit):
            if here is None or here.signed is None:
                break
            keep.update(p.record.blob.root for p in here.signed.contributions)
            here = here.parent
        for round_ in view.pool.by_round.values():
            keep.update(s.record.blob.root for s in round_.values())
        newest = sorted(self.snapshots, key=lambda m: self._round_of(m))[-2:]
        keep.update(self.snapshots[m] for m in newest)
        self.snapshots = {m: self.snapshots[m] for m in newest}
        if self.asked_for is not None:
            keep.update(s.record.blob.root for s in self.offers.values() if s.record.manifest == self.asked_for)
        for root, kind in list(view.kinds.items()):
            if kind != "dataset" and root not in keep:
                view.kinds.pop(root)
                view.pool.verified.discard(root)
                if view.holds(root) or root in view.transfers.wants:
                    view.transfers.forget(root)
                    view.emit(DropBlob(root))
        self.offers = {d: s for d, s in self.offers.items() if s.record.round >= self.oldest_snapshot_round}
        if self.head is not None and view.trains:
            for gone in view.chain.prune(self.head):
                self.folded.discard(gone)
                self.states.pop(gone, None)

    def _round_of(self, manifest: bytes) -> int:
        link = self.view.chain.get(manifest)
        return link.round if link else -1
