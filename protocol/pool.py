"""The contributions a peer knows of, by round and author, and which of their blobs it has verified or refused."""

from __future__ import annotations

from tscale.protocol.effects import Claim
from tscale.protocol.records import Announcement, SignedRecord

MAX_PER_ROUND = 2048


def claim_of(record: Announcement) -> Claim:
    """What an announcement says of its blob."""
    return Claim(record.blob, record.rung)


class Pool:
    """Announcements of the last rounds. The first one seen of an author and round stays; others are equivocation.

    Anybody can announce anybody's blob, with a wrong size or rung too. So a verdict is about a claim, never about a
    root: a lie about a blob says nothing about the blob. `version` grows with every announcement and every verified
    claim, for caches.
    """

    def __init__(self) -> None:
        self.by_round: dict[int, dict[bytes, SignedRecord[Announcement]]] = {}
        self.version = 0
        self._by_root: dict[bytes, list[SignedRecord[Announcement]]] = {}  # in the order of arrival
        self._verdicts: dict[bytes, dict[Claim, str]] = {}  # root -> claim -> why it was refused, '' for a good one

    def add(self, signed: SignedRecord[Announcement], *, regular: bool = False) -> bool:
        """Take an announcement; False when it is known, a second one of its author, or one too many.

        `regular` authors find room however many others there are.
        """
        authors = self.by_round.setdefault(signed.record.round, {})
        if signed.public in authors or (len(authors) >= MAX_PER_ROUND and not regular):
            return False
        authors[signed.public] = signed
        self._by_root.setdefault(signed.record.blob.root, []).append(signed)
        self.version += 1
        return True

    def naming(self, root: bytes) -> list[SignedRecord[Announcement]]:
        """The announcements that name a blob, in the order in which they came."""
        return self._by_root.get(root, [])

    def of_round(self, round_: int) -> dict[bytes, SignedRecord[Announcement]]:
        """Announcements of a round by author."""
        return self.by_round.get(round_, {})

    def with_base(self, base: bytes) -> list[SignedRecord[Announcement]]:
        """Announcements of contributions that were trained from the state after a manifest."""
        return [s for authors in self.by_round.values() for s in authors.values() if s.record.base == base]

    # -- verdicts -----------------------------------------------------------------------------------------------

    def settle(self, claim: Claim, fault: str = "") -> None:
        """A blob is here and is what the claim says, or has a fault."""
        self._verdicts.setdefault(claim.blob.root, {})[claim] = fault
        self.version += 1

    def fault(self, claim: Claim) -> str | None:
        """Why a claim was refused, '' when it is good, None when nothing is known."""
        return self._verdicts.get(claim.blob.root, {}).get(claim)

    def is_good(self, record: Announcement) -> bool:
        """Whether an announcement's blob is here and is what it says."""
        return self.fault(claim_of(record)) == ""

    # -- what may go --------------------------------------------------------------------------------------------

    def forget_blob(self, root: bytes) -> None:
        """A blob is gone: nothing is known of it any more."""
        self._verdicts.pop(root, None)

    def forget_before(self, round_: int) -> None:
        """Drop what is older than `round_`."""
        for old in [r for r in self.by_round if r < round_]:
            for signed in self.by_round.pop(old).values():
                left = [s for s in self.naming(signed.record.blob.root) if s is not signed]
                if left:
                    self._by_root[signed.record.blob.root] = left
                else:
                    self._by_root.pop(signed.record.blob.root, None)
        self.version += 1
