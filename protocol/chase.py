"""Better chains that can't be had: a chain that brings nothing for some rounds is given up for a while.

Anybody can claim a chain with many tokens. A swarm must not stand still for one whose blobs or snapshots nobody has.
Each time a branch is given up it is left alone for twice as long. And each time any branch is, this peer doubts claims
for a while, which also doubles: meanwhile it goes only where the living authors are, and to what it can fold. So the
rounds lost to any number of claimed branches grow with the logarithm of the time.

A branch that a living author is on, which had contributed before the branch began, is more than a claim: it is left
alone for a short time at first. So peers that lost each other among claims find each other again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tscale.protocol.chain import Link
from tscale.protocol.following import Following
from tscale.protocol.snapshots import Snapshots
from tscale.protocol.view import View

CHASE_ROUNDS = 2.0  # how long a better chain is waited for that brings nothing
AVOID_ROUNDS = 10.0  # the first time
AVOID_LIVING_ROUNDS = 1.0  # the first time, when a living author is on it
LIVING_LINKS = 8  # before a branch: who contributed to one of them is known here
DOUBT_ROUNDS = 4.0  # after the first branch that was given up
MAX_DOUBLINGS = 6
MEMORY_ROUNDS = 512.0  # how long it counts that a branch was given up
MAX_RECONSIDERED = 2  # times that an offered snapshot brings back a branch that was given up
MAX_REMEMBERED = 4096  # branches


class Chase:
    """What is being chased, and which branches (by their first manifest) are avoided until when."""

    def __init__(self, view: View, following: Following, snapshots: Snapshots) -> None:
        self.view = view
        self.following = following
        self.snapshots = snapshots
        self.avoid: dict[bytes, float] = {}
        self._given_up: dict[bytes, int] = {}  # branch -> how often
        self._failed_s: deque[float] = deque(maxlen=MAX_DOUBLINGS + 1)  # when branches were given up
        self._doubt_until_s = 0.0
        self._seen: tuple[object, float] = (None, 0.0)

    @property
    def is_doubting(self) -> bool:
        """Whether claims have misled this peer lately."""
        return self.view.now < self._doubt_until_s

    @property
    def goes_by_authors(self) -> bool:
        """Whether claims don't count, if there are living authors: a peer that does not train can't put one to the
        test."""
        return self.is_doubting or not self.view.trains

    def best(self, usable: Callable[[Link], bool]) -> Link:
        """The head of the best chain that has not been given up, or of the one that the authors are at."""
        avoid = self.avoid
        leader = self.following.find_leader(avoid) if self.goes_by_authors else None
        if leader is not None:
            return self.view.chain.best(usable, leader)
        return self.view.chain.best((lambda link: link.digest not in avoid) if avoid else None)

    def watch(self, target: Link, head: Link) -> None:
        """Look at what has come of `target`, which lies ahead of `head` or on another branch.

        What counts is how far the branch could be folded without a gap, and that a snapshot of it comes in: its
        claims may grow every round.
        """
        view, now = self.view, self.view.now
        branch: list[Link] = [target]
        while (parent := branch[-1].parent) is not None and view.chain.path(parent, head) is None:
            branch.append(parent)
        first = branch[-1]
        seen = (first.digest, self._count_held(branch[::-1]), *self._look_at_snapshots(branch))
        if self._seen[0] != seen:
            self._seen = (seen, now)
        elif now - self._seen[1] > CHASE_ROUNDS * view.spec.rounds.length_s and view.chain.path(first, head) is None:
            self._give_up(first)

    def _count_held(self, branch: list[Link]) -> int:
        """The blobs here of the branch's links, oldest first, up to the first link that lacks one."""
        held = 0
        for link in branch:
            parts = link.signed.contributions if link.signed is not None else ()
            here = sum(self.view.has(p.record.blob) for p in parts)
            held += here
            if here < len(parts):
                break
        return held

    def _look_at_snapshots(self, branch: list[Link]) -> tuple[bool, float]:
        """Whether a snapshot on the branch is offered, and when a chunk of one came last."""
        digests = {link.digest for link in branch}
        blobs = {s.record.blob for s in self.snapshots.offers.values() if s.record.manifest in digests}
        wants = [want for blob in blobs if (want := self.view.transfers.wants.get(blob)) is not None]
        return bool(blobs), max((want.moved_s for want in wants if want.moved_s > want.since_s), default=0.0)

    def _give_up(self, branch: Link) -> None:
        view, length_s = self.view, self.view.spec.rounds.length_s
        times = self._given_up.pop(branch.digest, 0)
        self._given_up[branch.digest] = times + 1
        if len(self._given_up) > MAX_REMEMBERED:
            del self._given_up[next(iter(self._given_up))]
        avoid_rounds = AVOID_LIVING_ROUNDS if self._has_living_author(branch) else AVOID_ROUNDS
        self.avoid[branch.digest] = view.now + avoid_rounds * length_s * 2 ** min(times, MAX_DOUBLINGS)
        while self._failed_s and view.now - self._failed_s[0] > MEMORY_ROUNDS * length_s:
            self._failed_s.popleft()
        self._doubt_until_s = view.now + DOUBT_ROUNDS * length_s * 2 ** min(len(self._failed_s), MAX_DOUBLINGS)
        self._failed_s.append(view.now)
        view.chain.version += 1
        view.notice("chain_given_up", round=branch.round, reason="nobody has its blobs or a snapshot of it")

    def _has_living_author(self, branch: Link) -> bool:
        """Whether a living author trained last from the branch, and had contributed shortly before it began."""
        known: set[bytes] = set()
        here = branch.parent
        for _ in range(LIVING_LINKS):
            if here is not None:
                known |= here.authors
                here = here.parent
        chain = self.view.chain
        for author, base in self.following.bases().items():
            link = chain.get(base) if author in known and author != self.view.own else None
            if link is not None and (link is branch or chain.path(branch, link) is not None):
                return True
        return False

    def reconsider(self, manifest: bytes) -> None:
        """A snapshot was offered: a chain that was given up may be had now."""
        here = self.view.chain.get(manifest) if self.avoid else None
        while here is not None:
            if here.digest in self.avoid and self._given_up.get(here.digest, 0) <= MAX_RECONSIDERED:
                del self.avoid[here.digest]
                self.view.chain.version += 1
            here = here.parent

    def sweep(self) -> None:
        """Try again what was given up long ago, or what a living author turns out to be on."""
        kept = {digest: until for digest, until in self.avoid.items() if until >= self.view.now}
        for digest in [d for d in kept if self._given_up.get(d, 0) <= MAX_RECONSIDERED]:
            link = self.view.chain.get(digest)
            if link is not None and self._has_living_author(link):
                del kept[digest]
        if len(kept) < len(self.avoid):
            self.avoid = kept
            self.view.chain.version += 1
