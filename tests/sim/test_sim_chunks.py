"""A snapshot that shares chunks with one in the store: only what differs is fetched."""

from __future__ import annotations

from tests.sim.world import sim_spec
from tscale.protocol.effects import CopyChunk, Request
from tscale.protocol.fetching import Fetching
from tscale.protocol.hashing import CHUNK_BYTES, BlobRef, blob_root, chunk_hashes
from tscale.protocol.identity import Identity
from tscale.protocol.messages import ChunkReply, GetChunk, HashesReply, decode, with_bulk
from tscale.protocol.peer import PeerMachine
from tscale.protocol.view import PeerConfig

ALICE = bytes(range(32))
NOW = 1_000_001.0


def blob(*fills: int) -> tuple[bytes, BlobRef, tuple[bytes, ...]]:
    """A blob of one chunk per fill byte."""
    data = b"".join(bytes([fill]) * CHUNK_BYTES for fill in fills)
    hashes = chunk_hashes(data)
    return data, BlobRef(blob_root(len(data), hashes), len(data)), hashes


def test_only_the_chunks_that_differ_are_fetched() -> None:
    spec = sim_spec()
    machine = PeerMachine(PeerConfig(spec, Identity.from_secret(bytes(32)), "trainer", 1))
    view, fetching = machine.view, machine.fetching
    assert isinstance(fetching, Fetching)
    view.set_now(NOW)
    _, mine, my_hashes = blob(1, 2, 3, 4)
    data, theirs, their_hashes = blob(1, 2, 9, 4)
    view.transfers.add_complete(mine, my_hashes)
    view.members.contact(ALICE)
    view.want(theirs, "snapshot", ALICE)
    asked: list[int] = []
    copied: list[tuple[int, int]] = []
    for _ in range(8):
        view.fetch_due = True
        fetching.tick()
        effects, view.effects = view.effects, []
        copied += [(e.index, e.source.index) for e in effects if isinstance(e, CopyChunk)]
        for request in (e for e in effects if isinstance(e, Request)):
            message = decode(request.payload).message
            if isinstance(message, GetChunk):
                asked.append(message.index)
                at = message.index * CHUNK_BYTES
                frame = with_bulk(view.frame(ChunkReply(theirs.root, message.index)), data[at : at + CHUNK_BYTES])
            else:
                frame = view.frame(HashesReply(theirs.root, b"".join(their_hashes)))
            view.pending.pop(request.token).done(decode(frame), "")
    assert view.holds(theirs.root)
    assert asked == [2]
    assert copied == [(0, 0), (1, 1), (3, 3)]
