"""Chains that anybody can claim: many tokens, but no blobs. The swarm goes on with the one it can have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.claims import claim, push
from tests.sim.health import assert_agreed
from tests.sim.simpeer import PeerKnobs, SimPeer
from tests.sim.world import World, sim_spec
from tscale.protocol.chain import Link
from tscale.protocol.hashing import digest
from tscale.protocol.identity import Identity
from tscale.protocol.messages import Push, encode
from tscale.protocol.records import Manifest, SignedRecord, seal_record


@pytest.mark.parametrize("beside", [True, False])
def test_a_claimed_chain_without_blobs_stops_nobody(beside: bool) -> None:
    world = World(sim_spec(), 1 + beside)
    for _ in range(5):
        world.add()
    evil = Identity.from_secret(bytes(range(32)))
    world.run_until(world.close_of(6) + 6.0)
    head = world.trainers()[0].machine.sync.head
    assert head is not None and head.parent is not None
    # on top of the head, or beside it
    first = claim(world, evil, head.parent, head.round) if beside else claim(world, evil, head, 7)
    second = claim(world, evil, first, 7 if beside else 8)
    world.run_until(world.close_of(7) - 5.0)
    for peer in world.trainers():
        peer.answer(evil.public, encode(world.spec.swarm_id, Push((first.bytes, second.bytes)), world.now))
    for round_ in (7, 8, 9):
        link = assert_agreed(world, round_)
        assert evil.public not in link.authors


def test_the_swarm_does_not_take_over_a_claimed_chain_later() -> None:
    world = World(sim_spec(), 5)
    for _ in range(4):
        world.add()
    evil = Identity.from_secret(bytes(range(1, 33)))
    world.run_until(world.close_of(5) + 6.0)
    head = world.trainers()[0].machine.sync.head
    assert head is not None and head.parent is not None
    first = claim(world, evil, head.parent, head.round)
    second = claim(world, evil, first, head.round + 1)
    world.run_until(world.close_of(6) + 0.1)
    for peer in world.trainers():
        peer.answer(evil.public, encode(world.spec.swarm_id, Push((first.bytes, second.bytes)), world.now))
    for round_ in range(7, 14):
        link = assert_agreed(world, round_)
        here: Link | None = link
        while here is not None:
            assert here.digest not in (first.digest, second.digest)
            here = here.parent
    given_up = {p.public for p in world.everyone for n in p.notices if n.event == "chain_given_up"}
    assert len(given_up) == 4


def test_caps_hold_for_claims() -> None:
    world = World(sim_spec(), 6)
    peer = world.add()
    world.run_until(world.close_of(3) + 3.0)
    head = peer.machine.sync.head
    assert head is not None
    evil = Identity.from_secret(bytes(range(2, 34)))
    right = claim(world, evil, head, 4)
    greedy = seal_record(evil, replace(right.record, total_tokens=right.record.total_tokens + 1))
    world.run_until(world.close_of(4))
    peer.answer(evil.public, encode(world.spec.swarm_id, Push((greedy.bytes,)), world.now))
    assert peer.machine.view.chain.get(greedy.digest) is None
    assert [n.fields for n in peer.notices if n.event == "manifest_refused"][-1][1] == (
        "reason",
        "its total of tokens does not add up",
    )


# -- many branches ----------------------------------------------------------------------------------------------------


def branches(world: World, count: int, links: int = 2) -> list[SignedRecord[Manifest]]:
    """Chains of different strangers, all on the head that most trainers have."""
    head = world.trainers()[0].machine.sync.head
    assert head is not None
    made: list[SignedRecord[Manifest]] = []
    for n in range(count):
        evil = Identity.from_secret(digest("test", b"evil", bytes([n])))
        made.append(claim(world, evil, head, head.round + 1))
        for k in range(1, links):
            made.append(claim(world, evil, made[-1], head.round + 1 + k))
    return made


def rounds_trained(world: World, peer: SimPeer, rounds: int) -> int:
    """How often it is training in the middle of the next rounds."""
    seen = 0
    for _ in range(rounds):
        world.run_rounds(1)
        seen += peer.training
    return seen


@pytest.mark.parametrize("away_rounds", [1, 40])
def test_a_lone_peer_that_restarts_among_many_claims_loses_few_rounds(away_rounds: int) -> None:
    world = World(sim_spec(), 9)
    peer = world.add()
    assert_agreed(world, 5)
    made = branches(world, 12)
    world.run_rounds(3)
    push(world, peer, Identity.from_secret(bytes(32)), *made)
    world.run_rounds(1)
    world.crash(peer)
    world.run_rounds(away_rounds)
    back = world.add(disk=peer.disk)
    assert all(back.machine.view.chain.get(signed.digest) for signed in made)
    lost = 40 - rounds_trained(world, back, 40)
    assert lost <= (1 if away_rounds == 1 else 3), f"{lost} of 40 rounds"
    head = back.machine.sync.head
    assert head is not None and head.round >= back.machine.view.times.round_at(world.now) - 2


def test_a_joiner_finds_the_swarm_among_many_claims() -> None:
    world = World(sim_spec(), 10)
    for _ in range(3):
        world.add()
    assert_agreed(world, 8)
    made = branches(world, 12)
    world.run_rounds(3)
    for peer in world.trainers():
        push(world, peer, Identity.from_secret(bytes(32)), *made)
    joiner = world.add()
    world.run_rounds(5)
    assert joiner.training, joiner.training_reason
    for round_ in range(19, 24):
        assert len(assert_agreed(world, round_).authors) == 4


def test_a_claimed_chain_that_grows_every_round_is_given_up_all_the_same() -> None:
    world = World(sim_spec(), 11)
    peer = world.add()
    assert_agreed(world, 5)
    evil = Identity.from_secret(bytes(range(32)))
    made = branches(world, 1, links=4)
    world.crash(peer)
    world.run_rounds(20)
    back = world.add(disk=peer.disk)
    push(world, back, evil, *made)
    trained = 0
    for _ in range(12):
        now_round = back.machine.view.times.round_at(world.now)
        made.append(claim(world, evil, made[-1], now_round))
        push(world, back, evil, made[-1])
        trained += rounds_trained(world, back, 1)
    assert trained >= 12 - 3
    assert back.machine.view.chain.get(made[-1].digest) is not None


def test_each_time_a_branch_is_given_up_it_is_left_alone_for_longer() -> None:
    world = World(sim_spec(), 12)
    peer = world.add()
    assert_agreed(world, 5)
    push(world, peer, Identity.from_secret(bytes(32)), *branches(world, 1, links=1))
    world.run_rounds(1)
    push(world, peer, Identity.from_secret(bytes(32)), *branches(world, 2, links=3))
    times: list[float] = []
    for _ in range(120):
        before = len(peer.notices)
        world.run_rounds(1)
        times += [world.now for notice in peer.notices[before:] if notice.event == "chain_given_up"]
    assert 3 <= len(times) <= 10, times
    assert peer.training


def test_a_seed_keeps_what_the_trainers_follow_beside_a_claimed_chain() -> None:
    world = World(sim_spec(), 13)
    seed = world.add(PeerKnobs(role="seed"))
    for _ in range(2):
        world.add()
    assert_agreed(world, 5)
    made = branches(world, 1, links=3)
    world.run_rounds(3)
    push(world, seed, Identity.from_secret(bytes(32)), *made)
    world.run_until(world.close_of(14) + 5.0)
    head = world.trainers()[0].machine.sync.head
    assert head is not None and head.signed is not None
    assert seed.machine.sync.target().digest in (head.digest, head.signed.record.parent)
    link = head
    for _ in range(6):
        link = link.parent
        assert link is not None and link.signed is not None
        assert all(seed.machine.view.holds(part.record.blob.root) for part in link.signed.contributions)
    assert seed.machine.sync.snapshots.stored
    for peer in world.trainers():
        world.crash(peer)
    joiner = world.add()
    world.run_rounds(3)
    assert joiner.training and joiner.states.keys() & {head.digest}, joiner.training_reason
