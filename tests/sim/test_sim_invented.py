"""Peers that somebody has invented: records and announcements of keys that nobody runs, at addresses nobody answers."""

from __future__ import annotations

from tests.sim.health import assert_agreed
from tests.sim.world import World, sim_spec
from tscale.protocol.hashing import blob_ref
from tscale.protocol.identity import Identity
from tscale.protocol.messages import Push, encode
from tscale.protocol.records import Announcement, PeerRecord, SignedRecord, seal_record

PEERS = 5
INVENTED = 60
ROUNDS = range(5, 7)


def invent(world: World, identity: Identity) -> SignedRecord[PeerRecord]:
    """A heartbeat that is good for as long as a record may be."""
    addrs = (f"/ip4/10.0.0.{identity.public[0]}/tcp/4001",)
    day = world.now + 86_000.0
    return seal_record(identity, PeerRecord(world.spec.swarm_id, "trainer", addrs, "", 1, 1, world.now, day, False))


def promise(world: World, identity: Identity, round_: int) -> SignedRecord[Announcement]:
    """A contribution from the head whose blob nobody has."""
    head = world.trainers()[0].machine.sync.head
    assert head is not None
    state = world.trainers()[0].states[head.digest]
    blob = blob_ref(identity.public + round_.to_bytes(4, "little"))
    return seal_record(identity, Announcement(world.spec.swarm_id, round_, head.digest, state, blob, 100, 1, 1.0, 0))


def test_a_flood_of_invented_peers_keeps_nobody_out() -> None:
    """Nobody waits for them, and pushes and requests to them leave room for those to real peers."""
    world = World(sim_spec(), 11)
    for _ in range(PEERS):
        world.add()
    keys = [Identity.from_secret(number.to_bytes(32, "little")) for number in range(1, INVENTED + 1)]
    evil = keys[0]
    world.run_until(world.close_of(ROUNDS[0] - 1))
    sealed_s: list[float] = []
    for round_ in ROUNDS:
        world.run_until(world.close_of(round_) - 6.0)
        beats = tuple(invent(world, key).bytes for key in keys)
        for peer in world.trainers():
            peer.answer(evil.public, encode(world.spec.swarm_id, Push(beats), world.now))
        world.run_until(world.close_of(round_) + 0.01)
        promises = tuple(promise(world, key, round_).bytes for key in keys[1:])
        for peer in world.trainers():
            peer.answer(evil.public, encode(world.spec.swarm_id, Push(promises), world.now))
        link = assert_agreed(world, round_)
        assert link.authors == {peer.public for peer in world.trainers()}
        sealed_s.append(link.seen_s - world.close_of(round_))
    assert max(sealed_s) < sim_spec().rounds.grace_max_s, sealed_s
