"""Coming in: to a lone peer, with a donor that dies, and back to a swarm of which only a seed is left."""

from __future__ import annotations

import pytest

from tests.sim.health import assert_agreed, heads
from tests.sim.simpeer import PeerKnobs
from tests.sim.world import Faults, World, sim_spec
from tscale.protocol.effects import Notice


def test_a_lone_peer_seals_dense_rounds_alone() -> None:
    world = World(sim_spec(), 1)
    lone = world.add()
    for round_ in range(1, 6):
        link = assert_agreed(world, round_)
        assert link.signed is not None and len(link.signed.contributions) == 1
        rung = world.spec.codec.rungs[link.signed.contributions[0].record.rung]
        assert rung.lone_only, "nobody has to carry it, so nothing is left out"
    assert lone.machine.sync.head is not None and lone.machine.sync.head.depth >= 5


@pytest.mark.parametrize("alone_rounds", [1, 2, 3, 6, 9])
def test_a_joiner_takes_over_what_a_lone_peer_has_learned(alone_rounds: int) -> None:
    world = World(sim_spec(), 10 + alone_rounds)
    lone = world.add()
    world.run_until(world.close_of(alone_rounds) + 5.0)
    joiner = world.add(knows=1)
    link = assert_agreed(world, alone_rounds + 2)
    assert link.authors == {lone.public, joiner.public}
    assert link.depth >= alone_rounds + 2, "the lone rounds are part of the chain"
    rungs = (
        [world.spec.codec.rungs[c.record.rung] for c in link.signed.contributions if link.signed] if link.signed else []
    )
    assert rungs and not any(rung.lone_only for rung in rungs)


def test_two_lone_peers_that_find_each_other_go_on_as_one() -> None:
    world = World(sim_spec(), 2)
    one = world.add(knows=0)
    world.sides[one.public] = 1
    two = world.add(knows=0, side=2)
    world.run_until(world.close_of(3) + 3.0)
    assert len(heads(world)) == 2
    world.sides.clear()
    for peer in (one, two):
        peer.feed(_contact(two if peer is one else one))
    assert_agreed(world, 6)
    assert assert_agreed(world, 7).authors == {one.public, two.public}


def test_a_joiner_survives_the_death_of_its_donor() -> None:
    for seed, after_s in enumerate((0.4, 1.1, 1.4, 2.0), start=20):
        world = World(sim_spec(), seed, Faults(loss=0.02))
        for _ in range(5):
            world.add()
        world.run_until(world.close_of(9) + 4.0)
        joiner = world.add(knows=1)
        (donor,) = [world.peers[c.public] for c in joiner.machine.view.members.contacts.values() if c.bootstrap]
        world.run_until(world.now + after_s)
        world.crash(donor)
        world.run_until(world.close_of(11))
        assert joiner.training, f"seed {seed}: {joiner.training_reason}"
        assert_agreed(world, 12)


def test_all_trainers_come_back_to_a_seed() -> None:
    world = World(sim_spec(), 30)
    seed = world.add(PeerKnobs(role="seed"))
    trainers = [world.add(knows=1) for _ in range(3)]
    before = assert_agreed(world, 6)
    world.run_until(world.now + 5.0)
    for peer in trainers:
        world.crash(peer)
    world.run_rounds(4)
    back = [world.add(knows=1, disk=trainers[0].disk), world.add(knows=1, disk=trainers[1].disk)]
    new = world.add(knows=1)
    world.run_rounds(3)
    after = assert_agreed(world, 14)
    assert after.authors == {p.public for p in (*back, new)}
    assert after.total > before.total and seed.machine.sync.head is not None
    here = after
    while here.depth > before.depth and here.parent is not None:
        here = here.parent
    assert here is not None and here.digest == before.digest, "the old rounds are kept"
    assert not any(n.event == "chain_given_up" for p in back for n in p.notices if isinstance(n, Notice))


def _contact(peer):
    from tscale.protocol import events as ev

    return ev.Contacts(((peer.public, ("/ip4/127.0.0.1/tcp/4000",)),))
