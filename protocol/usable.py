"""Which manifests this peer could fold: those folded before, and those whose blobs are all here and verified."""

from __future__ import annotations

from tscale.protocol.chain import Link
from tscale.protocol.effects import Claim
from tscale.protocol.pool import claim_of
from tscale.protocol.records import Announcement
from tscale.protocol.view import View


class Usable:
    """Kept up to date blob by blob, so that asking costs one look. `version` grows when a manifest became usable."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.folded: set[bytes] = {view.chain.genesis.digest}
        self.version = 0
        self._ready: set[bytes] = set()
        self._lacking: dict[bytes, set[Claim]] = {}  # manifest -> what it waits for
        self._waiting: dict[Claim, list[bytes]] = {}  # claim -> manifests that wait for it

    def __call__(self, link: Link) -> bool:
        """Whether the manifest is usable."""
        return link.digest in self._ready or link.digest in self.folded

    def add(self, link: Link) -> None:
        """A manifest is new."""
        parts = link.signed.contributions if link.signed is not None else ()
        lacking = {claim_of(p.record) for p in parts if not self._is_good(p.record)}
        if not lacking:
            self._ready.add(link.digest)
            self.version += 1
            return
        self._lacking[link.digest] = lacking
        for claim in lacking:
            self._waiting.setdefault(claim, []).append(link.digest)

    def _is_good(self, record: Announcement) -> bool:
        return self.view.pool.is_good(record) if self.view.trains else self.view.has(record.blob)

    def blob_came(self, claim: Claim) -> None:
        """A blob is here and verified."""
        for manifest in self._waiting.pop(claim, ()):
            lacking = self._lacking.get(manifest)
            if lacking is not None:
                lacking.discard(claim)
                if not lacking:
                    del self._lacking[manifest]
                    self._ready.add(manifest)
                    self.version += 1

    def waiting_for(self, claim: Claim) -> tuple[bytes, ...]:
        """The manifests that have a contribution with this claim, which is not known to be good."""
        return tuple(self._waiting.get(claim, ()))

    def folded_up_to(self, link: Link) -> None:
        """The state after `link` is here, and so are those before it as far as the chain is concerned."""
        here: Link | None = link
        while here is not None and here.digest not in self.folded:
            self.folded.add(here.digest)
            here = here.parent
        self.version += 1

    def rebuild(self) -> None:
        """Blobs went away: look at every manifest that is not folded again."""
        self._ready.clear()
        self._lacking.clear()
        self._waiting.clear()
        for link in self.view.chain.links.values():
            if link.digest not in self.folded and link.signed is not None:
                self.add(link)
        self.version += 1
