"""Where the living authors are: each one's last announcement says from which manifest it trained.

A claim of tokens costs nothing. A key that keeps saying that it is alive and contributes costs its owner more, so this
is what a peer goes by when claims have misled it.
"""

from __future__ import annotations

from collections.abc import Container

from tscale.protocol.chain import Link
from tscale.protocol.view import View

PATIENCE_ROUNDS = 8.0  # how long the others' chain is waited for
MAX_DOUBLINGS = 6


class Following:
    """The bases that living authors trained from last."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._lost_since_s: float | None = None
        self._deaf_until_s = float("-inf")
        self._insisted = 0

    def bases(self) -> dict[bytes, bytes]:
        """Living author (this peer included) -> the manifest it trained from in its last closed round."""
        view = self.view
        living = view.members.alive_trainers(view.swarm_now) | {view.own}
        closed = view.times.round_at(view.swarm_now)
        found: dict[bytes, bytes] = {}
        for round_ in sorted(r for r in view.pool.by_round if r < closed):
            found.update((a, s.record.base) for a, s in view.pool.of_round(round_).items() if a in living)
        return found

    def is_followed(self, head: Link) -> bool:
        """Whether most of them trained from the head or from the manifest before it."""
        near = {head.digest, head.parent.digest if head.parent else head.digest}
        bases = self.bases()
        return 2 * sum(base in near for base in bases.values()) > len(bases)

    def are_others_elsewhere(self, head: Link) -> bool:
        """Whether another one trained from a known manifest that does not lie on the head's chain."""
        chain, own = self.view.chain, self.view.own
        for base in {base for author, base in self.bases().items() if author != own}:
            link = chain.get(base)
            if link is not None and chain.path(link, head) is None:
                return True
        return False

    def is_out_of_touch(self) -> bool:
        """Whether most other living authors have for some rounds trained from manifests that nobody hands to this peer.

        Anybody can make that up, so it is believed for some rounds only, and after that less and less often.
        """
        now, patience_s = self.view.now, PATIENCE_ROUNDS * self.view.times.length_s
        if not self._are_most_lost():
            self._lost_since_s = None
            return False
        if now < self._deaf_until_s:
            return False
        if self._lost_since_s is None or self._lost_since_s > now:
            self._lost_since_s = now
        if now - self._lost_since_s <= patience_s:
            return True
        self._deaf_until_s = now + patience_s * 2**self._insisted
        self._insisted = min(self._insisted + 1, MAX_DOUBLINGS)
        self._lost_since_s = None
        return False

    def _are_most_lost(self) -> bool:
        """Whether most other living authors have named at least two bases of late, and only unknown ones."""
        view = self.view
        living = view.members.alive_trainers(view.swarm_now)
        closed = view.times.round_at(view.swarm_now)
        named: dict[bytes, list[bool]] = {}
        for round_ in (r for r in view.pool.by_round if r < closed):
            for author, signed in view.pool.of_round(round_).items():
                if author in living and author != view.own:
                    named.setdefault(author, []).append(view.chain.get(signed.record.base) is None)
        return 2 * sum(all(unknown) and len(unknown) > 1 for unknown in named.values()) > len(named)

    def find_leader(self, avoid: Container[bytes]) -> Link | None:
        """From the root on, at every branching, the child that most of them are at or after; the last such one.

        None when nobody says anything.
        """
        counts = self._count_behind()
        if not counts:
            return None
        here = self.view.chain.root
        while True:
            ahead = [c for c in here.children if not c.invalid and c.digest not in avoid and c.digest in counts]
            if not ahead:
                return here
            here = min(ahead, key=lambda c: (-counts[c.digest], c.round, c.order))

    def _count_behind(self) -> dict[bytes, int]:
        """Link -> how many are at it or at one after it."""
        at: dict[bytes, int] = {}
        needed: dict[bytes, Link] = {}
        for base in self.bases().values():
            link = self.view.chain.get(base)
            if link is None:
                continue
            at[base] = at.get(base, 0) + 1
            while link is not None and link.digest not in needed:
                needed[link.digest] = link
                link = link.parent
        counts = dict.fromkeys(needed, 0)
        for link in sorted(needed.values(), key=lambda link: -link.depth):
            counts[link.digest] += at.get(link.digest, 0)
            if link.parent is not None:
                counts[link.parent.digest] += counts[link.digest]
        return counts
