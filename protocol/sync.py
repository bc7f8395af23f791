"""Following the chain: which manifest to fold next, when to go back one, and when to load a snapshot instead.

The worker holds two states: `head` and the one before it. A fork of one round is settled by folding its sibling on
the older of the two. A head that can't be reached from either is reached through a snapshot and the manifests after it.

`target` is the head of the best chain this peer knows of, whether it could fold it or not; `best_usable` the best one
whose blobs are all here. A chain that is better but that nobody has the blobs or a snapshot of is given up for a
while: a swarm must not stand still for a chain that can't be had.
"""

from __future__ import annotations

from tscale.protocol.chain import Link, majority_state
from tscale.protocol.effects import DropBlob, Fold, KeepRecord, VerifyBlob
from tscale.protocol.events import (
    BlobVerified,
    Folded,
    FoldFailed,
    SnapshotLoaded,
    SnapshotReady,
    SnapshotRefused,
    WorkerReady,
)
from tscale.protocol.records import Announcement, Manifest, SignedRecord, SnapshotRecord
from tscale.protocol.snapshots import Snapshots
from tscale.protocol.spread import Spread
from tscale.protocol.usable import Usable
from tscale.protocol.view import View

REPLAY_MARGIN = 3
CHASE_ROUNDS = 2.0  # how long a better chain is waited for that brings nothing
AVOID_ROUNDS = 10.0
MAX_FOLD_PAUSE_S = 30.0


class Sync:
    """Where this peer's state stands in the chain, and how it moves on."""

    def __init__(self, view: View, spread: Spread) -> None:
        self.view = view
        self.spread = spread
        self.snapshots = Snapshots(view, spread)
        self.usables = Usable(view)
        self.head: Link | None = None if view.trains else view.chain.genesis
        self.previous: Link | None = None
        self.states: dict[bytes, bytes] = {}
        self.busy: bytes | None = None
        self.drifted = False
        self.verifying: set[bytes] = set()
        self._fetch_at = 0.0
        self._fold_at = 0.0
        self._fold_failures = 0
        self._chase: tuple[object, float] = (None, 0.0)
        self._avoid: dict[bytes, float] = {}
        self._target: tuple[int, Link] | None = None
        self._best: tuple[tuple[int, int], Link] | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def offers(self) -> dict[bytes, SignedRecord[SnapshotRecord]]:
        """Snapshot records by digest."""
        return self.snapshots.offers

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
            avoid = self._avoid
            best = self.view.chain.best((lambda link: link.digest not in avoid) if avoid else None)
            self._target = (version, best)
        return self._target[1]

    def best_usable(self) -> Link:
        """The best manifest that this peer could fold up to now."""
        key = (self.view.chain.version, self.usables.version)
        if self._best is None or self._best[0] != key:
            self._best = (key, self.view.chain.best(self.usables))
        return self._best[1]

    def usable(self, link: Link) -> bool:
        """Whether a manifest's blobs are all here and verified, or it is folded already."""
        return self.usables(link)

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
        self.busy, self.snapshots.asked_for, self.drifted = None, None, False
        self.verifying.clear()
        self.view.unchecked = True
        if link is None:
            return False
        self._stand_at(link, event.state)
        self.previous = self.view.chain.get(event.previous) if event.previous else None
        return True

    def _stand_at(self, link: Link, state: bytes) -> None:
        self.head = link
        self.states[link.digest] = state
        self.usables.folded_up_to(link)

    def on_worker_died(self) -> None:
        """No state until the worker is back."""
        self.head = self.previous = self.busy = None

    def on_verified(self, event: BlobVerified) -> None:
        """A contribution's blob is good, or its author is at fault."""
        self.verifying.discard(event.root)
        if event.ok:
            self.view.pool.verify(event.root)
            self.usables.blob_came(event.root)
            return
        self.view.pool.refused[event.root] = event.reason
        self.view.notice("contribution_refused", root=event.root.hex()[:12], reason=event.reason)
        for link in list(self.view.chain.links.values()):
            if link.signed and any(p.record.blob.root == event.root for p in link.signed.contributions):
                self.view.chain.mark_invalid(link)

    def on_missing(self, root: bytes) -> None:
        """The store lost a blob: forget it, so that it is fetched again when it is needed."""
        self.verifying.discard(root)
        self.view.pool.verified.discard(root)
        self.view.transfers.forget(root)
        self.usables.rebuild()

    def on_folded(self, event: Folded) -> bool:
        """A fold is done. Returns whether the head moved."""
        self.busy, self._fold_failures = None, 0
        link = self.view.chain.get(event.manifest)
        if link is None or self.head is None:
            return False
        if link.parent is self.head:
            self.previous = self.head
        self._stand_at(link, event.state)
        self._check_drift(link)
        if not self.drifted:
            self.snapshots.maybe_write(link)
        return True

    def on_fold_failed(self, event: FoldFailed) -> None:
        """A fold could not be done; an invalid manifest is not tried again, any other one after a growing pause."""
        self.busy = None
        link = self.view.chain.get(event.manifest)
        self.view.notice("fold_failed", manifest=event.manifest.hex()[:12], reason=event.reason)
        if link is not None and event.invalid:
            self.view.chain.mark_invalid(link)
            return
        self._fold_failures = min(self._fold_failures + 1, 10)
        self._fold_at = self.view.now + min(self.view.pace.flush_s * 2**self._fold_failures, MAX_FOLD_PAUSE_S)

    # -- drift --------------------------------------------------------------------------------------------------

    def _check_drift(self, link: Link) -> None:
        """Compare this peer's digest with the one most tokens vouch for; a peer that drifted fetches the state."""
        votes = [s for s in self.view.pool.with_base(link.digest) if s.public != self.view.own]
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

    def check_head(self, signed: SignedRecord[Announcement] | None = None) -> None:
        """Look again for drift, when an announcement from the head has come in that gives it another state."""
        head = self.head
        if head is None or self.drifted or self.busy is not None:
            return
        if signed is not None:
            record = signed.record
            if record.base != head.digest or record.base_state == self.states.get(head.digest):
                return
        self._check_drift(head)

    # -- manifests ----------------------------------------------------------------------------------------------

    def insert(self, signed: SignedRecord[Manifest], as_floor: bool = False) -> str:
        """Add a manifest to the chain, remember it and fetch its blobs. Returns 'added', 'known' or a reason."""
        link, why = self.view.chain.insert(signed, as_floor)
        if link is None or why == "known":
            return why
        link.seen_s = self.view.now
        self.usables.add(link)
        self.view.emit(KeepRecord(signed.digest, signed.bytes))
        for part in signed.contributions:
            self.view.kinds.setdefault(part.record.blob.root, "contribution")
        return why

    def check_blob(self, root: bytes) -> None:
        """A blob is whole: have the worker check it if it is a contribution."""
        signed = self.view.pool.by_root.get(root)
        if signed is None:
            self.view.unchecked = self.view.dirty = True  # of a manifest ahead, a snapshot, or none of these
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
        for link in self._recent(self.target()):
            if link.digest in self.usables.folded:
                break
            parts.extend(link.signed.contributions if link.signed else ())
        for part in parts:
            root = part.record.blob.root
            if root in view.pool.verified or root in view.pool.refused or root in self.verifying:
                continue
            if view.holds(root):
                self.verifying.add(root)
                view.emit(VerifyBlob(root, part.record.rung))

    def _recent(self, head: Link, count: int = 0) -> list[Link]:
        """The last links of a chain, newest first: `count`, or as many as are replayed."""
        found: list[Link] = []
        here: Link | None = head
        while here is not None and here.signed is not None and len(found) < (count or self.replay_limit):
            found.append(here)
            here = here.parent
        return found

    # -- moving -------------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Move the state towards the best chain: fold, fetch, or load a snapshot."""
        view = self.view
        if not view.trains:
            self._serve_only()
            return
        if self.head is None or self.busy is not None:
            return
        if not self.drifted and view.now >= self._fold_at and self._fold_towards(self.best_usable()):
            return
        target = self.target()
        if target is self.head and not self.drifted:
            self.snapshots.asked_for = None
            return
        if view.now < self._fetch_at:
            return
        self._fetch_at = view.now + view.pace.flush_s
        steps = self._steps(target)
        self._watch_chase(target, steps)
        if steps is not None and not self.drifted and self._is_cheaper(steps, target) and not self._fetch(steps):
            return
        self._load_snapshot(target)

    def _serve_only(self) -> None:
        """A seed keeps the blobs of the last rounds and the newest snapshot, to serve them."""
        target = self.head = self.target()
        if self.view.now < self._fetch_at:
            return
        self._fetch_at = self.view.now + self.view.pace.flush_s
        self._fetch(self._recent(target))
        offer = self.snapshots.choose(target, self.oldest_snapshot_round, False)
        if offer is not None:
            self.snapshots.fetch_to_serve(offer)

    def _is_cheaper(self, steps: list[Link], target: Link) -> bool:
        """Whether replaying these manifests takes fewer bytes than the newest snapshot and what follows it."""
        if len(steps) <= 2:
            return True
        offer = self.snapshots.choose(target, self.oldest_snapshot_round, self.drifted)
        if offer is None:
            return len(steps) <= 4 * self.replay_limit
        if len(steps) > self.replay_limit:
            return False  # the blobs of older manifests may be gone everywhere
        after = [link for link in steps if link.round > offer.round]
        if len(after) == len(steps):
            return True
        size_bytes = 0 if self.view.holds(offer.blob.root) else offer.blob.size_bytes
        return self._missing_bytes(steps) <= size_bytes + self._missing_bytes(after)

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
                lost = lost or view.now - want.since_s > view.spec.rounds.length_s
        return lost

    # -- better chains that can't be had --------------------------------------------------------------------------

    def _watch_chase(self, target: Link, steps: list[Link] | None) -> None:
        """Give up, for a while, a better chain that has brought nothing for some rounds."""
        view, head = self.view, self.head
        if self.drifted or head is None:
            return
        here = target
        while here.parent is not None and view.chain.path(here.parent, head) is None:
            here = here.parent
        missing = sum(
            not view.holds(p.record.blob.root) for s in steps or () if s.signed for p in s.signed.contributions
        )
        moved = max((w.moved_s for w in view.transfers.wants.values() if w.priority == 0), default=0.0)
        seen = (here.digest, head.digest, missing, moved, len(self.snapshots.offers))
        if self._chase[0] != seen:
            self._chase = (seen, view.now)
        elif view.now - self._chase[1] > CHASE_ROUNDS * view.spec.rounds.length_s and here is not head:
            self._avoid[here.digest] = view.now + AVOID_ROUNDS * view.spec.rounds.length_s
            view.chain.version += 1
            view.notice("chain_given_up", round=here.round, reason="nobody has its blobs or a snapshot of it")

    def reconsider(self) -> None:
        """A snapshot was offered: chains that were given up may be had now."""
        if self._avoid:
            self._avoid.clear()
            self.view.chain.version += 1

    # -- snapshots ----------------------------------------------------------------------------------------------

    def offer(self, signed: SignedRecord[SnapshotRecord]) -> None:
        """A peer says it serves the state after a manifest."""
        self.snapshots.offer(signed)
        self.reconsider()

    def restore_offer(self, signed: SignedRecord[SnapshotRecord]) -> None:
        """An own snapshot record from before a restart."""
        self.snapshots.restore(signed)

    def copy_known_chunks(self, root: bytes) -> None:
        """A wanted blob's chunk hashes are known: some chunks may lie in the store already."""
        self.snapshots.copy_known_chunks(root)

    def _load_snapshot(self, target: Link) -> None:
        oldest = self.oldest_snapshot_round
        offer = self.snapshots.under_way(target, oldest) or self.snapshots.choose(target, oldest, self.drifted)
        if offer is None or self.head is None:
            return
        link, path = self.view.chain.links[offer.manifest], self.view.chain.path
        if not self.drifted and path(self.head, target) is not None and path(link, self.head) is not None:
            return  # the state here is as new, and on the right chain
        self._forget_wants_before(offer.round)
        if self.snapshots.fetch(offer, link):
            self.busy = offer.manifest

    def _forget_wants_before(self, round_: int) -> None:
        """Contributions that the snapshot makes needless must not take its place on the line."""
        wants = self.view.transfers.wants
        for link in self.view.chain.links.values():
            if wants and link.signed is not None and link.round <= round_:
                for part in link.signed.contributions:
                    if part.record.blob.root in wants:
                        self.view.transfers.forget(part.record.blob.root)

    def on_snapshot_loaded(self, event: SnapshotLoaded) -> None:
        """The worker took over a downloaded state: believe it only if its digest is the one the chain vouches for."""
        self.busy = self.snapshots.asked_for = None
        link = self.view.chain.get(event.manifest)
        claims = self.snapshots.claims(event.manifest)
        known = self._known_state(link) if link is not None else None
        good = event.state == known if known is not None else any(c.state == event.state for c in claims)
        if link is None or not good:
            self.snapshots.bad.update(c.blob.root for c in claims)
            self.view.notice("snapshot_wrong", manifest=event.manifest.hex()[:12])
            self.drifted = True  # the worker holds a state nobody vouches for: it must not contribute
            return
        self.drifted = False
        self._stand_at(link, event.state)
        self.previous = None
        self.view.unchecked = True

    def _known_state(self, link: Link) -> bytes | None:
        """The digest of the state after `link`, as the manifest after it on the best chain says."""
        steps = self.view.chain.path(link, self.target())
        if steps and steps[0].signed is not None:
            return steps[0].signed.record.parent_state
        return None

    def on_snapshot_refused(self, event: SnapshotRefused) -> None:
        """A downloaded state did not fit."""
        self.busy = self.snapshots.asked_for = None
        self.snapshots.bad.add(event.root)
        self.view.notice("snapshot_refused", manifest=event.manifest.hex()[:12], reason=event.reason)

    def on_snapshot_ready(self, event: SnapshotReady) -> None:
        """The state lies in the store."""
        self.snapshots.on_ready(event)

    # -- what may go --------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Drop blobs and offers that no joiner will ask for."""
        view = self.view
        keep = self.snapshots.sweep(self.oldest_snapshot_round)
        for link in self._recent(self.target()):
            keep.update(p.record.blob.root for p in (link.signed.contributions if link.signed else ()))
        for authors in view.pool.by_round.values():
            keep.update(s.record.blob.root for s in authors.values())
        for root, kind in list(view.kinds.items()):
            if kind != "dataset" and root not in keep:
                view.kinds.pop(root)
                view.pool.verified.discard(root)
                if view.holds(root) or root in view.transfers.wants:
                    view.transfers.forget(root)
                    view.emit(DropBlob(root))
        if any(until < view.now for until in self._avoid.values()):
            self._avoid = {digest: until for digest, until in self._avoid.items() if until >= view.now}
            view.chain.version += 1
        if self.head is not None and view.trains:
            for gone in view.chain.prune(self.head):
                self.usables.folded.discard(gone)
                self.states.pop(gone, None)
        self.usables.rebuild()
