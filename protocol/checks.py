"""Contributions that the worker is to check against the spec before anything is done with them."""

from __future__ import annotations

from collections.abc import Iterable

from tscale.protocol.chain import Link
from tscale.protocol.effects import Claim, VerifyBlob
from tscale.protocol.events import BlobVerified
from tscale.protocol.pool import claim_of
from tscale.protocol.usable import Usable
from tscale.protocol.view import View


class Checks:
    """What is being checked, and what came of it. Nothing is asked for while there is no worker."""

    def __init__(self, view: View, usables: Usable) -> None:
        self.view = view
        self.usables = usables
        self.able = False  # a worker is there
        self._asked: set[Claim] = set()

    def reset(self, able: bool) -> None:
        """A worker came or went: what the last one was asked for is to be asked again."""
        self.able = able
        self._asked.clear()
        self.view.unchecked = True

    def blob_whole(self, root: bytes) -> None:
        """A blob is here: have it checked if it is a contribution, as everybody who announced it describes it."""
        named = self.view.pool.naming(root)
        self.view.unchecked = True  # a manifest ahead may say something else of it than any announcement
        if not named:
            self.view.dirty = True  # of a manifest ahead, a snapshot, or none of these
        elif self.able:
            for signed in named:
                self._ask(claim_of(signed.record))

    def ask_pending(self, ahead: Iterable[Link]) -> None:
        """Have every contribution checked that is here and unchecked, of the pool and of the manifests `ahead`."""
        if not self.able or not self.view.unchecked:
            return
        self.view.unchecked = False
        for authors in self.view.pool.by_round.values():
            for signed in authors.values():
                self._ask(claim_of(signed.record))
        for link in ahead:
            for signed in link.signed.contributions if link.signed else ():
                claim = claim_of(signed.record)
                self._ask(claim)
                if not link.invalid and self.view.pool.fault(claim):
                    self.view.chain.mark_invalid(link)  # it came after the verdict

    def _ask(self, claim: Claim) -> None:
        view = self.view
        if claim in self._asked or not view.holds(claim.blob.root) or view.pool.fault(claim) is not None:
            return
        if not view.has(claim.blob):
            self._refuse(claim, "the blob has another size")
            return
        self._asked.add(claim)
        view.emit(VerifyBlob(claim))

    def on_verified(self, event: BlobVerified) -> None:
        """A contribution is what its announcement says, or else every manifest that has it so is at fault."""
        self._asked.discard(event.claim)
        if event.ok:
            self.view.pool.settle(event.claim)
            self.usables.blob_came(event.claim)
        else:
            reason = event.reason or "it was refused"
            self.view.notice("contribution_refused", root=event.claim.blob.root.hex()[:12], reason=reason)
            self._refuse(event.claim, reason)

    def _refuse(self, claim: Claim, reason: str) -> None:
        self.view.pool.settle(claim, reason)
        for digest in self.usables.waiting_for(claim):
            link = self.view.chain.get(digest)
            if link is not None and not link.invalid:
                self.view.chain.mark_invalid(link)

    def on_missing(self, root: bytes) -> None:
        """The store lost a blob: forget it, so that it is fetched again when it is needed."""
        self._asked = {claim for claim in self._asked if claim.blob.root != root}
        self.view.pool.forget_blob(root)
        self.view.transfers.forget(root)
        self.usables.rebuild()
