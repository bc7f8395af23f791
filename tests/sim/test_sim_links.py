"""Uneven machines: a slow link, a peer that can only dial out, a clock that is 20 s wrong."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim.health import assert_agreed
from tests.sim.simpeer import PeerKnobs, SimPeer
from tests.sim.world import Faults, World, sim_spec
from tscale.protocol.chain import Link


def chain_of(peer: SimPeer) -> Iterator[Link]:
    """The manifests of a peer's chain, newest first."""
    link = peer.machine.sync.head
    while link is not None and link.signed is not None:
        yield link
        link = link.parent


def accepted(peer: SimPeer, of: SimPeer, since: int) -> set[int]:
    """The rounds for which a peer's chain holds a contribution of another."""
    return {r for link in chain_of(peer) for author, r in link.taken if author == of.public and r >= since}


def test_one_slow_link_slows_nobody_else() -> None:
    world = World(sim_spec(), 1, Faults(loss=0.02))
    peers = [world.add() for _ in range(5)]
    slow = world.add(PeerKnobs(slow_s=0.7))
    for round_ in range(3, 12):
        assert_agreed(world, round_)
    assert all(len(accepted(peers[0], p, 3)) >= 8 for p in peers), "of nine rounds"
    assert len(accepted(peers[0], slow, 2)) >= 7, "its contributions come late, but most are taken"


def test_a_peer_that_can_only_dial_out_contributes() -> None:
    world = World(sim_spec(), 2, Faults(loss=0.02))
    peers = [world.add() for _ in range(4)]
    hidden = [world.add(PeerKnobs(dialable=False)) for _ in range(2)]
    for round_ in range(2, 10):
        assert_agreed(world, round_)
    for peer in hidden:
        assert peer.machine.spread.addrs == ()
        assert len(accepted(peers[0], peer, 2)) >= 7


def test_a_clock_that_is_20_seconds_wrong_is_corrected() -> None:
    for seed, skew_s in ((3, 20.0), (4, -20.0)):
        world = World(sim_spec(), seed)
        peers = [world.add() for _ in range(4)]
        wrong = world.add(PeerKnobs(skew_s=skew_s))
        for round_ in range(1, 8):
            assert_agreed(world, round_)
        assert abs(wrong.machine.view.clock.offset_s + skew_s) < 0.2
        assert "clock is 20.0 s" in (wrong.machine.view.clock.warning() or "")
        assert len(accepted(peers[0], wrong, 3)) >= 5
        assert all(abs(p.machine.view.clock.offset_s) < 0.2 for p in peers), "it moves nobody else's"
