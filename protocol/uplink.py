"""What a slow uplink is used for: a chunk goes out only if it arrives in time, and records have a share of their own.

A request fails after its timeout, so that what takes longer has only kept the rest from going out. An uplink that
carries a few whole chunks within a timeout needs none of this, and nothing here limits it.
"""

from __future__ import annotations

from tscale.protocol.hashing import CHUNK_BYTES

BULK_SHARE = 0.75  # of the uplink for chunks; the rest is for gossip, questions and records
RECORDS_SHARE = 0.25
FAST_CHUNKS = 2.0  # within a timeout
RECORDS_AHEAD = 0.25  # of a timeout that the records' share may be used ahead
MANIFEST_BYTES = 4096  # of ten contributions
MIN_RECORDS_BYTES = 1024


class Uplink:
    """A peer's uplink: `upload_bps` in bits per second, and how long an answer is waited for."""

    def __init__(self, upload_bps: float, timeout_s: float) -> None:
        self.rate = max(upload_bps, 1.0) / 8.0  # in bytes per second
        self.timeout_s = timeout_s
        self._busy_until_s = 0.0
        self._records_until_s = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether this peer has to choose what it sends."""
        return self.rate * self.timeout_s < FAST_CHUNKS * CHUNK_BYTES

    @property
    def records_bytes(self) -> int:
        """How long a message of records may be, so that it does not keep others waiting."""
        return max(MIN_RECORDS_BYTES, int(RECORDS_SHARE * self.rate * self.timeout_s))

    @property
    def carries_manifests(self) -> bool:
        """Whether a manifest gets out at once, beside other records."""
        return not self.is_slow or self.records_bytes >= MANIFEST_BYTES

    def bulk_s(self, size_bytes: int) -> float:
        """How long a chunk or a blob of this size is on its way."""
        return size_bytes / (BULK_SHARE * self.rate)

    def fits(self, size_bytes: int) -> bool:
        """Whether a chunk of this size can arrive before the other side gives up."""
        return not self.is_slow or self.bulk_s(min(size_bytes, CHUNK_BYTES)) <= self.timeout_s

    def reserve(self, size_bytes: int, now: float) -> bool:
        """Take the uplink for a chunk, after those promised before. False when it would come too late."""
        if not self.is_slow:
            return True
        start = max(now, self._busy_until_s) if self._busy_until_s <= now + self.timeout_s else now
        end = start + self.bulk_s(size_bytes)
        if end > now + self.timeout_s:
            return False
        self._busy_until_s = end
        return True

    def gossip_pause_s(self, size_bytes: int) -> float:
        """The least time after a gossip frame of this size until the next one."""
        return size_bytes / (RECORDS_SHARE * self.rate) if self.is_slow else 0.0

    def spend_on_records(self, size_bytes: int, now: float) -> bool:
        """Take from the records' share. False when it is used up: then others have to carry these records."""
        if not self.is_slow:
            return True
        free_s = self._records_until_s
        start = max(now, free_s) if free_s <= now + self.timeout_s else now
        if start - now > RECORDS_AHEAD * self.timeout_s:
            return False
        self._records_until_s = start + size_bytes / (RECORDS_SHARE * self.rate)
        return True
