"""One fixed message of every kind: what the golden vectors and the parser tests start from. Never change one."""

from __future__ import annotations

from tests.helpers.protocol_samples import (
    ALICE,
    T0_UNIX_S,
    sample_announcement,
    sample_manifest,
    sample_peer,
    sample_snapshot,
    sample_spec,
)
from tscale.protocol.hashing import blob_ref, chunk_hashes, digest
from tscale.protocol.messages import (
    Ack,
    BlobsReply,
    ChainReply,
    ChunkReply,
    GetBlobs,
    GetChain,
    GetChunk,
    GetHashes,
    GetSpec,
    Gossip,
    GossipReply,
    HashesReply,
    Message,
    Push,
    PutChunk,
    Refused,
    SpecReply,
    encode,
    with_bulk,
)

SENT_UNIX_S = T0_UNIX_S + 15.25
CHUNK = b"aaa"
BLOB = blob_ref(CHUNK)
HASHES = b"".join(chunk_hashes(CHUNK))


def sample_messages() -> dict[str, tuple[Message, bytes]]:
    """Name -> message and bulk bytes, in the order of their codes."""
    announced, known = sample_announcement(ALICE), sample_peer()
    return {
        "gossip": (Gossip(known.digest[:8] + announced.digest[:8], BLOB.root[:8]), b""),
        "gossip_reply": (GossipReply(announced.digest[:8], b"", (sample_snapshot().bytes,)), b""),
        "push": (Push((announced.bytes,)), b""),
        "get_chunk": (GetChunk(BLOB.root, 0), b""),
        "chunk_reply": (ChunkReply(BLOB.root, 0), CHUNK),
        "get_hashes": (GetHashes(BLOB.root), b""),
        "hashes_reply": (HashesReply(BLOB.root, HASHES), b""),
        "put_chunk": (PutChunk(announced.bytes, HASHES, 0), CHUNK),
        "get_chain": (GetChain((sample_manifest().digest, digest("test", b"base"))), b""),
        "chain_reply": (ChainReply((sample_manifest().bytes,), False), b""),
        "get_spec": (GetSpec(), b""),
        "spec_reply": (SpecReply(sample_spec().to_bytes()), b""),
        "ack": (Ack(), b""),
        "refused": (Refused("not here"), b""),
        "get_blobs": (GetBlobs(BLOB.root + announced.record.blob.root), b""),
        "blobs_reply": (BlobsReply(BLOB.root), CHUNK),
    }


def sample_frame(name: str) -> bytes:
    """The frame of a sample."""
    message, bulk = sample_messages()[name]
    return with_bulk(encode(sample_spec().swarm_id, message, SENT_UNIX_S), bulk)
