"""The blob traffic of one peer: whose fault it is when bytes do not fit, and what a lie about a size costs others."""

from __future__ import annotations

import pytest

from tests.helpers.solo import LENGTH_S, T0, Solo, announce, blob_of, other
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.hashing import CHUNK_BYTES, BlobRef, blob_ref, chunk_hashes
from tscale.protocol.messages import (
    Ack,
    BlobsReply,
    ChunkReply,
    GetBlobs,
    GetChunk,
    GetHashes,
    HashesReply,
    PutChunk,
    Refused,
    split_hashes,
)
from tscale.protocol.transfer import HOLDER_REST_S

ALICE, BOB = other(1), other(2)
SMALL = b"a small blob"
LARGE = bytes(range(256)) * 5000  # two chunks


def started(*wants: BlobRef) -> Solo:
    """A peer that wants these blobs, which Alice is said to have."""
    solo = Solo().boot().at(T0 + LENGTH_S - 1.0).meet(ALICE, BOB).at(T0 + LENGTH_S + 0.1)
    solo.effects.clear()
    for blob in wants:
        solo.machine.view.want(blob, "contribution", ALICE.public)
    solo.feed(ev.Tick())
    return solo


def asked(solo: Solo) -> list[tuple[fx.Request, object]]:
    return [(r, m) for r, m in solo.requests() if isinstance(m, (GetBlobs, GetChunk, GetHashes))]


def strikes(solo: Solo) -> int:
    return solo.machine.view.members.contacts[ALICE.public].strikes


def reply_chunk(solo: Solo, root: bytes, data: bytes) -> None:
    """Alice answers the one chunk she was asked for."""
    ((request, message),) = asked(solo)
    assert message == GetChunk(root, 0)
    solo.reply(request, ChunkReply(root, 0), data)


def test_whoever_sends_the_true_blob_is_not_blamed_for_the_size_that_others_announced() -> None:
    false = BlobRef(blob_ref(SMALL).root, len(SMALL) + 1)
    solo = started(false)
    reply_chunk(solo, false.root, SMALL)
    assert strikes(solo) == 0
    solo.at(solo.now + 30.0)
    assert asked(solo) == [], "nobody can have it, so nobody is asked again"


def test_the_first_mebibyte_of_a_large_blob_is_no_fault_of_its_holder() -> None:
    solo = started(BlobRef(blob_ref(LARGE).root, len(SMALL)))
    reply_chunk(solo, blob_ref(LARGE).root, LARGE[:CHUNK_BYTES])
    assert strikes(solo) == 0


@pytest.mark.parametrize("junk", [b"junk", SMALL[:-1], b""])
def test_bytes_that_belong_to_no_blob_of_the_root_count_against_who_sent_them(junk: bytes) -> None:
    solo = started(blob_ref(SMALL))
    reply_chunk(solo, blob_ref(SMALL).root, junk)
    assert strikes(solo) == 1


def test_a_wrong_chunk_of_a_blob_whose_hashes_are_known_counts() -> None:
    solo = started(blob_ref(LARGE))
    ((request, message),) = asked(solo)
    assert message == GetHashes(blob_ref(LARGE).root)
    solo.reply(request, HashesReply(blob_ref(LARGE).root, b"".join(chunk_hashes(LARGE))))
    for request, message in asked(solo):
        assert isinstance(message, GetChunk)
        solo.reply(request, ChunkReply(message.root, message.index), bytes(CHUNK_BYTES))
    assert strikes(solo) == 2


def test_the_true_size_arrives_although_a_false_one_was_wanted_first() -> None:
    """Also in the answer to a question about the false one."""
    true = blob_ref(SMALL)
    solo = started(BlobRef(true.root, 5), true)
    roots = {message.root for _, message in asked(solo) if isinstance(message, GetChunk)}
    assert roots == {true.root}
    solo = started(BlobRef(true.root, 5))
    solo.machine.view.want(true, "contribution")
    reply_chunk(solo, true.root, SMALL)
    assert solo.machine.view.has(true) and strikes(solo) == 0
    assert solo.machine.view.transfers.wants == {}


@pytest.mark.parametrize("off", [1, -1])
def test_a_false_size_in_a_shared_request_costs_the_others_nothing_but_a_second_question(off: int) -> None:
    blobs = {blob_ref(bytes([n]) * 9).root: bytes([n]) * 9 for n in range(4)}
    false, *true = [BlobRef(root, 9 + off * (i == 0)) for i, root in enumerate(sorted(blobs))]
    solo = started(false, *true)
    ((request, message),) = asked(solo)
    assert isinstance(message, GetBlobs)
    roots = split_hashes(message.roots)
    solo.reply(request, BlobsReply(message.roots), b"".join(blobs[root] for root in roots))
    assert strikes(solo) == 0
    solo.at(solo.now + HOLDER_REST_S + 0.2)
    while left := asked(solo):
        for request, message in left:
            assert isinstance(message, GetChunk), "one by one"
            solo.reply(request, ChunkReply(message.root, 0), blobs[message.root])
    assert all(solo.machine.view.has(blob) for blob in true)
    assert not solo.machine.view.holds(false.root) and strikes(solo) == 0


def test_a_push_of_what_is_here_is_acknowledged_only_when_it_is_the_same() -> None:
    solo = started()
    signed, data = announce(ALICE, 0), blob_of(ALICE, 0)
    hashes = b"".join(chunk_hashes(data))
    solo.hold(ALICE, signed)
    wrong = announce(BOB, 0, blob=BlobRef(signed.record.blob.root, 99))
    refused = Refused("not wanted here")
    assert solo.ask(ALICE, PutChunk(signed.bytes, hashes, 0), data) == Ack()
    assert solo.ask(ALICE, PutChunk(signed.bytes, bytes(32), 0), data) == refused
    assert solo.ask(ALICE, PutChunk(signed.bytes, hashes, 1), data) == refused
    assert solo.ask(ALICE, PutChunk(signed.bytes, hashes, 0), data[::-1]) == refused
    assert solo.ask(BOB, PutChunk(wrong.bytes, hashes, 0), data) == refused


def test_a_push_with_other_hashes_than_the_known_ones_is_refused() -> None:
    solo = started()
    signed = announce(ALICE, 0, blob=blob_ref(LARGE))
    hashes = b"".join(chunk_hashes(LARGE))
    assert solo.ask(ALICE, PutChunk(signed.bytes, hashes, 0), LARGE[:CHUNK_BYTES]) == Ack()
    turned = b"".join(reversed(chunk_hashes(LARGE)))
    assert solo.ask(ALICE, PutChunk(signed.bytes, turned, 1), LARGE[CHUNK_BYTES:]) == Refused("not wanted here")
    assert solo.ask(ALICE, PutChunk(signed.bytes, hashes, 1), LARGE[CHUNK_BYTES:]) == Ack()
    assert solo.machine.view.has(blob_ref(LARGE))
