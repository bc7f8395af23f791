"""Following the chain: which manifest to fold next, when to go back one, and when to load a snapshot instead.

The worker holds two states: `head` and the one before it. A fork of one round is settled by folding its sibling on
the older of the two. A head that can't be reached from either is reached through a snapshot and the manifests after it.

`target` is the head of the best chain this peer knows of, whether it could fold it or not; `best_usable` the best one
whose blobs are all here.
"""

from __future__ import annotations

from tscale.protocol.chain import Link
from tscale.protocol.chase import Chase
from tscale.protocol.checks import Checks
from tscale.protocol.drift import find_majority
from tscale.protocol.effects import DropBlob, Fold, KeepRecord
from tscale.protocol.events import (
    Folded,
    FoldFailed,
    SnapshotLoaded,
    SnapshotRefused,
    WorkerReady,
)
from tscale.protocol.records import Announcement, Manifest, SignedRecord, SnapshotRecord
from tscale.protocol.snapshots import Snapshots
from tscale.protocol.spread import Spread
from tscale.protocol.usable import Usable
from tscale.protocol.view import View

REPLAY_MARGIN = 3
MAX_FOLD_PAUSE_S = 30.0


class Sync:
    """Where this peer's state stands in the chain, and how it moves on."""

    def __init__(self, view: View, spread: Spread) -> None:
        self.view = view
        self.spread = spread
        self.snapshots = Snapshots(view, spread)
        self.usables = Usable(view)
        self.checks = Checks(view, self.usables)
        self.chase = Chase(view)
        self.head: Link | None = None if view.trains else view.chain.genesis
        self.previous: Link | None = None
        self.states: dict[bytes, bytes] = {}
        self.busy: bytes | None = None
        self.drifted = False
        self._fetch_at = 0.0
        self._fold_at = 0.0
        self._fold_failures = 0
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
            self._target = (version, self.chase.best())
        return self._target[1]

    def best_usable(self) -> Link:
        """The best manifest that this peer could fold up to now."""
        key = (self.view.chain.version, self.usables.version)
        if self._best is None or self._best[0] != key:
            self._best = (key, self.view.chain.best(self.usables))
        return self._best[1]

    def joined(self) -> bool:
        """Whether this peer is in step: at most one manifest behind the best chain, or where most of the swarm is."""
        if self.head is None:
            return False
        target = self.target()
        if target is self.head or target.parent is self.head:
            return True
        return (self.head.parent is not None and target.parent is self.head.parent) or self.is_followed()

    def is_followed(self) -> bool:
        """Whether most living authors trained last from the head or from the manifest before it.

        A better chain that only few peers follow is no reason to stand still: anybody can claim one.
        """
        head, view = self.head, self.view
        if head is None:
            return False
        living = view.members.alive_trainers(view.swarm_now) | {view.own}
        bases = {head.digest, head.parent.digest if head.parent else head.digest}
        votes: dict[bytes, bool] = {}
        closed = view.times.round_at(view.swarm_now)
        for round_ in sorted(r for r in view.pool.by_round if r < closed):
            votes.update((a, s.record.base in bases) for a, s in view.pool.of_round(round_).items() if a in living)
        return 2 * sum(votes.values()) > len(votes)

    # -- worker events ------------------------------------------------------------------------------------------

    def on_worker(self, event: WorkerReady) -> bool:
        """The worker is up. False when the chain doesn't know its state: it has to start over."""
        link = self.view.chain.get(event.manifest)
        self.busy, self.snapshots.asked_for, self.drifted = None, None, False
        if link is None:
            return False
        self.checks.reset(able=True)
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
        self.checks.reset(able=False)

    def on_missing(self, root: bytes) -> None:
        """The store lost a blob."""
        self.checks.on_missing(root)

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
        majority, mine = find_majority(self.view, link), self.states.get(link.digest)
        if majority is None or mine is None or majority == mine:
            return
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

    def verify_pending(self) -> None:
        """Have the worker check what is here and unchecked, as far as it may be folded soon."""
        if self.view.unchecked and self.checks.able:
            ahead = [*self._recent(self.target()), *self._next()]
            self.checks.ask_pending([link for link in ahead if link.digest not in self.usables.folded])

    def _next(self) -> list[Link]:
        """The manifests on top of the head: folded next, while a better chain can't be had."""
        return [link for link in self.head.children if not link.invalid] if self.head is not None else []

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
        self._fetch(self._next())
        steps = self._steps(target)
        if not self.drifted:
            self.chase.watch(target, self.head, steps, {s.record.manifest for s in self.offers.values()})
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
        blobs = (p.record.blob for link in steps if link.signed for p in link.signed.contributions)
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
                want = view.transfers.wants.get(part.record.blob)
                if want is None:
                    view.want(part.record.blob, "contribution", part.public)
                    want = view.transfers.wants[part.record.blob]
                lost = lost or view.now - want.since_s > view.spec.rounds.length_s
        return lost

    # -- snapshots ----------------------------------------------------------------------------------------------

    def offer(self, signed: SignedRecord[SnapshotRecord]) -> None:
        """A peer says it serves the state after a manifest."""
        self.snapshots.offer(signed)
        self.chase.reconsider(signed.record.manifest)

    def _load_snapshot(self, target: Link) -> None:
        oldest = self.oldest_snapshot_round
        offer = self.snapshots.under_way(target, oldest) or self.snapshots.choose(target, oldest, self.drifted)
        if offer is None or self.head is None:
            return
        link, path = self.view.chain.links[offer.manifest], self.view.chain.path
        if not self.drifted and path(link, self.head) is not None:
            # behind this peer: of use only to go back to where another branch began, once that can be replayed
            after = path(link, target)
            if path(self.head, target) is not None or after is None or self._missing_bytes(after):
                self._fetch(after or [])
                return
        self._forget_wants_before(offer.round)
        if self.snapshots.fetch(offer, link):
            self.busy = offer.manifest

    def _forget_wants_before(self, round_: int) -> None:
        """Contributions that the snapshot makes needless must not take its place on the line."""
        wants = self.view.transfers.wants
        for link in self.view.chain.links.values():
            if wants and link.signed is not None and link.round <= round_:
                for part in link.signed.contributions:
                    if part.record.blob in wants:
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
        return steps[0].signed.record.parent_state if steps and steps[0].signed is not None else None

    def on_snapshot_refused(self, event: SnapshotRefused) -> None:
        """A downloaded state did not fit."""
        self.busy = self.snapshots.asked_for = None
        self.snapshots.bad.add(event.root)
        self.view.notice("snapshot_refused", manifest=event.manifest.hex()[:12], reason=event.reason)

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
                view.pool.forget_blob(root)
                if view.holds(root) or view.transfers.is_wanted(root):
                    view.transfers.forget(root)
                    view.emit(DropBlob(root))
        self.chase.sweep()
        if self.head is not None and view.trains:
            for gone in view.chain.prune(self.head):
                self.usables.folded.discard(gone)
                self.states.pop(gone, None)
        self.usables.rebuild()
