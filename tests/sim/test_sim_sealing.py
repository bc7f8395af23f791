"""Who seals: the sealer dies at every point, all regular candidates are gone, authors and sealers say two things."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.health import assert_agreed, next_sealer, settled
from tests.sim.simpeer import SimPeer
from tests.sim.simworker import LAYOUT
from tests.sim.world import World, sim_spec
from tscale.kernels.codec import Rung, encode
from tscale.protocol.chain import Link
from tscale.protocol.hashing import blob_ref, chunk_hashes
from tscale.protocol.identity import Identity
from tscale.protocol.messages import Push, PutChunk, with_bulk
from tscale.protocol.messages import encode as frame_of
from tscale.protocol.records import Announcement, Manifest, SignedRecord, seal_record


def running(seed: int, peers: int = 5, rounds: int = 3) -> World:
    """A swarm that has sealed the rounds before `rounds`, a second before the close of that one."""
    world = World(sim_spec(), seed)
    for _ in range(peers):
        world.add()
    world.run_until(world.close_of(rounds) - 1.0)
    return world


@pytest.mark.parametrize("after_close_s", [-0.5, 0.1, 0.25, 0.5, 0.9, 1.5])
def test_the_sealer_dies_around_the_close(after_close_s: float) -> None:
    world = running(seed=1)
    sealer = next_sealer(world, 3)
    world.run_until(world.close_of(3) + after_close_s)
    world.crash(sealer)
    assert_agreed(world, 3)
    assert_agreed(world, 4)


def test_the_sealer_dies_with_a_manifest_that_nobody_got() -> None:
    world = running(seed=2)
    sealer = next_sealer(world, 3)
    world.run_until(world.close_of(3) + 0.2)
    for peer in world.trainers():
        if peer is not sealer:
            world.cut.add(frozenset((peer.public, sealer.public)))
    while not any(round_ == 3 for _, round_ in sealer.machine.rounds.sealed):
        world.run_until(world.now + 0.1)
        assert world.now < world.close_of(4), "it never sealed"
    world.crash(sealer)
    link = assert_agreed(world, 3)
    assert link.signed is not None and link.signed.public != sealer.public
    assert_agreed(world, 4)


def test_a_manifest_reaches_one_peer_and_its_sealer_dies() -> None:
    world = running(seed=3)
    sealer = next_sealer(world, 3)
    while not any(round_ == 3 for _, round_ in sealer.machine.rounds.sealed):
        world.run_until(world.now + 0.02)
    for peer in world.trainers()[1:]:
        if peer is not sealer:
            world.cut.add(frozenset((peer.public, sealer.public)))
    world.run_until(world.now + 0.3)
    world.crash(sealer)
    assert_agreed(world, 3)
    assert_agreed(world, 4)


def test_all_regular_candidates_are_gone() -> None:
    world = World(sim_spec(), 4)
    regulars = [world.add() for _ in range(3)]
    world.run_until(world.close_of(3) - 6.0)
    fresh = [world.add(), world.add()]
    world.run_until(world.close_of(3) - 0.2)
    assert all(peer.training for peer in fresh), "they have what the regulars have"
    for peer in regulars:
        world.crash(peer)
    world.run_until(world.close_of(6))
    head = fresh[0].machine.sync.head
    assert head is not None and head.round >= 5
    assert head.authors == {p.public for p in fresh}
    assert_agreed(world, 6)


def test_an_author_announces_two_contributions() -> None:
    world = running(seed=5)
    evil = Identity.from_secret(bytes(range(32)))
    world.run_until(world.close_of(3) + 0.1)
    one, two = world.trainers()[:2]
    for number, victim in enumerate((one, two)):
        signed, blob = contribution(world, victim, evil, 3, number)
        message = PutChunk(signed.bytes, b"".join(chunk_hashes(blob)), 0)
        frame = with_bulk(frame_of(world.spec.swarm_id, message, world.now), blob)
        victim.answer(evil.public, frame)
    link = assert_agreed(world, 3)
    assert sum(author == evil.public for author, _ in link.taken) <= 1
    assert_agreed(world, 4)


def test_a_sealer_publishes_two_manifests() -> None:
    world = running(seed=6)
    sealer = next_sealer(world, 3)
    while not any(round_ == 3 for _, round_ in sealer.machine.rounds.sealed):
        world.run_until(world.now + 0.02)
    first = max(sealer.machine.view.chain.links.values(), key=lambda link: link.round).signed
    assert first is not None and first.public == sealer.public
    kept = first.contributions[:-1]
    tokens = first.record.total_tokens - first.contributions[-1].record.tokens
    second = replace(first.record, total_tokens=tokens, contributions=tuple(c.bytes for c in kept))
    other: SignedRecord[Manifest] = seal_record(sealer.identity, second)
    victim = next(p for p in world.trainers() if p is not sealer)
    victim.answer(sealer.public, frame_of(world.spec.swarm_id, Push((other.bytes,)), world.now))
    assert_agreed(world, 3)
    assert_agreed(world, 4)


def test_a_sealer_whose_blobs_nobody_can_get_is_passed_over() -> None:
    world = running(seed=7)
    evil = Identity.from_secret(bytes(range(1, 33)))
    world.run_until(world.close_of(3) + 0.1)
    victim = world.trainers()[0]
    signed, _ = contribution(world, victim, evil, 3, 0)
    head = victim.machine.sync.head
    assert head is not None
    manifest = Manifest(
        swarm=world.spec.swarm_id,
        round=3,
        parent=head.digest,
        parent_state=victim.states[head.digest],
        total_tokens=head.total + signed.record.tokens,
        contributions=(signed.bytes,),
    )
    bait = seal_record(evil, manifest)
    for peer in world.trainers():
        peer.answer(evil.public, frame_of(world.spec.swarm_id, Push((bait.bytes,)), world.now))
    seen = settled(world, 5)
    assert seen.views == 1 and seen.folded == 5, seen
    chain = [p.machine.sync.head for p in world.trainers()]
    assert all(link is not None and bait.digest not in _ancestors(link) for link in chain)
    assert_agreed(world, 6)


def contribution(
    world: World, at: SimPeer, author: Identity, round_: int, number: int
) -> tuple[SignedRecord[Announcement], bytes]:
    """A valid contribution of a stranger to the state that a peer is at."""
    rung = world.spec.codec.rungs[0]
    residual = np.random.default_rng(number).normal(0, 0.01, LAYOUT.numel).astype(np.float32)
    blob = encode(residual, LAYOUT, Rung(rung.kept_per_chunk, rung.bits))
    head = at.machine.sync.head
    assert head is not None
    record = Announcement(
        swarm=world.spec.swarm_id,
        round=round_,
        base=head.digest,
        base_state=at.states[head.digest],
        blob=blob_ref(blob),
        tokens=100,
        steps=1,
        loss=1.0,
        rung=0,
    )
    return seal_record(author, record), blob


def _ancestors(link: Link | None) -> set[bytes]:
    found: set[bytes] = set()
    while link is not None:
        found.add(link.digest)
        link = link.parent
    return found
