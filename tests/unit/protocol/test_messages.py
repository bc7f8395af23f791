"""Frames between peers: what is sent arrives, and every rule of the header and of each field refuses."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from tests.helpers.message_samples import SENT_UNIX_S, sample_frame, sample_messages
from tests.helpers.protocol_samples import sample_spec
from tscale.protocol.canonical import pack
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.hashing import CHUNK_BYTES
from tscale.protocol.messages import (
    MAX_CHUNK_HASHES,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_IDS,
    MAX_LOCATOR,
    MAX_REASON_CHARS,
    MAX_RECORDS,
    MAX_ROOTS,
    MAX_UNIX_S,
    ChainReply,
    ChunkReply,
    GetBlobs,
    GetChain,
    Gossip,
    HashesReply,
    Message,
    Push,
    Refused,
    SpecReply,
    decode,
    encode,
    split_hashes,
    split_ids,
    with_bulk,
)
from tscale.protocol.records import MANIFEST_MAX_BYTES
from tscale.protocol.spec import MAX_SPEC_BYTES

SWARM = sample_spec().swarm_id
NAMES = sorted(sample_messages())
ROOT = bytes(range(32))


def header(fields: Any, code: Any = 13, version: Any = 1, swarm: Any = SWARM, sent: Any = SENT_UNIX_S) -> bytes:
    head = pack((version, swarm, code, sent, fields))
    return len(head).to_bytes(4, "little") + head


@pytest.mark.parametrize("name", NAMES)
def test_every_message_arrives_as_it_was_sent(name: str) -> None:
    message, bulk = sample_messages()[name]
    envelope = decode(sample_frame(name))
    assert envelope.message == message and type(envelope.message) is type(message)
    assert (envelope.version, envelope.swarm, envelope.sent_unix_s) == (1, SWARM, SENT_UNIX_S)
    assert envelope.bulk == bulk


@pytest.mark.parametrize("name", NAMES)
def test_only_chunks_have_bulk_bytes(name: str) -> None:
    frame = sample_frame(name) + b"x"
    if name in ("chunk_reply", "put_chunk", "blobs_reply"):
        assert decode(frame).bulk == sample_messages()[name][1] + b"x"
        return
    with pytest.raises(RefuseFrame, match="carries no bulk bytes"):
        decode(frame)


def test_a_chunk_is_at_most_one_mebibyte() -> None:
    start = encode(SWARM, ChunkReply(ROOT, 3), SENT_UNIX_S)
    assert decode(with_bulk(start, bytes(CHUNK_BYTES))).bulk == bytes(CHUNK_BYTES)
    with pytest.raises(RefuseFrame, match="larger than 1 MiB"):
        decode(with_bulk(start, bytes(CHUNK_BYTES + 1)))


@pytest.mark.parametrize("claimed", [1, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 2**31, 2**32 - 1])
def test_a_header_that_claims_more_than_there_is_costs_nothing(claimed: int) -> None:
    tracemalloc.start()
    with pytest.raises(RefuseFrame, match="longer than the frame"):
        decode(claimed.to_bytes(4, "little"))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10_000


@pytest.mark.parametrize("size_bytes", [0, 3, MAX_FRAME_BYTES + 1])
def test_a_frame_has_a_least_and_a_largest_size(size_bytes: int) -> None:
    with pytest.raises(RefuseFrame, match=f"a frame of {size_bytes} bytes"):
        decode(bytes(size_bytes))


@pytest.mark.parametrize("value", [b"", [], {}, None, 1, "x", (), (1.0,), ("1", SWARM, 13, 1.0, ()), (True,)])
def test_a_header_starts_with_a_version(value: Any) -> None:
    head = pack(value)
    with pytest.raises(RefuseFrame):
        decode(len(head).to_bytes(4, "little") + head)


@pytest.mark.parametrize("head", [(2,), (2, "later", {"shape": 1}), (0, SWARM, 13, 1.0, ())])
def test_another_version_is_named_whatever_follows_it(head: Any) -> None:
    packed = pack(head)
    with pytest.raises(RefuseFrame, match=f"wire version {head[0]} is not spoken here, only 1"):
        decode(len(packed).to_bytes(4, "little") + packed)


@pytest.mark.parametrize(
    "changes",
    [
        {"swarm": b"bytes"},
        {"swarm": "x" * 81},
        {"code": 13.0},
        {"code": 0},
        {"code": 99},
        {"code": True},
        {"sent": 1},
        {"sent": -1.0},
        {"sent": MAX_UNIX_S * 1.01},
        {"fields": (1,)},
        {"fields": b""},
        {"fields": None},
    ],
    ids=str,
)
def test_a_header_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RefuseFrame):
        decode(header(**{"fields": (), **changes}))


def test_a_time_that_is_no_number_is_refused() -> None:
    raw = header(()).replace(pack(SENT_UNIX_S), bytes.fromhex("cb7ff8000000000000"))
    with pytest.raises(RefuseFrame, match="NaN"):
        decode(raw)


LARGEST: tuple[Message, ...] = (
    Gossip(bytes(MAX_IDS * 8), bytes(MAX_IDS * 8)),
    HashesReply(ROOT, bytes(MAX_CHUNK_HASHES * 32)),
    ChunkReply(ROOT, MAX_CHUNK_HASHES - 1),
    Push((bytes(MANIFEST_MAX_BYTES),)),
    Push((b"",) * MAX_RECORDS),
    ChainReply((bytes(MANIFEST_MAX_BYTES),), True),
    GetChain((bytes(32),) * MAX_LOCATOR),
    SpecReply(bytes(MAX_SPEC_BYTES)),
    Refused("x" * MAX_REASON_CHARS),
    GetBlobs(bytes(MAX_ROOTS * 32)),
)
TOO_LARGE: tuple[Message, ...] = (
    Gossip(bytes(MAX_IDS * 8 + 8), b""),
    Gossip(b"", bytes(MAX_IDS * 8 + 8)),
    GetBlobs(bytes(MAX_ROOTS * 32 + 32)),
    HashesReply(ROOT, bytes(MAX_CHUNK_HASHES * 32 + 32)),
    HashesReply(ROOT[:31], b""),
    HashesReply(ROOT + b"x", b""),
    ChunkReply(ROOT, MAX_CHUNK_HASHES),
    ChunkReply(ROOT, -1),
    ChunkReply(b"", 0),
    Push((bytes(MANIFEST_MAX_BYTES + 1),)),
    Push((b"",) * (MAX_RECORDS + 1)),
    GetChain((bytes(33),)),
    GetChain((bytes(32),) * (MAX_LOCATOR + 1)),
    SpecReply(bytes(MAX_SPEC_BYTES + 1)),
    Refused("x" * (MAX_REASON_CHARS + 1)),
)


@pytest.mark.parametrize("message", LARGEST, ids=lambda message: type(message).__name__)
def test_every_field_has_room_for_its_cap(message: Message) -> None:
    assert decode(encode(SWARM, message, SENT_UNIX_S)).message == message


@pytest.mark.parametrize("message", TOO_LARGE, ids=lambda message: type(message).__name__)
def test_no_field_is_larger_than_its_cap(message: Message) -> None:
    with pytest.raises(RefuseFrame):
        decode(encode(SWARM, message, SENT_UNIX_S))


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (1, (b"",)),
        (1, (b"", b"", b"")),
        (1, ("", b"")),
        (2, (b"", b"", b"")),
        (3, ((1,),)),
        (3, (("text",),)),
        (3, (((b"",),),)),
        (4, (ROOT, 1.0)),
        (4, (ROOT, True)),
        (4, (ROOT, None)),
        (10, ((), 0)),
        (10, ((), None)),
        (14, (b"reason",)),
    ],
)
def test_a_field_of_the_wrong_type_or_number_is_refused(code: int, fields: Any) -> None:
    with pytest.raises(RefuseFrame):
        decode(header(fields, code))


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (1, (b"1234567", b"")),
        (1, (b"", b"123456789")),
        (2, (b"1", b"", ())),
        (2, (b"", b"1", ())),
        (7, (ROOT, b"x" * 31)),
        (8, (b"", b"x" * 33, 0)),
        (15, (b"x" * 33,)),
        (16, (b"x",)),
    ],
)
def test_ids_and_hashes_that_do_not_divide_are_refused(code: int, fields: Any) -> None:
    with pytest.raises(RefuseFrame, match="does not divide"):
        decode(header(fields, code))


def test_ids_and_hashes_divide_or_are_refused() -> None:
    assert split_ids(b"") == set()
    assert split_ids(b"a" * 8 + b"b" * 8 + b"a" * 8) == {b"a" * 8, b"b" * 8}
    assert split_hashes(b"a" * 32 + b"b" * 32) == (b"a" * 32, b"b" * 32)
    for size in (1, 7, 9, 15):
        with pytest.raises(RefuseFrame, match="8 bytes each"):
            split_ids(bytes(size))
    for size in (1, 31, 33):
        with pytest.raises(RefuseFrame, match="32 bytes each"):
            split_hashes(bytes(size))


def test_nested_arrays_are_refused_within_a_bounded_memory() -> None:
    """Every level claims the most that the frame has bytes for."""
    nested = b"".join(b"\xdc" + (4096).to_bytes(2, "big") for _ in range(1000)) + bytes(4096)
    tracemalloc.start()
    with pytest.raises(RefuseFrame):
        decode(len(nested).to_bytes(4, "little") + nested)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 64 << 20
