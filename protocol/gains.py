"""The gain of a rung by how many peers contribute to a manifest.

The mean of many contributions is smaller than each of them, since only a part of what peers learn in a round is common
to all. So the best gain grows with their number: measured, about as the root of it, from two to sixteen peers and at
1/16 and 1/64 alike (docs/results/convergence-0.2m.md). A spec states gains for EIGHT equal contributions.
"""

from collections.abc import Sequence
from math import sqrt

EIGHT = 8.0
MOST = 16.0
"""Beyond as many equal contributions nothing was measured, and the gain stays."""


def effective_peers(shares: Sequence[float]) -> float:
    """How many equal contributions vary as much as these: (sum of shares)^2 / (sum of squares), at least 1."""
    total = squares = 0.0
    for share in shares:
        total += share
        squares += share * share
    return total * total / squares if squares else 1.0


def scaled_gain(gain: float, peers: float) -> float:
    """`gain` for `peers` equal contributions. Not below 1, which is a plain mean; a gain of 1 or less stays as it is.

    The same bits on every machine: one division, one root and one product.
    """
    return gain if gain <= 1.0 else max(1.0, gain * sqrt(min(peers, MOST) / EIGHT))
