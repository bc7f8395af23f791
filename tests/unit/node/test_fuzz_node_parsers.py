"""Damaged bytes at the node's own parsers: the record file, worker messages, and the frames of the transport.

Normal runs use 20,000 mutated inputs each; TSCALE_FUZZ_N changes the number.
"""

from __future__ import annotations

import asyncio
import tracemalloc
import typing
from pathlib import Path

import msgpack
import pytest

from tests.helpers.message_samples import sample_frame, sample_messages
from tests.helpers.mutate import mutations, runs
from tests.helpers.protocol_samples import ALICE, sample_announcement, sample_manifest, sample_snapshot
from tscale.node.recordfile import RecordFile, split_records
from tscale.node.transport.base import MAX_PAYLOAD_BYTES, TransportError
from tscale.node.transport.wire import Link, ask, read_request
from tscale.node.worker import messages as m
from tscale.protocol.records import MANIFEST_MAX_BYTES

RECORDS = [sample_manifest().bytes, sample_announcement(ALICE).bytes, sample_snapshot().bytes]


def test_a_damaged_record_file_gives_what_lies_before_the_damage() -> None:
    whole = joined(RECORDS)
    shortened = 0
    for data in mutations((whole,), 21, runs()):
        found, end = split_records(data)
        shortened += end < len(data)
        assert data[:end] == joined(found) and all(len(record) <= MANIFEST_MAX_BYTES for record in found)
    assert shortened > runs() // 4


def joined(records: list[bytes]) -> bytes:
    return b"".join(len(record).to_bytes(4, "little") + record for record in records)


def test_what_a_damaged_file_is_left_as_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "chain.bin"
    for data in mutations((joined(RECORDS),), 25, 40):
        path.write_bytes(data)
        found = RecordFile(path).load()
        assert path.read_bytes() == joined(found) and RecordFile(path).load() == found


def test_a_record_can_be_added_after_damage(tmp_path: Path) -> None:
    path = tmp_path / "chain.bin"
    RecordFile(path).rewrite(RECORDS[:2])
    with path.open("ab") as stream:
        stream.write((1 << 31).to_bytes(4, "little") + b"torn")
    assert RecordFile(path).load() == RECORDS[:2]
    RecordFile(path).append(RECORDS[2])
    assert RecordFile(path).load() == RECORDS


def worker_bodies() -> tuple[bytes, ...]:
    """A command, an answer and an event with every type of field."""
    digest = b"m" * 32
    sent: tuple[tuple[int, object], ...] = (
        (3, m.Fold(digest, b"p" * 32, (("a", 0.5, 2.0), ("b", 1e-300, 0.0)), 1 << 40, 7)),
        (4, m.Closed("path", 1, 2, 3, 2.5, 4, digest, digest)),
        (5, m.Load(digest, "path", 9, 1, digest)),
        (6, m.Verify("path", 0)),
        (0, m.Evaluated(digest, 1, 2.5)),
        (1, m.WorkerConfig(b"spec", digest, digest, -1, ("a", "b"), "c", "d")),
    )
    return tuple(m.encode_frame(number, message)[4:] for number, message in sent)


def test_mutated_worker_bodies_end_in_a_message_or_a_refusal() -> None:
    taken = refused = 0
    for body in mutations(worker_bodies(), 22, runs()):
        try:
            number, message = m.decode_body(body)
        except m.BadMessage:
            refused += 1
            continue
        taken += 1
        assert type(message) in typing.get_args(m.Message) and type(number) is int
        assert m.decode_body(m.encode_frame(number, message)[4:]) == (number, message) or "nan" in repr(message)
    assert taken + refused == runs() and refused > runs() // 4 and taken > runs() // 100


@pytest.mark.parametrize(
    "body", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x93" * 5000]
)
def test_a_worker_body_that_claims_more_than_it_has_costs_nothing(body: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(m.BadMessage):
        m.decode_body(body)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_a_worker_body_with_an_unhashable_kind_or_field_is_refused() -> None:
    for value in ([1, ["Save"], {}], [1, {"a": 1}, {}], [1, "Save", {b"x": 1}], [1, "Save", [1]], [[], "Save", {}]):
        with pytest.raises(m.BadMessage):
            m.decode_body(msgpack.packb(value))


class Sink:
    """The writing side of a stream that nobody reads."""

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        return


def stream(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 22)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def payloads() -> tuple[bytes, ...]:
    return tuple(sample_frame(name) for name in sample_messages())


def test_mutated_requests_end_in_a_payload_a_refusal_or_the_end_of_the_stream() -> None:
    samples = tuple(len(payload).to_bytes(4, "big") + payload for payload in payloads())

    async def scenario() -> tuple[int, int, int]:
        taken = too_long = ended = 0
        for data in mutations(samples, 23, runs()):
            link = Link()
            try:
                payload = await read_request(stream(data), link)
            except asyncio.IncompleteReadError:
                ended += 1
                continue
            if payload is None:
                too_long += 1
                assert int.from_bytes(data[:4], "big") > MAX_PAYLOAD_BYTES
            else:
                taken += 1
                assert data[4:].startswith(payload) and len(payload) == int.from_bytes(data[:4], "big")
                assert link.traffic.down_bytes == 4 + len(payload)
        return taken, too_long, ended

    taken, too_long, ended = asyncio.run(scenario())
    assert taken + too_long + ended == runs()
    assert min(taken, too_long, ended) > runs() // 50


def test_mutated_replies_end_in_a_payload_a_refusal_or_the_end_of_the_stream() -> None:
    samples = tuple(
        bytes([i % 4]) + len(payload[:190]).to_bytes(4, "big") + payload[:190] for i, payload in enumerate(payloads())
    )

    async def scenario() -> tuple[int, int, int]:
        taken = refused = ended = 0
        for data in mutations(samples, 24, runs()):
            try:
                reply = await ask(stream(data), Sink(), b"question", Link())  # type: ignore[arg-type]
            except asyncio.IncompleteReadError:
                ended += 1
            except TransportError as error:
                refused += 1
                assert str(error).isprintable() and len(str(error)) < 300
            else:
                taken += 1
                assert data[0] == 0 and data[5:].startswith(reply)
        return taken, refused, ended

    taken, refused, ended = asyncio.run(scenario())
    assert taken + refused + ended == runs()
    assert min(taken, refused, ended) > runs() // 50
