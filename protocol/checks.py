"""Contributions that the worker is to check against the spec before anything is done with them."""

from __future__ import annotations

from collections.abc import Iterable

from tscale.protocol.chain import Link
from tscale.protocol.effects import VerifyBlob
from tscale.protocol.events import BlobVerified
from tscale.protocol.records import Announcement, SignedRecord
from tscale.protocol.usable import Usable
from tscale.protocol.view import View


class Checks:
    """What is being checked, and what came of it. Nothing is asked for while there is no worker."""

    def __init__(self, view: View, usables: Usable) -> None:
        self.view = view
        self.usables = usables
        self.able = False  # a worker is there
        self._asked: set[bytes] = set()

    def reset(self, able: bool) -> None:
        """A worker came or went: what the last one was asked for is to be asked again."""
        self.able = able
        self._asked.clear()
        self.view.unchecked = True

    def blob_whole(self, root: bytes) -> None:
        """A blob is here: have it checked if it is a contribution."""
        signed = self.view.pool.by_root.get(root)
        if signed is None:
            self.view.unchecked = self.view.dirty = True  # of a manifest ahead, a snapshot, or none of these
        elif self.able:
            self._ask(signed)

    def ask_pending(self, ahead: Iterable[Link]) -> None:
        """Have every contribution checked that is here and unchecked, of the pool and of the manifests `ahead`."""
        if not self.able or not self.view.unchecked:
            return
        self.view.unchecked = False
        for authors in self.view.pool.by_round.values():
            for signed in authors.values():
                self._ask(signed)
        for link in ahead:
            for signed in link.signed.contributions if link.signed else ():
                self._ask(signed)

    def _ask(self, signed: SignedRecord[Announcement]) -> None:
        view, root = self.view, signed.record.blob.root
        known = root in self._asked or root in view.pool.verified or root in view.pool.refused
        if not known and view.holds(root):
            self._asked.add(root)
            view.emit(VerifyBlob(root, signed.record.rung))

    def on_verified(self, event: BlobVerified) -> None:
        """A contribution's blob is good, or its author is at fault, and so is every manifest that has it."""
        view = self.view
        self._asked.discard(event.root)
        if event.ok:
            view.pool.verify(event.root)
            self.usables.blob_came(event.root)
            return
        view.pool.refused[event.root] = event.reason
        view.notice("contribution_refused", root=event.root.hex()[:12], reason=event.reason)
        for link in list(view.chain.links.values()):
            if link.signed and any(p.record.blob.root == event.root for p in link.signed.contributions):
                view.chain.mark_invalid(link)

    def on_missing(self, root: bytes) -> None:
        """The store lost a blob: forget it, so that it is fetched again when it is needed."""
        self._asked.discard(root)
        self.view.pool.verified.discard(root)
        self.view.transfers.forget(root)
        self.usables.rebuild()
