"""Chains that anybody can claim: many tokens, but no blobs. The swarm goes on with the one it can have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.health import assert_agreed
from tests.sim.world import World, sim_spec
from tscale.protocol.chain import Link
from tscale.protocol.hashing import blob_ref
from tscale.protocol.identity import Identity
from tscale.protocol.messages import Push, encode
from tscale.protocol.records import Announcement, Manifest, SignedRecord, seal_record


def claim(world: World, author: Identity, parent: Link | SignedRecord[Manifest], round_: int) -> SignedRecord[Manifest]:
    """A well-formed manifest of a stranger with as many tokens as one may claim, over a blob that does not exist."""
    total = parent.total if isinstance(parent, Link) else parent.record.total_tokens
    state = bytes(32)
    if isinstance(parent, Link):
        state = next(p.states[parent.digest] for p in world.trainers() if parent.digest in p.states)
    announcement = Announcement(
        swarm=world.spec.swarm_id,
        round=round_,
        base=parent.digest,
        base_state=state,
        blob=blob_ref(b"no such blob %d" % round_),
        tokens=world.spec.caps.max_contribution_tokens,
        steps=1,
        loss=0.0,
        rung=0,
    )
    signed = seal_record(author, announcement)
    return seal_record(
        author,
        Manifest(world.spec.swarm_id, round_, parent.digest, state, total + announcement.tokens, (signed.bytes,)),
    )


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
