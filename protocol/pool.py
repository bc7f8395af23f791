"""The contributions a peer knows of, by round and author, and which of their blobs it holds and has verified."""

from __future__ import annotations

from tscale.protocol.records import Announcement, SignedRecord

MAX_PER_ROUND = 2048


class Pool:
    """Announcements of the last rounds. The first one seen of an author and round stays; others are equivocation."""

    def __init__(self) -> None:
        self.by_round: dict[int, dict[bytes, SignedRecord[Announcement]]] = {}
        self.by_root: dict[bytes, SignedRecord[Announcement]] = {}
        self.verified: set[bytes] = set()
        self.refused: dict[bytes, str] = {}

    def add(self, signed: SignedRecord[Announcement]) -> bool:
        """Take an announcement; False when it is known, a second one of its author, or one too many."""
        authors = self.by_round.setdefault(signed.record.round, {})
        if signed.public in authors or len(authors) >= MAX_PER_ROUND:
            return False
        authors[signed.public] = signed
        self.by_root[signed.record.blob.root] = signed
        return True

    def of_round(self, round_: int) -> dict[bytes, SignedRecord[Announcement]]:
        """Announcements of a round by author."""
        return self.by_round.get(round_, {})

    def forget_before(self, round_: int) -> None:
        """Drop what is older than `round_`."""
        for old in [r for r in self.by_round if r < round_]:
            for signed in self.by_round.pop(old).values():
                self.by_root.pop(signed.record.blob.root, None)
