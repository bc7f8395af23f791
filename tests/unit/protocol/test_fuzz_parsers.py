"""Every parser of foreign bytes ends in a value or in a clean refusal, and refuses what is too long unread.

Normal runs give each parser 20,000 mutated inputs; TSCALE_FUZZ_N changes the number. The inputs are the same each time.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.mutate import mutations, packed_mutations, runs
from tests.helpers.protocol_samples import (
    ALICE,
    BOB,
    SEED_ADDR,
    sample_announcement,
    sample_link,
    sample_manifest,
    sample_peer,
    sample_snapshot,
    sample_spec,
    sample_status,
)
from tscale.protocol.addrs import MAX_ADDR_CHARS, parse_addr
from tscale.protocol.canonical import MAX_ARRAY_LEN, MAX_DEPTH, pack, unpack
from tscale.protocol.errors import BadInput, RefuseFrame
from tscale.protocol.identity import Identity, find_public, parse_key_file, peer_id, public_from_peer_id
from tscale.protocol.links import MAX_LINK_CHARS, SwarmLink, format_link, parse_link
from tscale.protocol.records import (
    ANNOUNCEMENT_MAX_BYTES,
    MANIFEST_MAX_BYTES,
    PEER_RECORD_MAX_BYTES,
    SNAPSHOT_MAX_BYTES,
    Announcement,
    Manifest,
    PeerRecord,
    SnapshotRecord,
    open_record,
    seal_record,
)
from tscale.protocol.spec import MAX_SPEC_BYTES, SwarmSpec
from tscale.protocol.status import MAX_STATUS_BYTES, StatusSnapshot

REFUSALS = (RefuseFrame, BadInput)
FIXED = settings(derandomize=True, deadline=None, max_examples=200, database=None)
UNPACK_CAP_BYTES = 1 << 16


@dataclass(frozen=True)
class Parser:
    """`parse` returns bytes that must equal its input, or None where equal values have several texts."""

    parse: Callable[[bytes], bytes | None]
    samples: tuple[bytes, ...]
    max_bytes: int
    packed: bool = False
    signed: bool = False
    text: bool = False


def _trusting(public: bytes, domain: str, body: bytes, signature: bytes) -> bool:
    return True


def _record(kind: type[Any], **options: Any) -> Callable[[bytes], bytes]:
    def parse(data: bytes) -> bytes:
        signed = open_record(data, (kind,), **options)
        assert type(signed.record) is kind
        return signed.bytes

    return parse


def _text(parse: Callable[[str], Any]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        parse(data.decode("latin-1"))

    return run


def _link(text: str) -> None:
    link = parse_link(text)
    assert parse_link(format_link(link)) == link


def _addr(text: str) -> None:
    assert parse_addr(text).text == text


def _status(data: bytes) -> None:
    status = StatusSnapshot.from_json(data)
    assert StatusSnapshot.from_json(status.to_json()) == status


def _peer_id(text: str) -> None:
    assert peer_id(public_from_peer_id(text)) == text


SPEC = sample_spec().to_bytes()
RECORDS = (sample_peer(), sample_announcement(ALICE), sample_manifest(), sample_snapshot())
RECORD_KINDS: tuple[tuple[type[Any], int], ...] = (
    (PeerRecord, PEER_RECORD_MAX_BYTES),
    (Announcement, ANNOUNCEMENT_MAX_BYTES),
    (Manifest, MANIFEST_MAX_BYTES),
    (SnapshotRecord, SNAPSHOT_MAX_BYTES),
)

PARSERS: dict[str, Parser] = {
    "unpack": Parser(
        lambda data: pack(unpack(data, UNPACK_CAP_BYTES)),
        (SPEC, *(signed.bytes for signed in RECORDS), pack({"a": (1, 2.5, None), "b": {"c": b"x", "d": True}})),
        UNPACK_CAP_BYTES,
        packed=True,
    ),
    "spec": Parser(lambda data: SwarmSpec.from_bytes(data).to_bytes(), (SPEC,), MAX_SPEC_BYTES, packed=True),
    "link": Parser(_text(_link), (format_link(sample_link()).encode(), SEED_ADDR.encode()), MAX_LINK_CHARS, text=True),
    "addr": Parser(
        _text(_addr), (SEED_ADDR.encode(), b"/dns/a.example/tcp/1", b"/ip6/::1/tcp/80"), MAX_ADDR_CHARS, text=True
    ),
    "peer_id": Parser(_text(_peer_id), (ALICE.peer_id.encode(), BOB.peer_id.encode()), 52, text=True),
    "status": Parser(_status, (sample_status().to_json().encode(),), MAX_STATUS_BYTES),
    "key_file": Parser(lambda data: parse_key_file(data).key_file() and None, (ALICE.key_file(),), 256),
}
for (kind, cap), signed in zip(RECORD_KINDS, RECORDS, strict=True):
    others = tuple(item.bytes for item in RECORDS)
    PARSERS[signed.kind] = Parser(_record(kind), (signed.bytes,), cap, packed=True, signed=True)
    PARSERS[signed.kind + "_trusting"] = Parser(
        _record(kind, verify=_trusting), (signed.bytes, signed.bytes, signed.bytes, *others), cap, packed=True
    )


def _inputs(name: str, count: int) -> Iterator[bytes]:
    parser, seed = PARSERS[name], sum(name.encode())
    make = packed_mutations if parser.packed else mutations
    return make(parser.samples, seed, count)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_mutated_inputs_end_in_a_value_or_a_refusal(name: str) -> None:
    parser = PARSERS[name]
    originals = frozenset(parser.samples)
    taken = refused = 0
    for data in _inputs(name, runs()):
        try:
            again = parser.parse(data)
        except REFUSALS as error:
            refused += 1
            assert "\n" not in str(error), data.hex()
            continue
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} escaped for {data.hex()}") from error
        taken += 1
        assert again is None or again == data, data.hex()
        assert not parser.signed or data in originals, f"a forgery was taken: {data.hex()}"
    assert taken + refused == runs()
    assert refused > runs() // 4


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_inputs_over_the_cap_are_refused_unread(name: str) -> None:
    """A megabyte more than the cap costs no more memory than its error message."""
    parser = PARSERS[name]
    data = parser.samples[0] + bytes(parser.max_bytes + (1 << 20))
    text_bytes = len(data) if parser.text else 0
    tracemalloc.start()
    with pytest.raises(REFUSALS):
        parser.parse(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < text_bytes + (1 << 16)


@FIXED
@pytest.mark.parametrize("name", sorted(PARSERS.keys() - {"unpack"}))
@given(data=st.binary(max_size=300))
def test_random_bytes_are_refused(name: str, data: bytes) -> None:
    with pytest.raises(REFUSALS):
        PARSERS[name].parse(data)


@FIXED
@pytest.mark.parametrize("index", range(len(RECORDS)))
@given(data=st.data())
def test_a_truncated_flipped_or_extended_record_is_refused(index: int, data: st.DataObject) -> None:
    original, (kind, _) = RECORDS[index].bytes, RECORD_KINDS[index]
    at = data.draw(st.integers(0, len(original) - 1))
    bit = data.draw(st.integers(0, 7))
    tail = data.draw(st.binary(min_size=1, max_size=50))
    flipped = original[:at] + bytes([original[at] ^ (1 << bit)]) + original[at + 1 :]
    for changed in (original[:at], flipped, original + tail):
        with pytest.raises(RefuseFrame):
            open_record(changed, (kind,))


@FIXED
@given(at=st.integers(0, len(SPEC) - 1), bit=st.integers(0, 7), tail=st.binary(min_size=1, max_size=50))
def test_a_changed_spec_is_refused_or_another_swarm(at: int, bit: int, tail: bytes) -> None:
    for changed in (SPEC[:at], SPEC + tail):
        with pytest.raises(RefuseFrame):
            SwarmSpec.from_bytes(changed)
    try:
        other = SwarmSpec.from_bytes(SPEC[:at] + bytes([SPEC[at] ^ (1 << bit)]) + SPEC[at + 1 :])
    except RefuseFrame:
        return
    assert other.swarm_id != sample_spec().swarm_id


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5).map(tuple) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, tuple) else 0


def _same(left: Any, right: Any) -> bool:
    """Equal in value, and in type all the way down (1 == 1.0 == True in Python)."""
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)


@FIXED
@given(PLAIN)
def test_packed_values_come_back(value: Any) -> None:
    if _depth(value) > MAX_DEPTH:
        with pytest.raises(RefuseFrame):
            pack(value)
        return
    data = pack(value)
    assert _same(unpack(data, len(data)), value)


@FIXED
@given(st.binary(max_size=200))
def test_what_unpacks_packs_to_the_same_bytes(data: bytes) -> None:
    try:
        value = unpack(data, 200, MAX_ARRAY_LEN)
    except RefuseFrame:
        return
    assert pack(value) == data


DIGESTS = st.binary(min_size=32, max_size=32)


@FIXED
@given(
    round_number=st.integers(0, (1 << 40) - 1),
    base=DIGESTS,
    tokens=st.integers(1, (1 << 53) - 1),
    loss=st.floats(-1e6, 1e6),
    rung=st.integers(0, 63),
    secret=DIGESTS,
)
def test_announcements_round_trip(
    round_number: int, base: bytes, tokens: int, loss: float, rung: int, secret: bytes
) -> None:
    start = sample_announcement(ALICE).record
    record = Announcement(start.swarm, round_number, base, base[::-1], start.blob, tokens, tokens, loss, rung)
    signed = seal_record(Identity.from_secret(secret), record)
    assert open_record(signed.bytes, (Announcement,)) == signed
    assert signed.record == record
    assert len(signed.bytes) <= ANNOUNCEMENT_MAX_BYTES


@FIXED
@given(DIGESTS)
def test_peer_ids_and_key_files_round_trip(secret: bytes) -> None:
    identity = Identity.from_secret(secret)
    assert find_public(identity.peer_id) == identity.public
    assert parse_key_file(identity.key_file()).sign("x", b"y") == identity.sign("x", b"y")


@FIXED
@given(
    name=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", fullmatch=True),
    tail=st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=26, max_size=26),
    ports=st.lists(st.integers(1, 65535), max_size=16, unique=True),
)
def test_links_round_trip(name: str, tail: str, ports: list[int]) -> None:
    link = SwarmLink(f"{name}-{tail}", tuple(f"/ip4/10.0.0.1/tcp/{port}/p2p/{BOB.peer_id}" for port in ports))
    assert parse_link(format_link(link)) == link
