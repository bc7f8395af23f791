"""A peer whose uplink is too slow for all that a peer usually sends: it is in step, and costs the others nothing."""

from __future__ import annotations

import pytest

from tests.sim.health import assert_agreed
from tests.sim.simpeer import PeerKnobs
from tests.sim.world import World, sim_spec

BYTES_PER_S = 1000.0  # about what gossip, pushes and answers of a peer that knows no limit are here


@pytest.mark.parametrize("seed", [5, 7])
def test_a_peer_with_a_slow_uplink_follows_the_swarm(seed: int) -> None:
    world = World(sim_spec(), seed)
    for _ in range(3):
        world.add()
    slow = world.add(PeerKnobs(upload_bps=8.0 * BYTES_PER_S, uplink=True))
    world.run_until(world.close_of(8))
    for round_ in range(9, 18):
        link = assert_agreed(world, round_)
        assert len(link.authors) >= 3, "the others' contributions are in"
        # where it is the first to seal, its manifest may come so late that the second one seals
        late_s = world.spec.rounds.grace_max_s + 2.0 * world.spec.rounds.step_max_s
        assert link.seen_s - world.close_of(round_) < late_s
    assert slow.training and slow.machine.rounds.others()
    assert abs(slow.machine.view.clock.offset_s) < 0.15, "queueing on the uplink is no difference of clocks"
