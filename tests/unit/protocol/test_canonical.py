"""One encoding per value: what pack writes comes back, and everything else is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from tscale.protocol.canonical import MAX_ARRAY_LEN, MAX_DEPTH, pack, unpack
from tscale.protocol.errors import RefuseFrame


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, "c0"),
        (True, "c3"),
        (127, "7f"),
        (128, "cc80"),
        (-1, "ff"),
        (2**64 - 1, "cfffffffffffffffff"),
        (1.0, "cb3ff0000000000000"),
        ("é", "a2c3a9"),
        (b"\0", "c40100"),
        ((1, "a"), "9201a161"),
        ({"b": 1, "a": 2}, "82a16102a16201"),
    ],
)
def test_encodings(value: Any, encoded: str) -> None:
    assert pack(value).hex() == encoded
    assert unpack(bytes.fromhex(encoded), 100) == value


def test_lists_and_byte_views_are_packed_like_tuples_and_bytes() -> None:
    assert pack([1, [memoryview(b"x"), bytearray(b"y")]]) == pack((1, (b"x", b"y")))


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        ("", "nothing"),
        ("cc7f", "a longer int"),
        ("d9" + "01" + "61", "a longer text"),
        ("dc000101", "a longer array"),
        ("ca3f800000", "float32"),
        ("cb7ff8000000000000", "NaN"),
        ("cb7ff0000000000000", "infinity"),
        ("cbfff0000000000000", "minus infinity"),
        ("0101", "something behind"),
        ("82a16202a16101", "unsorted keys"),
        ("82a16101a16101", "a key twice"),
        ("810101", "a key that is not text"),
        ("81c4016101", "a key of bytes"),
        ("a1ff", "not UTF-8"),
        ("a3eda080", "a surrogate"),
        ("d6ff00000000", "a timestamp"),
        ("d40500", "an extension"),
        ("c1", "a reserved byte"),
        ("dd00ffffff", "a long array without content"),
        ("c6ffffffff", "long bytes without content"),
        ("df00ffffff", "a long map without content"),
    ],
)
def test_other_bytes_are_refused(encoded: str, why: str) -> None:
    with pytest.raises(RefuseFrame):
        unpack(bytes.fromhex(encoded), 100)


def test_the_cap_comes_before_parsing() -> None:
    data = pack(b"x" * 100)
    assert unpack(data, len(data)) == b"x" * 100
    with pytest.raises(RefuseFrame, match="more than the cap of 101"):
        unpack(data, len(data) - 1)


def test_depth_is_capped() -> None:
    def nested(levels: int) -> bytes:
        return b"\x91" * levels + b"\x01"

    assert pack(unpack(nested(MAX_DEPTH), 100)) == nested(MAX_DEPTH)
    for levels in (MAX_DEPTH + 1, 500, 1023, 100_000):
        with pytest.raises(RefuseFrame):
            unpack(nested(levels), 200_000)


def test_claimed_lengths_allocate_nothing() -> None:
    """1000 nested arrays that each claim a million items would be 8 GB of list."""
    bomb = bytes.fromhex("dd000fffff") * 200_000
    tracemalloc.start()
    with pytest.raises(RefuseFrame):
        unpack(bomb, len(bomb))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 64 << 20


def test_array_length_is_capped() -> None:
    longest = pack((0,) * MAX_ARRAY_LEN)
    assert len(unpack(longest, 10_000)) == MAX_ARRAY_LEN
    with pytest.raises(RefuseFrame):
        unpack(longest, 10_000, max_array_len=MAX_ARRAY_LEN - 1)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), 2**64, -(2**63) - 1, {1: 2}, {"a": object()}, {1, 2}, "\ud800", (0,) * 5000, 1j],
)
def test_values_without_an_encoding_are_refused(value: Any) -> None:
    with pytest.raises(RefuseFrame):
        pack(value)


@pytest.mark.parametrize("data", [bytearray(b"\x01"), memoryview(b"\x01"), "1", None])
def test_only_bytes_are_unpacked(data: Any) -> None:
    with pytest.raises(RefuseFrame):
        unpack(data, 10)
