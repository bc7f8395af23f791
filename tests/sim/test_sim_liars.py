"""Keys that contribute honestly until the chain knows them, and then vouch for a state that nobody has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.health import assert_agreed
from tests.sim.simpeer import SimPeer
from tests.sim.simworker import LAYOUT
from tests.sim.world import World, sim_spec
from tscale.kernels.codec import Rung, encode
from tscale.protocol.hashing import blob_ref, chunk_hashes, digest
from tscale.protocol.identity import Identity
from tscale.protocol.messages import Push, PutChunk, with_bulk
from tscale.protocol.messages import encode as frame_of
from tscale.protocol.records import Announcement, PeerRecord, seal_record

FALSE = digest("test", b"a state that nobody has")


class Liars:
    """Each contributes a good blob a round, with as many tokens as one may claim, and says what `state` is."""

    def __init__(self, world: World, count: int) -> None:
        self.world = world
        self.keys = [Identity.from_secret(digest("test", b"liar", bytes([n]))) for n in range(count)]

    def contribute(self, round_: int, state: bytes | None) -> None:
        """Hand a contribution of the round from everybody's head to everybody. `state` None: the true one."""
        for key in self.keys:
            for peer in self.world.trainers():
                self._hand_over(peer, key, round_, state)

    def _hand_over(self, peer: SimPeer, key: Identity, round_: int, state: bytes | None) -> None:
        world, head = self.world, peer.machine.sync.head
        assert head is not None
        rung = world.spec.codec.rungs[0]
        seed = key.public[0] * 1000 + round_
        noise = np.random.default_rng(seed).normal(0, 1e-4, LAYOUT.numel).astype(np.float32)
        blob = encode(noise, LAYOUT, Rung(rung.kept_per_chunk, rung.bits))
        record = Announcement(
            swarm=world.spec.swarm_id,
            round=round_,
            base=head.digest,
            base_state=state or peer.states[head.digest],
            blob=blob_ref(blob),
            tokens=world.spec.caps.max_contribution_tokens,
            steps=1,
            loss=1.0,
            rung=0,
        )
        signed = seal_record(key, record)
        now = world.now
        addr = (f"/ip4/10.0.0.{key.public[0]}/tcp/4001",)
        beat = seal_record(key, PeerRecord(world.spec.swarm_id, "trainer", addr, "", 1, 1, now, now + 60.0, False))
        peer.answer(key.public, frame_of(world.spec.swarm_id, Push((beat.bytes,)), now))
        message = PutChunk(signed.bytes, b"".join(chunk_hashes(blob)), 0)
        peer.answer(key.public, with_bulk(frame_of(world.spec.swarm_id, message, now), blob))


def events(peer: SimPeer) -> list[str]:
    return [notice.event for notice in peer.notices]


def swarm(peers: int, liars: int, seed: int) -> tuple[World, Liars]:
    """A swarm that has taken the liars' contributions in the rounds 3 to 5, at the close of round 6."""
    world = World(sim_spec(), seed)
    for _ in range(peers):
        world.add()
    evil = Liars(world, liars)
    for round_ in range(3, 6):
        world.run_until(world.close_of(round_) + 0.05)
        evil.contribute(round_, None)
        if round_ > 3:
            link = assert_agreed(world, round_ - 1)
            assert {key.public for key in evil.keys} <= link.authors
    world.run_until(world.close_of(6))
    return world, evil


@pytest.mark.parametrize(("peers", "liars", "when_s"), [(2, 1, 0.05), (2, 1, 0.4), (3, 1, 0.05), (2, 3, 0.05)])
def test_a_false_state_stops_nobody(peers: int, liars: int, when_s: float) -> None:
    """However many tokens are claimed with it, and one liar for two peers or more liars than peers."""
    world, evil = swarm(peers, liars, 20 + peers)
    honest = {peer.public for peer in world.trainers()}
    full = 0
    for round_ in range(6, 26):
        world.run_until(world.close_of(round_) + when_s)
        evil.contribute(round_, FALSE)
        world.run_until(world.close_of(round_ + 1))
        heads = {head.digest: head for p in world.trainers() if (head := p.machine.sync.head) is not None}
        assert len(heads) == 1
        (head,) = heads.values()
        full += head.round == round_ and honest <= head.authors
    assert full >= (20 if liars < peers else 14), full
    for peer in world.trainers():
        assert events(peer).count("drifted") <= 12 and "seal_refused" not in events(peer)


@pytest.mark.parametrize("liars", [1, 3])
def test_a_real_drift_is_repaired_although_liars_have_been_found_out(liars: int) -> None:
    world, evil = swarm(4, liars, 31)
    for round_ in range(6, 10):
        world.run_until(world.close_of(round_) + 0.05)
        evil.contribute(round_, FALSE)
    victim = world.trainers()[0]
    assert victim.worker is not None
    victim.worker.flip = 1e-3
    for round_ in range(10, 13):
        world.run_until(world.close_of(round_) + 0.05)
        evil.contribute(round_, FALSE)
    link = assert_agreed(world, 13)
    assert {peer.public for peer in world.trainers()} <= link.authors


def test_a_peer_whose_state_before_the_head_is_broken_is_one_with_the_others_again() -> None:
    """To fold the head again helps nothing then: it takes over a state of theirs, or, where it has sealed alone
    meanwhile, goes back to where the chains part."""
    world = World(sim_spec(), 41)
    for _ in range(4):
        world.add()
    assert_agreed(world, 5)
    victim = world.trainers()[1]
    worker = victim.worker
    assert worker is not None
    world.run_until(world.close_of(7) - 1.0)
    anchor = worker.replica.head.anchor.copy()
    anchor[3] += np.float32(1e-3)
    worker.replica.head = replace(worker.replica.head, anchor=anchor)  # the machine knows nothing of it
    worker.digest = digest("test", b"broken")
    world.run_until(world.close_of(25))
    assert 1 <= events(victim).count("drifted") <= 4, events(victim)
    assert len(assert_agreed(world, 26).authors) == 4
