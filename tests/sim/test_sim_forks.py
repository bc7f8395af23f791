"""Two chains: the owner of more tokens wins, however long the parting was."""

from __future__ import annotations

import pytest

from tests.sim.claims import claim, push
from tests.sim.health import assert_agreed, check, link_at
from tests.sim.simpeer import SimPeer
from tests.sim.world import Faults, World, sim_spec
from tscale.protocol.hashing import digest
from tscale.protocol.identity import Identity


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


class Claimants:
    """Strangers who claim branches beside and on the head of every peer, each peer's own ones."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number

    def claim(self) -> None:
        world = self.world
        for peer in world.trainers():
            head = peer.machine.sync.head
            assert head is not None and head.parent is not None
            for n in range(4):
                self.number += 1
                evil = Identity.from_secret(digest("test", b"claimant", self.number.to_bytes(4, "little")))
                base = head if n % 2 else head.parent
                made = [claim(world, evil, base, base.round + 1)]
                while made[-1].record.round + 1 <= peer.machine.view.times.round_at(world.now) and len(made) < 3:
                    made.append(claim(world, evil, made[-1], made[-1].record.round + 1))
                push(world, peer, evil, *made)


@pytest.mark.parametrize(("rounds", "number"), [(8, 1000), (20, 2000)])
def test_two_peers_that_were_parted_among_claims_are_one_again_soon(rounds: int, number: int) -> None:
    """What is claimed on one peer's branch counts nothing for it: the other does not know of it."""
    world = World(sim_spec(), 1)
    one, other = world.add(), world.add()
    world.run_until(world.close_of(4))
    evil = Claimants(world, number)
    for round_ in range(32 + rounds):
        world.run_rounds(1)
        if round_ == 32:
            world.sides = {one.public: 1, other.public: 2}
        if round_ % 4 == 0:
            evil.claim()
    world.sides.clear()
    assert heads_differ(one, other)
    world.run_rounds(5)
    assert not heads_differ(one, other)
    assert {one.public, other.public} == assert_agreed(world, 4 + 32 + rounds + 6).authors


def heads_differ(one: SimPeer, other: SimPeer) -> bool:
    """Whether neither peer's head is the other's or the one before it."""
    ends = [p.machine.sync.head for p in (one, other)]
    near = [{link.digest, link.parent.digest} for link in ends if link is not None and link.parent is not None]
    return not near[0] & near[1]
