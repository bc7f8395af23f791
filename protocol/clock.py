"""The swarm's clock: which round it is, and how far this machine's clock is from the other peers' clocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import copysign
from statistics import median

MAX_ROUND_TRIP_S = 5.0  # a slower answer says too little about the other clock
QUICK_TRIP_S = 0.2  # so much of a round trip is taken to be shared out evenly
SLOWER = 2.0  # a peer's answer that took longer by this factor does not replace a quick one of the last minute
SLOWER_S = 0.2
KEEP_QUICK_S = 60.0
MAX_SAMPLES = 64
WARN_OFFSET_S = 3.0


@dataclass(frozen=True)
class RoundTimes:
    """Rounds as boxes of swarm time: round r spans [t0 + r*T, t0 + (r+1)*T)."""

    t0_unix_s: float
    length_s: float

    def round_at(self, swarm_unix_s: float) -> int:
        """The round whose box holds this time; negative before t0."""
        return int((swarm_unix_s - self.t0_unix_s) // self.length_s)

    def opens_unix_s(self, round_: int) -> float:
        """Start of the round's box."""
        return self.t0_unix_s + round_ * self.length_s

    def closes_unix_s(self, round_: int) -> float:
        """End of the round's box."""
        return self.t0_unix_s + (round_ + 1) * self.length_s


@dataclass
class SwarmClock:
    """Offset of the swarm's time from the local clock: the median of all known peers' raw clocks, this one included.

    The median of raw clocks (not of corrected ones) has no feedback, so it can't drift, and it takes half of the
    peers to move it. An answer says nothing of how its round trip was shared out (a slow uplink takes it all), so that
    a clock counts as different only by what no sharing of a long one explains: half of it, NTP's bound (RFC 5905).
    """

    samples: dict[bytes, float] = field(default_factory=dict)
    offset_s: float = 0.0
    _trips: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # of the samples: round trip, when received

    def observe(self, peer: bytes, their_unix_s: float, sent_unix_s: float, received_unix_s: float) -> None:
        """Take in a peer's raw clock reading from an answer that was asked for at `sent` and came at `received`."""
        round_trip_s = received_unix_s - sent_unix_s
        if not 0.0 <= round_trip_s <= MAX_ROUND_TRIP_S:
            return
        known = self.samples.pop(peer, None)
        if known is not None and self._is_slower(peer, round_trip_s, received_unix_s):
            self.samples[peer] = known
            return
        apart_s = their_unix_s - (sent_unix_s + received_unix_s) / 2
        self.samples[peer] = copysign(max(0.0, abs(apart_s) - max(0.0, round_trip_s - QUICK_TRIP_S) / 2), apart_s)
        self._trips[peer] = round_trip_s, received_unix_s
        while len(self.samples) > MAX_SAMPLES:
            oldest = next(iter(self.samples))
            del self.samples[oldest], self._trips[oldest]
        self.offset_s = median([0.0, *self.samples.values()])

    def _is_slower(self, peer: bytes, round_trip_s: float, received_unix_s: float) -> bool:
        quick_s, then_unix_s = self._trips[peer]
        is_recent = 0.0 <= received_unix_s - then_unix_s < KEEP_QUICK_S
        return is_recent and round_trip_s > SLOWER * quick_s + SLOWER_S

    def swarm_unix_s(self, local_unix_s: float) -> float:
        """Local time corrected to the swarm's."""
        return local_unix_s + self.offset_s

    def warning(self) -> str | None:
        """One line when this machine's clock is far from the swarm's, else None."""
        if abs(self.offset_s) <= WARN_OFFSET_S:
            return None
        way = "behind" if self.offset_s > 0 else "ahead of"
        gap = f"{abs(self.offset_s):.1f} s {way}"
        return f"this machine's clock is {gap} the swarm's; it is corrected for, but set it right"
