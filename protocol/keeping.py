"""What may go: blobs that no joiner will ask for, and claimed manifests of which there are too many.

Anybody with many keys can sign any number of manifests. The chain that this peer follows is kept whole; what lies
beside it is bounded in number and in bytes, and the least credible branch goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tscale.protocol.chain import Link
from tscale.protocol.effects import DropBlob
from tscale.protocol.snapshots import Snapshots
from tscale.protocol.spread import Spread
from tscale.protocol.usable import Usable
from tscale.protocol.view import View

MAX_CHILDREN = 64  # of one manifest
MAX_BESIDE = 2048  # manifests that are not on a chain which is kept
MAX_BESIDE_BYTES = 16 << 20
MAX_AHEAD = 64
_REBUILD_EVERY = 256


class Keeping:
    """Drops blobs and manifests. The chains to keep are named by their heads."""

    def __init__(self, view: View, spread: Spread, snapshots: Snapshots, usables: Usable) -> None:
        self.view = view
        self.spread = spread
        self.snapshots = snapshots
        self.usables = usables
        self._removed = 0

    # -- blobs --------------------------------------------------------------------------------------------------

    def sweep(self, links: Iterable[Link], oldest_snapshot_round: int) -> None:
        """Drop the blobs of all but these manifests, of the pool, and of the snapshots that are served."""
        view = self.view
        keep = self.snapshots.sweep(oldest_snapshot_round)
        for link in links:
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

    def find_restored(self) -> list[Link]:
        """The manifests of the last run: until the worker says where it is, each may be one that it goes on from."""
        return [link for link in self.view.chain.links.values() if link.seen_s == 0.0]

    # -- manifests ----------------------------------------------------------------------------------------------

    def trim(self, new: Link, heads: Callable[[], list[Link]]) -> list[bytes]:
        """A manifest has come: forget others, not on the chains of `heads`, where there are too many.

        Returns the digests that went. `new` and what is before it stay for now.
        """
        chain, parent = self.view.chain, new.parent
        crowded = parent is not None and len(parent.children) > MAX_CHILDREN
        if not crowded and len(chain.links) <= MAX_BESIDE and chain.size_bytes <= MAX_BESIDE_BYTES:
            return []
        spared = _with_ancestors([*heads(), new])
        gone: list[bytes] = []
        if crowded and parent is not None:
            gone += self._remove_weakest([c for c in parent.children if c.digest not in spared])
        spared_bytes = sum(link.size_bytes for link in spared.values())
        while (
            len(chain.links) - len(spared) > MAX_BESIDE or chain.size_bytes - spared_bytes > MAX_BESIDE_BYTES
        ) and len(chain.links) > len(spared):
            branches = [c for link in spared.values() for c in link.children if c.digest not in spared]
            gone += self._remove_weakest(branches)
        return gone

    def _remove_weakest(self, branches: list[Link]) -> list[bytes]:
        """Forget one branch: first an invalid one, one that can't be folded, one that a stranger sealed, the oldest."""
        if not branches:
            return []
        weakest = max(branches, key=lambda c: (c.invalid, not self.usables(c), c.order[0], -c.seen_s, c.order))
        gone = [link.digest for link in self.view.chain.remove(weakest)]
        for digest in gone:
            self.spread.drop(digest)
        self._removed += len(gone)
        if self._removed >= _REBUILD_EVERY:
            self._removed = 0
            self.usables.rebuild()
        return gone


def list_recent(head: Link, count: int) -> list[Link]:
    """The last `count` links of a chain, newest first."""
    found: list[Link] = []
    here: Link | None = head
    while here is not None and here.signed is not None and len(found) < count:
        found.append(here)
        here = here.parent
    return found


def list_ahead(head: Link, count: int = MAX_AHEAD) -> list[Link]:
    """The first `count` valid links after `head` on all branches, nearest first."""
    found = [head]
    for here in found:  # grows while it is walked
        if len(found) <= count:
            found.extend(sorted((c for c in here.children if not c.invalid), key=lambda c: c.order))
    return found[1 : count + 1]


def _with_ancestors(links: Iterable[Link]) -> dict[bytes, Link]:
    found: dict[bytes, Link] = {}
    for link in links:
        here: Link | None = link
        while here is not None and here.digest not in found:
            found[here.digest] = here
            here = here.parent
    return found
