"""The contributions a peer knows of, by round and author, and which of their blobs it holds and has verified."""

from __future__ import annotations

from tscale.protocol.records import Announcement, SignedRecord

MAX_PER_ROUND = 2048


class Pool:
    """Announcements of the last rounds. The first one seen of an author and round stays; others are equivocation.

    `version` grows with every announcement and every verified blob, for caches.
    """

    def __init__(self) -> None:
        self.by_round: dict[int, dict[bytes, SignedRecord[Announcement]]] = {}
        self.by_root: dict[bytes, SignedRecord[Announcement]] = {}
        self.verified: set[bytes] = set()
        self.refused: dict[bytes, str] = {}
        self.version = 0

    def add(self, signed: SignedRecord[Announcement]) -> bool:
        """Take an announcement; False when it is known, a second one of its author, or one too many."""
        authors = self.by_round.setdefault(signed.record.round, {})
        if signed.public in authors or len(authors) >= MAX_PER_ROUND:
            return False
        authors[signed.public] = signed
        self.by_root[signed.record.blob.root] = signed
        self.version += 1
        return True

    def verify(self, root: bytes) -> None:
        """A contribution's blob is here and good."""
        self.verified.add(root)
        self.version += 1

    def of_round(self, round_: int) -> dict[bytes, SignedRecord[Announcement]]:
        """Announcements of a round by author."""
        return self.by_round.get(round_, {})

    def with_base(self, base: bytes) -> list[SignedRecord[Announcement]]:
        """Announcements of contributions that were trained from the state after a manifest."""
        return [s for authors in self.by_round.values() for s in authors.values() if s.record.base == base]

    def forget_before(self, round_: int) -> None:
        """Drop what is older than `round_`."""
        for old in [r for r in self.by_round if r < round_]:
            for signed in self.by_round.pop(old).values():
                self.by_root.pop(signed.record.blob.root, None)
        self.version += 1
