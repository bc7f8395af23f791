"""What a simulated swarm is judged by, round by round.

Round r has *settled* at the close of round r + 1: a whole box has passed in which its manifest and blobs could travel.
Then, for the trainers that are alive:

- a peer is *in step* since the moment its machine first allowed training in this life (it had heard from its contacts
  and held the head of what they know); it stays so until it crashes, whatever goes wrong with it later;
- a peer has *folded* round r when its head's chain reaches round r or beyond;
- its *view* of round r is the manifest that its chain has for it (none, when the chain passes over it), with the state
  digest that its worker computed when it folded or loaded it.

`agree` looks at the views of all peers in step that have folded r; `share` is the part of the peers in step since the
close of round r that have folded it with the view most of them hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.sim.simpeer import SimPeer
from tests.sim.world import World
from tscale.protocol.chain import Link, candidate_order

ViewOfRound = tuple[bytes, bytes]


@dataclass(frozen=True)
class Health:
    """One settled round of one side."""

    round: int
    side: int
    live: int
    in_step: int
    folded: int
    views: int
    contributions: int

    @property
    def share(self) -> float:
        """Part of the peers in step that have folded the round as most did."""
        return self.folded / self.in_step if self.in_step else 1.0


def link_at(head: Link | None, round_: int) -> Link | None:
    """The last link of a chain that is not after a round."""
    while head is not None and head.round > round_:
        head = head.parent
    return head


def view_of(peer: SimPeer, round_: int) -> ViewOfRound | None:
    """What a peer holds for a round: None when its chain does not reach it."""
    head = peer.machine.sync.head
    if head is None or head.round < round_:
        return None
    link = link_at(head, round_)
    if link is None:
        return None
    return link.digest, peer.states.get(link.digest, b"")


def check(world: World, round_: int, side: int = 0) -> Health:
    """The health of a settled round on one side."""
    close = world.close_of(round_)
    live = [p for p in world.trainers() if world.sides.get(p.public, 0) == side]
    in_step = [p for p in live if p.first_trained_s is not None]
    before = [p for p in in_step if p.first_trained_s is not None and p.first_trained_s <= close]
    views = [v for v in (view_of(p, round_) for p in in_step) if v is not None]
    manifests = Counter(manifest for manifest, _ in views)
    most = manifests.most_common(1)[0][0] if manifests else b""
    different = {v for v in views if v[1]}
    folded = 0
    for peer in before:
        view = view_of(peer, round_)
        folded += view is not None and view[0] == most
    link = next((p.machine.view.chain.get(most) for p in live if p.machine.view.chain.get(most)), None)
    contributions = len(link.taken) if link is not None and link.round == round_ else 0
    return Health(round_, side, len(live), len(before), folded, max(len(different), len(manifests)), contributions)


def distance(world: World) -> float:
    """The median distance of the living trainers' parameters to the target of their training."""
    found = sorted(p.worker.distance() for p in world.trainers() if p.worker is not None)
    return found[len(found) // 2]


def heads(world: World) -> set[tuple[bytes, bytes]]:
    """The different (manifest, state digest) that the living trainers are at."""
    found = set()
    for peer in world.trainers():
        head = peer.machine.sync.head
        found.add((head.digest, peer.states.get(head.digest, b"")) if head is not None else (b"", b""))
    return found


def settled(world: World, round_: int) -> Health:
    """Run until a round has settled, and look at it."""
    world.run_until(world.close_of(round_ + 1))
    return check(world, round_)


def assert_agreed(world: World, round_: int) -> Link:
    """Run until a round has settled: it was sealed, and every living trainer has folded it to the same state."""
    seen = settled(world, round_)
    message = f"seed {world.seed}, round {round_}: {seen}"
    assert seen.views == 1, message
    assert seen.folded == seen.in_step == seen.live, message
    link = link_at(world.trainers()[0].machine.sync.head, round_)
    assert link is not None and link.round == round_, f"{message}: not sealed"
    return link


def next_sealer(world: World, round_: int) -> SimPeer:
    """The first candidate to seal a round on the head that all trainers share."""
    parent = world.trainers()[0].machine.sync.head
    assert parent is not None
    return min(world.trainers(), key=lambda p: candidate_order(parent, round_, p.public))
