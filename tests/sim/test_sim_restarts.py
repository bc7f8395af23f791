"""A worker that dies and comes back some manifests older: the peer is in step again soon, whatever others claim."""

from __future__ import annotations

import pytest

from tests.sim.claims import claim, push
from tests.sim.health import assert_agreed, heads
from tests.sim.simpeer import SimPeer
from tests.sim.simworker import BOOT_S, Checkpoint, SimWorker
from tests.sim.world import World, sim_spec
from tscale.protocol import events as ev
from tscale.protocol.identity import Identity

EVIL = Identity.from_secret(bytes(range(3, 35)))


def run_with_checkpoints(world: World, peer: SimPeer, rounds: int) -> list[Checkpoint]:
    """The peer's checkpoint in the middle of each round."""
    kept: list[Checkpoint] = []
    for round_ in range(rounds):
        world.run_until(world.close_of(round_) + 6.0)
        assert peer.disk.checkpoint is not None
        kept.append(peer.disk.checkpoint)
    return kept


def restart_worker(world: World, peer: SimPeer, saved: Checkpoint) -> None:
    """The worker dies, and the next one finds an older checkpoint."""
    peer.feed(ev.WorkerDied("killed"))
    peer.disk.checkpoint = saved
    peer.worker = SimWorker(world.spec, peer, world.kernels, 77)
    peer._later(BOOT_S, peer._boot)


def lose_contributions(peer: SimPeer) -> None:
    """The store loses every contribution, and the machine knows it."""
    for root, kind in list(peer.machine.view.kinds.items()):
        if kind == "contribution":
            peer.disk.refs.pop(root, None)
            peer.disk.chunks.pop(root, None)
            peer.feed(ev.BlobMissing(root))


def claim_ahead(world: World, beside: bool, links: int = 3) -> None:
    """Everybody hears of a chain of more tokens that nobody has the blobs of."""
    head = world.trainers()[0].machine.sync.head
    assert head is not None and head.parent is not None
    made = [claim(world, EVIL, head.parent if beside else head, head.round + (not beside))]
    for n in range(1, links):
        made.append(claim(world, EVIL, made[-1], made[0].record.round + n))
    world.run_until(world.close_of(made[-1].record.round - 1) + 0.1)
    for peer in world.trainers():
        push(world, peer, EVIL, *made)


@pytest.mark.parametrize("older", [1, 3, 6])
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_a_worker_that_comes_back_older_finds_its_way_beside_a_claimed_chain(
    older: int, lost: bool, beside: bool
) -> None:
    come_back_older(5 + older, older, lost, beside)


@pytest.mark.parametrize(("seed", "older", "lost", "beside"), [(28, 3, True, False), (31, 3, False, True)])
def test_a_doubting_peer_folds_what_the_others_fold(seed: int, older: int, lost: bool, beside: bool) -> None:
    """These runs showed a peer that never fetched one blob of a manifest, and sealed a smaller one of its own."""
    come_back_older(seed, older, lost, beside)


def come_back_older(seed: int, older: int, lost: bool, beside: bool) -> None:
    """One of four peers restarts from an old checkpoint beside a claimed chain: all are in step soon after."""
    world = World(sim_spec(), seed)
    for _ in range(4):
        world.add()
    victim = world.trainers()[1]
    saved = run_with_checkpoints(world, victim, 9)
    claim_ahead(world, beside)
    if lost:
        lose_contributions(victim)
    restart_worker(world, victim, saved[-1 - older])
    round_ = world.spec.rounds
    now_round = int((world.now - world.close_of(-1)) // round_.length_s)
    for later in range(now_round + 3, now_round + 6):
        assert_agreed(world, later)
    assert len(heads(world)) == 1


@pytest.mark.parametrize("older", [1, 3, 6])
@pytest.mark.parametrize("beside", [None, False, True])
def test_a_lone_peer_that_lost_its_blobs_goes_on_from_what_it_has(older: int, beside: bool | None) -> None:
    world = World(sim_spec(), 5 + older)
    lone = world.add()
    saved = run_with_checkpoints(world, lone, 9)
    if beside is not None:
        claim_ahead(world, beside)
    lose_contributions(lone)
    restart_worker(world, lone, saved[-1 - older])
    now_round = int((world.now - world.close_of(-1)) // world.spec.rounds.length_s)
    world.run_until(world.close_of(now_round + 3))
    assert lone.training, lone.training_reason
    head = lone.machine.sync.head
    assert head is not None and head.round >= now_round + 1, head.round
    for later in range(now_round + 4, now_round + 30):
        assert_agreed(world, later)


@pytest.mark.parametrize("older", [1, 4])
def test_a_restarted_lone_peer_keeps_its_own_rounds_beside_a_claimed_chain(older: int) -> None:
    world = World(sim_spec(), 20 + older)
    lone = world.add()
    saved = run_with_checkpoints(world, lone, 9)
    claim_ahead(world, beside=True)
    world.run_rounds(1)
    before = lone.machine.sync.head
    assert before is not None
    world.crash(lone)
    lone.disk.checkpoint = saved[-1 - older]
    world.run_rounds(2)
    back = world.add(disk=lone.disk)
    world.run_rounds(4)
    assert back.training
    head = back.machine.sync.head
    while head is not None and head.round > before.round:
        head = head.parent
    assert head is not None and head.digest == before.digest, "nothing that was sealed is lost"
