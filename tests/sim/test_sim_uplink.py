"""A peer whose uplink is too slow for all that a peer usually sends: it is in step, and costs the others nothing."""

from __future__ import annotations

from tests.sim.health import assert_agreed
from tests.sim.simpeer import PeerKnobs
from tests.sim.world import World, sim_spec

BYTES_PER_S = 500.0  # gossip, pushes and answers of a peer that knows no limit are twice as much here


def test_a_peer_with_a_slow_uplink_follows_the_swarm() -> None:
    world = World(sim_spec(), 5)
    for _ in range(3):
        world.add()
    slow = world.add(PeerKnobs(upload_bps=8.0 * BYTES_PER_S, uplink=True))
    world.run_until(world.close_of(8))
    for round_ in range(9, 18):
        link = assert_agreed(world, round_)
        assert len(link.authors) >= 3, "the others' contributions are in"
        assert link.seen_s - world.close_of(round_) < world.spec.rounds.grace_max_s + world.spec.rounds.step_max_s
    assert slow.training and slow.machine.rounds.others()
    assert abs(slow.machine.view.clock.offset_s) < 0.15, "queueing on the uplink is no difference of clocks"
