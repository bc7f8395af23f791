"""What a hostile peer signs: well-formed manifests over contributions that do not exist."""

from __future__ import annotations

from tests.sim.simpeer import SimPeer
from tests.sim.world import World
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
        blob=blob_ref(b"no such blob %d" % round_ + author.public),
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


def push(world: World, peer: SimPeer, author: Identity, *manifests: SignedRecord[Manifest]) -> None:
    """Hand manifests to one peer, as if its author had dialled it."""
    peer.answer(author.public, encode(world.spec.swarm_id, Push(tuple(m.bytes for m in manifests)), world.now))
