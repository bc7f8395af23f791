"""A peer whose state is not what the others have: it notices, repairs, and is not followed meanwhile."""

from __future__ import annotations

import pytest

from tests.sim.health import assert_agreed, heads, next_sealer
from tests.sim.world import Faults, World, sim_spec


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_drifted_peer_notices_and_repairs(seed: int) -> None:
    world = World(sim_spec(), seed, Faults(loss=0.02))
    for _ in range(5):
        world.add()
    assert_agreed(world, 5)
    victim = world.trainers()[seed]
    assert victim.worker is not None
    victim.worker.flip = 1e-3
    world.run_until(world.close_of(7) + 6.0)  # the next fold goes wrong
    assert len(heads(world)) >= 1
    world.run_until(world.close_of(9) - 1.0)
    assert [n.event for n in victim.notices if n.event == "drifted"] == ["drifted"]
    assert "repaired" in [n.event for n in victim.notices], "it folded its head again"
    assert_agreed(world, 9)
    assert len(assert_agreed(world, 11).authors) == 5


def test_a_drifted_sealer_is_not_followed() -> None:
    world = World(sim_spec(), 7)
    for _ in range(5):
        world.add()
    assert_agreed(world, 5)
    world.run_until(world.close_of(7) - 1.0)
    sealer = next_sealer(world, 7)
    assert sealer.worker is not None
    # its state changes behind its machine's back: the machine still vouches for what it should have been
    sealer.worker.flip = 1e-3
    world.run_until(world.close_of(8) - 1.0)
    right = [p for p in world.trainers() if p is not sealer]
    states = {p.states[link.digest] for p in right if (link := p.machine.sync.head) is not None}
    assert len(states) == 1 and states != {sealer.worker.digest}
    world.run_until(world.close_of(9) - 0.5)
    head = right[0].machine.sync.head
    assert head is not None and head.signed is not None and head.signed.record.parent_state in states
    assert "repaired" in [notice.event for notice in sealer.notices], "it may seal again, but only after that"
    assert_agreed(world, 10)
