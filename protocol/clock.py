"""The swarm's clock: which round it is, and how far this machine's clock is from the other peers' clocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

MAX_ROUND_TRIP_S = 5.0  # a slower answer says too little about the other clock
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
    peers to move it.
    """

    samples: dict[bytes, float] = field(default_factory=dict)
    offset_s: float = 0.0

    def observe(self, peer: bytes, their_unix_s: float, sent_unix_s: float, received_unix_s: float) -> None:
        """Take in a peer's raw clock reading from an answer that was asked for at `sent` and came at `received`."""
        round_trip_s = received_unix_s - sent_unix_s
        if not 0.0 <= round_trip_s <= MAX_ROUND_TRIP_S:
            return
        self.samples.pop(peer, None)
        self.samples[peer] = their_unix_s - (sent_unix_s + received_unix_s) / 2
        while len(self.samples) > MAX_SAMPLES:
            self.samples.pop(next(iter(self.samples)))
        self.offset_s = median([0.0, *self.samples.values()])

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
