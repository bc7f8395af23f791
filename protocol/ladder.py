"""As dense as the links allow: which rung of the spec's ladder a contribution is sent with."""

from __future__ import annotations

import math

from tscale.protocol.spec import RungSpec, SwarmSpec

CHUNK_VALUES = 4096
UPLINK_SHARE = 0.5  # of the uplink over a round that contributions may take; the rest is slack and other traffic


def bits_per_parameter(rung: RungSpec) -> float:
    """Expected size of a contribution: entropy of uniform positions, two value bits, two codes per chunk."""
    if rung.bits == 32:
        return 32.0
    share = rung.kept_per_chunk / CHUNK_VALUES
    if share >= 1.0:
        return 2.0 + 16.0 / CHUNK_VALUES
    positions = -share * math.log2(share) - (1.0 - share) * math.log2(1.0 - share)
    return positions * 1.01 + 2.0 * share + 16.0 / CHUNK_VALUES


def choose_rung(spec: SwarmSpec, parameters: int, peers: int, upload_bps: float) -> int:
    """Index of the rung for a swarm of `peers` contributors, this one included.

    Every peer moves about as much as all contributions of the round together, so the densest rung is taken whose
    contributions fit the share of one uplink over the round; the sparsest when none does. A lone peer, whose
    contribution travels nowhere, takes the densest of all.
    """
    rungs = spec.codec.rungs
    order = sorted(range(len(rungs)), key=lambda i: bits_per_parameter(rungs[i]))
    if peers <= 1:
        return order[-1]
    shared = [i for i in order if not rungs[i].lone_only]
    budget_bits = upload_bps * spec.rounds.length_s * UPLINK_SHARE
    fitting = [i for i in shared if bits_per_parameter(rungs[i]) * parameters * peers <= budget_bits]
    return fitting[-1] if fitting else shared[0]
