"""Better chains that can't be had: a chain that brings nothing for some rounds is given up for a while.

Anybody can claim a chain with many tokens. A swarm must not stand still for one whose blobs or snapshots nobody has.
"""

from __future__ import annotations

from tscale.protocol.chain import Link
from tscale.protocol.view import View

CHASE_ROUNDS = 2.0  # how long a better chain is waited for that brings nothing
AVOID_ROUNDS = 10.0


class Chase:
    """What is being chased, and which branches (by their first manifest) are avoided until when."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.avoid: dict[bytes, float] = {}
        self._seen: tuple[object, float] = (None, 0.0)

    def best(self) -> Link:
        """The head of the best chain that has not been given up."""
        avoid = self.avoid
        return self.view.chain.best((lambda link: link.digest not in avoid) if avoid else None)

    def watch(self, target: Link, head: Link, steps: list[Link] | None, offered: set[bytes]) -> None:
        """Look at what has come of `target`, which lies `steps` ahead of `head` or on another branch.

        `offered` are the manifests that somebody offers a snapshot of.
        """
        view = self.view
        branch, offers = target, 0
        while branch.parent is not None and view.chain.path(branch.parent, head) is None:
            offers += branch.digest in offered
            branch = branch.parent
        parts = [p for link in steps or () if link.signed for p in link.signed.contributions]
        missing = sum(not view.holds(p.record.blob.root) for p in parts)
        moved_s = max((w.moved_s for w in view.transfers.wants.values() if w.priority == 0), default=0.0)
        seen = (branch.digest, missing, moved_s, offers)
        if self._seen[0] != seen:
            self._seen = (seen, view.now)
        elif view.now - self._seen[1] > CHASE_ROUNDS * view.spec.rounds.length_s and branch is not head:
            self.avoid[branch.digest] = view.now + AVOID_ROUNDS * view.spec.rounds.length_s
            view.chain.version += 1
            view.notice("chain_given_up", round=branch.round, reason="nobody has its blobs or a snapshot of it")

    def reconsider(self, manifest: bytes) -> None:
        """A snapshot was offered: a chain that was given up may be had now."""
        here = self.view.chain.get(manifest) if self.avoid else None
        while here is not None:
            if self.avoid.pop(here.digest, None) is not None:
                self.view.chain.version += 1
            here = here.parent

    def sweep(self) -> None:
        """Try again what was given up long ago."""
        kept = {digest: until for digest, until in self.avoid.items() if until >= self.view.now}
        if len(kept) < len(self.avoid):
            self.avoid = kept
            self.view.chain.version += 1
