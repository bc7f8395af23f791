"""Two chains: the owner of more tokens wins, however long the parting was."""

from __future__ import annotations

import pytest

from tests.sim.health import assert_agreed, check, link_at
from tests.sim.world import Faults, World, sim_spec


def parted(world: World, ones: int, speeds: tuple[int, int]) -> None:
    """Part the present peers: the first `ones` to side 1, the others to side 2, with steps a round as given."""
    for i, peer in enumerate(world.trainers()):
        side = 1 if i < ones else 2
        world.sides[peer.public] = side
        assert peer.worker is not None
        peer.worker.speed = speeds[side - 1]


@pytest.mark.parametrize(("ones", "speeds", "winner"), [(4, (2, 2), 1), (2, (2, 2), 2), (2, (8, 1), 1), (4, (1, 8), 2)])
def test_the_side_with_more_tokens_wins(ones: int, speeds: tuple[int, int], winner: int) -> None:
    world = World(sim_spec(), 40 + ones + speeds[0], Faults(loss=0.02))
    for _ in range(6):
        world.add()
    world.run_until(world.close_of(3))
    parted(world, ones, speeds)
    world.run_until(world.close_of(8))
    for side in (1, 2):
        seen = check(world, 7, side)
        assert seen.views == 1 and seen.folded == seen.live, seen
    best = next(p for p in world.trainers() if world.sides[p.public] == winner)
    theirs = link_at(best.machine.sync.head, 7)
    world.sides.clear()
    link = assert_agreed(world, 9)
    assert link_at(link, 7) is theirs or link_at(link, 7).digest == theirs.digest


@pytest.mark.parametrize("rounds", [1, 2, 3, 24])
def test_a_parting_of_any_length_heals_within_two_rounds(rounds: int) -> None:
    world = World(sim_spec(), 60 + rounds, Faults(loss=0.03, clock_skew_s=0.2))
    for _ in range(6):
        world.add()
    world.run_until(world.close_of(4))
    parted(world, 3, (3, 2))
    world.run_until(world.close_of(4 + rounds) + 1.0)
    world.sides.clear()
    assert_agreed(world, 4 + rounds + 2)
    assert len(assert_agreed(world, 4 + rounds + 3).authors) >= 5
