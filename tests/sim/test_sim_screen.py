"""A peer that sends the opposite of what it did: all leave it out, and agree on every state."""

from __future__ import annotations

import pytest

from tests.sim.health import assert_agreed
from tests.sim.world import Faults, World, sim_spec


@pytest.mark.parametrize("seed", [1, 2])
def test_peers_agree_and_leave_an_attacker_out(seed: int) -> None:
    world = World(sim_spec(), seed, Faults(loss=0.02))
    for _ in range(6):
        world.add()
    attacker = world.trainers()[seed]
    assert attacker.worker is not None
    attacker.worker.attacks = True
    rounds = 8
    head = assert_agreed(world, rounds)
    authors: dict[bytes, bytes] = {}
    while head.signed is not None and head.parent is not None:
        authors |= {part.record.blob.root: part.public for part in head.signed.contributions}
        head = head.parent
    left_out = {authors[root] for p in world.trainers() if p.worker for root in p.worker.left_out if root in authors}
    assert left_out == {attacker.public}
    taken = [root for root, author in authors.items() if author == attacker.public]
    found = {root for p in world.trainers() if p.worker for root in p.worker.left_out}
    assert len(taken) >= rounds - 3 and sum(root in found for root in taken) >= rounds - 4
