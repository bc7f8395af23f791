"""A peer that announces the blobs of others as its own, as they are or with another size or rung."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.sim.health import assert_agreed
from tests.sim.simpeer import SimPeer
from tests.sim.world import World, sim_spec
from tscale.protocol.hashing import BlobRef
from tscale.protocol.identity import Identity
from tscale.protocol.messages import Push, encode
from tscale.protocol.records import Announcement, SignedRecord, seal_record

PEERS = 4
RUNGS = len(sim_spec().codec.rungs)


def altered(honest: Announcement, way: str) -> Announcement:
    if way == "rung":
        return replace(honest, rung=(honest.rung + 1) % RUNGS)
    if way == "size":
        return replace(honest, blob=BlobRef(honest.blob.root, honest.blob.size_bytes - 5))
    return replace(honest, tokens=honest.tokens * 9)


class Copyist:
    """Looks over the shoulder of every peer, and tells all others first what it makes of their announcements."""

    def __init__(self, world: World, way: str) -> None:
        self.world = world
        self.way = way
        self.told: set[bytes] = set()
        self.keys = self._keys()

    def _keys(self) -> Iterator[Identity]:
        for number in range(1, 1 << 16):
            yield Identity.from_secret(number.to_bytes(32, "little"))

    def look(self, round_: int) -> None:
        for peer in self.world.trainers():
            own = peer.machine.view.pool.of_round(round_).get(peer.public)
            if own is not None and own.digest not in self.told:
                self.told.add(own.digest)
                self._tell(peer, own)

    def _tell(self, author: SimPeer, own: SignedRecord[Announcement]) -> None:
        evil = next(self.keys)
        lie = seal_record(evil, altered(own.record, self.way)).bytes
        push = Push((own.bytes, lie) if self.way == "rung" else (lie,))  # whichever order does more harm
        for peer in self.world.trainers():
            if peer is not author:
                peer.answer(evil.public, encode(self.world.spec.swarm_id, push, self.world.now))


@pytest.mark.parametrize("way", ["rung", "size", "tokens"])
def test_announcing_the_blobs_of_others_keeps_nobody_out(way: str) -> None:
    world = World(sim_spec(), 3)
    for _ in range(PEERS):
        world.add()
    world.run_until(world.close_of(4))
    copyist = Copyist(world, way)
    for round_ in range(5, 9):
        world.run_until(world.close_of(round_))
        while world.now < world.close_of(round_) + 4.0:
            world.run_until(world.now + 0.005)
            copyist.look(round_)
        link = assert_agreed(world, round_)
        assert link.signed is not None
        assert len(link.blobs) == len(link.signed.contributions) == PEERS, "every blob counts, and once"
        assert link.authors == {peer.public for peer in world.trainers()}
    assert len(copyist.told) == 4 * PEERS
    assert {contact.strikes for p in world.trainers() for contact in p.machine.view.members.contacts.values()} == {0}
