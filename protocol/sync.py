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
from tscale.protocol.drift import Drift
from tscale.protocol.effects import Fold, KeepRecord, RestartFromGenesis
from tscale.protocol.events import (
    Folded,
    FoldFailed,
    SnapshotLoaded,
    SnapshotRefused,
    WorkerReady,
)
from tscale.protocol.following import Following
from tscale.protocol.keeping import Keeping, list_ahead, list_recent
from tscale.protocol.records import Announcement, Manifest, SignedRecord, SnapshotRecord
from tscale.protocol.snapshots import Snapshots
from tscale.protocol.spread import Spread
from tscale.protocol.usable import Usable
from tscale.protocol.view import View
from tscale.protocol.wanting import count_missing_bytes, fetch_parts, forget_wants_before, is_replay_cheaper

REPLAY_MARGIN = 3
SIBLING_WAIT = 1.0 / 6.0  # of a round
MAX_FOLD_PAUSE_S = 30.0


class Sync:
    """Where this peer's state stands in the chain, and how it moves on."""

    def __init__(self, view: View, spread: Spread) -> None:
        self.view = view
        self.spread = spread
        self.snapshots = Snapshots(view, spread)
        self.usables = Usable(view)
        self.checks = Checks(view, self.usables)
        self.keeping = Keeping(view, spread, self.snapshots, self.usables)
        self.following = Following(view)
        self.chase = Chase(view, self.following, self.snapshots)
        self.drift = Drift(view)
        self.head: Link | None = None if view.trains else view.chain.genesis
        self.previous: Link | None = None
        self.followed: Link | None = None  # the last link of this peer's chain: a restarted worker may be behind it
        self.states: dict[bytes, bytes] = {}
        self.busy: bytes | None = None
        self._fetch_at = 0.0
        self._fold_at = 0.0
        self._fold_failures = 0
        self._target: tuple[object, Link] | None = None
        self._best: tuple[tuple[int, int], Link] | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def offers(self) -> dict[bytes, SignedRecord[SnapshotRecord]]:
        """Snapshot records by digest."""
        return self.snapshots.offers

    @property
    def drifted(self) -> bool:
        """Whether this peer believes that its state is not what it should be."""
        return self.drift.drifted

    @property
    def replay_limit(self) -> int:
        """How many manifests are replayed rather than a snapshot fetched."""
        return self.view.spec.rounds.snapshot_every + REPLAY_MARGIN

    @property
    def oldest_snapshot_round(self) -> int:
        """Snapshots of older rounds are of no use to a joiner. After a pause, that many manifests are many rounds."""
        target, count = self.target(), 4 * self.view.spec.rounds.snapshot_every + 4
        return min([target.round - count, *(link.round for link in list_recent(target, count)[-1:])])

    def target(self) -> Link:
        """The head of the best chain, whether its blobs are here or not."""
        when = (int(self.view.now / self.view.pace.flush_s), self.usables.version)
        key = (self.view.chain.version, when if self.chase.goes_by_authors else None)
        if self._target is None or self._target[0] != key:
            self._target = (key, self.chase.best(self.usables))
        return self._target[1]

    def best_usable(self) -> Link:
        """The best manifest that this peer could fold up to now."""
        key = (self.view.chain.version, self.usables.version)
        if self._best is None or self._best[0] != key:
            self._best = (key, self.view.chain.best(self.usables))
        return self._best[1]

    def joined(self) -> bool:
        """Whether this peer is in step: at most one manifest behind the best chain, or where most of the swarm is.

        A better chain that nobody alive follows is no reason to stand still either: anybody can claim one.
        """
        head, target = self.head, self.target()
        if head is None:
            return False
        if target in (head, head.parent) or target.parent is head:
            return True
        if (head.parent is not None and target.parent is head.parent) or self.following.is_followed(head):
            return True
        is_recent = self.view.times.round_at(self.view.swarm_now) - head.round <= self.replay_limit
        was_in_step = head.signed is not None and (is_recent or self.chase.is_doubting)
        return was_in_step and not self.following.are_others_elsewhere(head)

    # -- worker events ------------------------------------------------------------------------------------------

    def on_worker(self, event: WorkerReady) -> bool:
        """The worker is up. False when the chain doesn't know its state: it has to start over."""
        link = self.view.chain.get(event.manifest)
        self.busy, self.snapshots.asked_for = None, None
        self.drift.reset()
        if link is None:
            return False
        self.checks.reset(able=True)
        self._stand_at(link, event.state)
        self.previous = self.view.chain.get(event.previous) if event.previous else None
        return True

    def _stand_at(self, link: Link, state: bytes) -> None:
        extends = link.parent is not None and link.parent is self.head
        self.head = link
        self.states[link.digest] = state
        if self.followed is None or self.view.chain.path(link, self.followed) is None:
            self.followed = link
        if not extends:  # what was folded beside or after it has to be folded again if it is to be reached
            self.usables.folded = {self.view.chain.genesis.digest}
        self.usables.folded_up_to(link)
        if not extends:
            self.usables.rebuild()

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
        before = self.states.get(link.digest) if link is self.head else None
        self._stand_at(link, event.state)
        if self.drifted:
            self.drift.folded_again(link, before, event.state)
            return True
        self.drift.check(link, event.state)
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
        if self.drifted and link is not None and link is self.head:
            self.drift.could_not_fold(link, self.states.get(link.digest))
        self._fold_failures = min(self._fold_failures + 1, 10)
        self._fold_at = self.view.now + min(self.view.pace.flush_s * 2**self._fold_failures, MAX_FOLD_PAUSE_S)

    # -- drift --------------------------------------------------------------------------------------------------

    def check_head(self, signed: SignedRecord[Announcement] | None = None) -> None:
        """Look again for drift, when an announcement from the head has come in that gives it another state."""
        head = self.head
        if head is None or self.drifted or self.busy is not None:
            return
        if signed is not None:
            record = signed.record
            if record.base != head.digest or record.base_state == self.states.get(head.digest):
                return
        self.drift.check(head, self.states.get(head.digest))

    def _repair(self, head: Link) -> bool:
        """Look again whether the others are right. True when the head is folded again, or the worker starts over."""
        drift, mine = self.drift, self.states.get(head.digest)
        drift.look_again(head, mine)
        if drift.drifted and not drift.loads:
            if head.parent is not None and head.parent is self.previous and self._ask_fold(head):
                return True
            drift.could_not_fold(head, mine)
        drift.note_progress(self.snapshots.find_moved_s())
        if not drift.has_waited:
            return False
        if drift.foreign:
            self.busy = head.digest
            self.view.emit(RestartFromGenesis("nobody offers the state that the swarm vouches for"))
            return True
        drift.insist(head, mine)
        return False

    # -- manifests ----------------------------------------------------------------------------------------------

    def insert(self, signed: SignedRecord[Manifest], as_floor: bool = False) -> str:
        """Add a manifest to the chain, remember it and fetch its blobs. Returns 'added', 'known' or a reason."""
        link, why = self.view.chain.insert(signed, as_floor)
        if link is None or why == "known":
            return why
        link.seen_s = self.view.now
        self.usables.add(link)
        for gone in self.keeping.trim(link, self._kept_heads):
            self.states.pop(gone, None)
        self.view.emit(KeepRecord(signed.digest, signed.bytes))
        for part in signed.contributions:
            self.view.kinds.setdefault(part.record.blob.root, "contribution")
        return why

    def verify_pending(self) -> None:
        """Have the worker check what is here and unchecked, as far as it may be folded soon."""
        if self.view.unchecked and self.checks.able:
            ahead = list_recent(self.target(), self.replay_limit) + (list_ahead(self.head) if self.head else [])
            self.checks.ask_pending([link for link in ahead if link.digest not in self.usables.folded])

    def _next(self) -> list[Link]:
        """What comes after the head on this peer's chain, and on top of it: while a better chain can't be had."""
        if self.head is None:
            return []
        back = self._steps(self.followed) if self.followed is not None else None
        found = [*(back or ())[: self.replay_limit], *self.head.children]
        return [link for link in found if not link.invalid]

    # -- moving -------------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Move the state towards the best chain: fold, fetch, or load a snapshot."""
        view = self.view
        if not view.trains:
            self._serve_only()
            return
        if self.head is None or self.busy is not None:
            return
        if self.drifted and self._repair(self.head):
            return
        target = self.target()
        if not self.drifted and view.now >= self._fold_at and self._fold_towards(self.best_usable(), target):
            return
        is_there, ahead = target is self.head and not self.drifted, self._next()
        if is_there:
            self.snapshots.asked_for = None
        if view.now < self._fetch_at or (is_there and not ahead):
            return
        self._fetch_at = view.now + view.pace.flush_s
        fetch_parts(view, ahead)
        if is_there:  # where the authors are, while claims are doubted: what comes next is followed once it can be
            return
        steps = self._steps(target)
        if not self.drifted:
            self.chase.watch(target, self.head)
        if steps is not None and not self.drifted:
            offer = self.snapshots.choose(target, self.oldest_snapshot_round, False)
            if is_replay_cheaper(view, steps, offer, self.replay_limit) and not fetch_parts(view, steps):
                return
        self._load_snapshot(target)

    def _serve_only(self) -> None:
        """A seed keeps the blobs of the last rounds and the newest snapshot, to serve them."""
        target = self.head = self.target()
        if self.view.now < self._fetch_at:
            return
        self._fetch_at = self.view.now + self.view.pace.flush_s
        fetch_parts(self.view, [*list_recent(target, self.replay_limit), *list_ahead(target, 4)])
        offer = self.snapshots.choose(target, self.oldest_snapshot_round, False)
        if offer is not None:
            self.snapshots.fetch_to_serve(offer)

    def _steps(self, target: Link) -> list[Link] | None:
        """The manifests from the head (or from the state before it) to `target`."""
        for base in (self.head, self.previous):
            if base is not None:
                steps = self.view.chain.path(base, target)
                if steps is not None:
                    return steps
        return None

    def _fold_towards(self, best: Link, target: Link) -> bool:
        """Ask for the next fold on the way to `best`. True when one was asked for.

        A manifest beside the way to `target` waits a moment after it came: the blobs of the better one may be coming.
        """
        if best is self.head or self.head is None:
            return False
        steps = self._steps(best)
        if steps is None:  # it can't be reached from here: meanwhile as far as this peer's chain goes
            steps = self._steps(self.view.chain.best(self.usables, self.previous or self.head))
        if not steps:
            return False
        is_young = self.view.now - steps[0].seen_s < SIBLING_WAIT * self.view.spec.rounds.length_s
        if is_young and self.view.chain.path(steps[0], target) is None:
            return False
        return self._ask_fold(steps[0])

    def _ask_fold(self, link: Link) -> bool:
        """Have a manifest folded if its blobs are here."""
        parent = link.parent
        parts = self.view.chain.parts(link)
        if parent is None or not all(self.view.has(p.announcement.record.blob) for p in parts):
            return False
        self.busy = link.digest
        roots = tuple((p.announcement.record.blob.root, p.share, p.gain) for p in parts)
        self.view.emit(Fold(link.digest, parent.digest, link.round, link.total, roots))
        return True

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
            if path(self.head, target) is not None or after is None or count_missing_bytes(self.view, after):
                fetch_parts(self.view, after or [])
                return
        forget_wants_before(self.view, offer.round)
        if self.snapshots.fetch(offer, link):
            self.busy = offer.manifest

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
            self.drift.start(foreign=True)  # the worker holds a state nobody vouches for: it must not contribute
            return
        self.drift.reset()
        self._stand_at(link, event.state)
        self.previous, self.view.unchecked = None, True

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

    def _kept_heads(self) -> list[Link]:
        """The heads of the chains that are kept whole, however many others are claimed."""
        if self.view.trains and self.followed is None:
            return self.keeping.find_restored()
        if not self.view.trains:
            leader = self.following.find_leader(())
            return [self.target(), *([leader] if leader is not None else [])]
        return [link for link in (self.head, self.previous, self.followed, self.best_usable()) if link is not None]

    def sweep(self) -> None:
        """Drop blobs and offers that no joiner will ask for."""
        heads = [self.target(), *self._kept_heads()]
        kept = [link for head in heads for link in list_recent(head, self.replay_limit)]
        ahead = list_ahead(self.head) if self.head is not None and self.view.trains else []
        self.keeping.sweep([*kept, *ahead], self.oldest_snapshot_round)
        self.chase.sweep()
        if self.head is not None and self.view.trains:
            for gone in self.view.chain.prune(self.head):
                self.usables.folded.discard(gone)
                self.states.pop(gone, None)
        self.usables.rebuild()
