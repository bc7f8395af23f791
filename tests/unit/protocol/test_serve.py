"""Answering: what a peer gets for each request, and what it gets for nonsense."""

from __future__ import annotations

import pytest

from tests.helpers.message_samples import sample_messages
from tests.helpers.solo import DATA, GENESIS, SPEC, T0, Solo, announce, blob_of, manifest, other, peer_record
from tscale.protocol import effects as fx
from tscale.protocol.canonical import pack
from tscale.protocol.hashing import blob_ref, chunk_hashes
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
    Push,
    PutChunk,
    Refused,
    SpecReply,
    decode,
    encode,
    with_bulk,
)
from tscale.protocol.spec import SwarmSpec

ALICE, BOB, CAROL = other(1), other(2), other(3)
BOOK = blob_ref(DATA)


@pytest.fixture(params=["trainer", "seed"])
def solo(request: pytest.FixtureRequest) -> Solo:
    return Solo(role=request.param).boot()


def test_the_spec_is_served_and_hashes_to_the_id(solo: Solo) -> None:
    reply = solo.ask(ALICE, GetSpec())
    assert isinstance(reply, SpecReply)
    assert SwarmSpec.from_bytes(reply.spec).swarm_id == SPEC.swarm_id


def test_a_chunk_is_named_and_the_driver_appends_it(solo: Solo) -> None:
    assert solo.ask(ALICE, GetChunk(BOOK.root, 0)) == ChunkReply(BOOK.root, 0)
    assert solo.sources == (fx.ChunkSource(BOOK.root, 0),)
    assert solo.ask(ALICE, GetChunk(BOOK.root, 1)) == Refused("not here")
    assert solo.ask(ALICE, GetChunk(bytes(32), 0)) == Refused("not here")
    assert solo.sources == ()


def test_hashes_of_what_is_here(solo: Solo) -> None:
    assert solo.ask(ALICE, GetHashes(BOOK.root)) == HashesReply(BOOK.root, b"".join(chunk_hashes(DATA)))
    assert solo.ask(ALICE, GetHashes(bytes(32))) == Refused("not here")


def test_several_small_blobs_are_named_in_order_and_the_missing_left_out(solo: Solo) -> None:
    solo.at(T0 + 12.0)
    for who in (ALICE, BOB):
        solo.hold(who, announce(who, 0))
    roots = [announce(who, 0).record.blob.root for who in (BOB, ALICE)]
    reply = solo.ask(CAROL, GetBlobs(roots[0] + bytes(32) + roots[1]))
    assert reply == BlobsReply(b"".join(roots))
    assert solo.sources == tuple(fx.ChunkSource(root, 0) for root in roots)
    assert solo.ask(CAROL, GetBlobs(bytes(64))) == BlobsReply(b"")


def test_the_chain_after_a_locator(solo: Solo) -> None:
    solo.at(T0 + 13.0)
    first = manifest(ALICE, 0, [announce(ALICE, 0)])
    solo.ask(ALICE, Push((first.bytes,)))
    assert solo.ask(BOB, GetChain((GENESIS,))) == ChainReply((first.bytes,), False)
    assert solo.ask(BOB, GetChain((first.digest, GENESIS))) == ChainReply((), False)
    assert solo.ask(BOB, GetChain((bytes(32),))) == ChainReply((first.bytes,), True)


def test_gossip_brings_what_the_asker_lacks_and_asks_for_what_is_lacking_here(solo: Solo) -> None:
    known = announce(ALICE, 0)
    record = peer_record(ALICE, solo.now)
    solo.ask(ALICE, Push((known.bytes, record.bytes)))
    reply = solo.ask(BOB, Gossip(known.digest[:8] + b"strange1", b""))
    assert isinstance(reply, GossipReply)
    assert reply.want == b"strange1"
    assert record.bytes in reply.records and known.bytes not in reply.records
    assert BOOK.root[:8] in {reply.have[i : i + 8] for i in range(0, len(reply.have), 8)}


def test_a_pushed_contribution_is_kept_once_and_checked(solo: Solo) -> None:
    solo.at(T0 + 12.0)
    signed = announce(ALICE, 0)
    data = blob_of(ALICE, 0)
    push = PutChunk(signed.bytes, b"".join(chunk_hashes(data)), 0)
    solo.effects.clear()
    assert solo.ask(ALICE, push, data) == Ack()
    assert solo.take(fx.StoreChunk) == [fx.StoreChunk(signed.record.blob, 0, data)]
    assert len(solo.take(fx.VerifyBlob)) == (1 if solo.machine.view.trains else 0)
    assert solo.ask(ALICE, push, data) == Ack()
    assert solo.take(fx.StoreChunk) == []


@pytest.mark.parametrize("wrong", ["data", "hashes", "record", "index"])
def test_a_wrong_push_is_not_kept(solo: Solo, wrong: str) -> None:
    solo.at(T0 + 12.0)
    signed = announce(ALICE, 0)
    data = blob_of(ALICE, 0)
    message = PutChunk(
        b"junk" if wrong == "record" else signed.bytes,
        bytes(32) if wrong == "hashes" else b"".join(chunk_hashes(data)),
        7 if wrong == "index" else 0,
    )
    assert solo.ask(ALICE, message, data[::-1] if wrong == "data" else data) == Refused("not wanted here")
    assert solo.take(fx.StoreChunk) == []


def test_a_dataset_or_a_snapshot_cannot_be_pushed(solo: Solo) -> None:
    """Only what an announcement of this moment names."""
    message = PutChunk(announce(ALICE, 0, blob=blob_ref(b"else")).bytes, b"".join(chunk_hashes(DATA)), 0)
    assert solo.ask(ALICE, message, DATA) == Refused("not wanted here")


def test_another_swarms_frame_is_refused(solo: Solo) -> None:
    name = "other-" + SPEC.swarm_id.split("-", 1)[1]
    assert solo.answer(ALICE.public, encode(name, GetSpec(), solo.now)).message == Refused("another swarm")


REPLIES = ("gossip_reply", "chunk_reply", "hashes_reply", "chain_reply", "spec_reply", "ack", "refused", "blobs_reply")


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_is_no_request(solo: Solo, name: str) -> None:
    message, bulk = sample_messages()[name]
    assert solo.ask(ALICE, message, bulk) == Refused("a reply is not a request")


def test_malformed_frames_are_answered_with_the_reason_and_counted(solo: Solo) -> None:
    reply = solo.answer(ALICE.public, b"\xff\xff\xff\x7f").message
    assert reply == Refused("a frame's header is longer than the frame")
    assert solo.machine.view.members.contacts[ALICE.public].strikes == 1
    assert solo.ask(ALICE, GetSpec()) == SpecReply(SPEC.to_bytes())


def test_a_peer_of_another_version_is_told_so(solo: Solo) -> None:
    head = pack((2, "whatever version 2 says", {"here": True}))
    reply = solo.answer(ALICE.public, len(head).to_bytes(4, "little") + head).message
    assert reply == Refused("wire version 2 is not spoken here, only 1")


def test_a_record_with_a_wrong_signature_counts_against_who_brought_it(solo: Solo) -> None:
    bad = announce(ALICE, 0).bytes[:-1] + b"\0"
    assert solo.ask(BOB, Push((bad,))) == Ack()
    assert solo.machine.view.members.contacts[BOB.public].strikes == 1
    assert ALICE.public not in solo.machine.view.pool.of_round(0)


def test_every_answer_carries_this_peers_raw_clock(solo: Solo) -> None:
    reply, _ = solo.machine.answer(ALICE.public, encode(SPEC.swarm_id, GetSpec(), 5.0), 12_345.5)
    assert decode(reply.payload).sent_unix_s == 12_345.5


def test_bulk_bytes_do_not_follow_other_requests(solo: Solo) -> None:
    frame = with_bulk(encode(SPEC.swarm_id, GetSpec(), solo.now), b"more")
    assert isinstance(solo.answer(ALICE.public, frame).message, Refused)
