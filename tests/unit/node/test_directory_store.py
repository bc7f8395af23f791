"""What a DHT node keeps for others: one key, signed-for entries only, bounded in size, number and time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from tscale.node.transport.base import MAX_RECORD_BYTES
from tscale.node.transport.directory import NoCache, RecordStore, StoreLimits, unpack_record
from tscale.protocol.identity import Identity

_KEY, _OTHER_KEY = object(), object()
_NOW_UNIX_S = 1_800_000_000.0


def _peer(number: int) -> str:
    return Identity.from_secret(number.to_bytes(32, "big")).peer_id


@dataclass
class Dictionary:
    """Stands in for hivemind's DictionaryDHTValue."""

    frozen: bool = False
    data: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    latest_expiration_time: float = -math.inf

    def store(self, key: str, value: bytes, expiration_time: float) -> None:
        self.data[key] = (value, expiration_time)
        self.latest_expiration_time = max(self.latest_expiration_time, expiration_time)


@dataclass
class Parts:
    dictionary: Any = Dictionary

    def with_expiration(self, value: Any, expiration_time: float) -> tuple[Any, float]:
        return value, expiration_time


class Bench:
    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.now_unix_s = _NOW_UNIX_S
        self.checked: list[tuple[str, bytes]] = []
        self.store = RecordStore(Parts(), _KEY, limits or StoreLimits(), lambda: self.now_unix_s, self.check)  # type: ignore[arg-type]

    def check(self, peer_id: str, record: bytes) -> bool:
        self.checked.append((peer_id, record))
        return record != b"forged"

    def put(self, number: int, record: bytes, for_s: float = 60.0) -> bool:
        expires_unix_s = self.now_unix_s + for_s
        return self.store.store_subkey(_KEY, _peer(number), msgpack.packb(record), expires_unix_s)


def test_an_entry_is_kept_until_a_newer_one_or_its_end() -> None:
    bench = Bench()
    assert bench.put(1, b"one") and not bench.put(1, b"same time") and not bench.put(1, b"older", 59.0)
    assert bench.put(1, b"newer", 90.0) and bench.put(2, b"two")
    assert bench.store.records() == {_peer(1): b"newer", _peer(2): b"two"}
    dictionary, latest_unix_s = bench.store.get(_KEY)
    # frozen, or hivemind would drop entries by this machine's clock
    assert dictionary.frozen and latest_unix_s == _NOW_UNIX_S + 90.0
    assert dictionary.data[_peer(2)] == (msgpack.packb(b"two"), _NOW_UNIX_S + 60.0)
    assert [key for key, _ in bench.store.items()] == [_KEY]
    bench.now_unix_s += 60.0 + StoreLimits().clock_skew_s + 1.0
    assert bench.store.records() == {_peer(1): b"newer"}
    bench.now_unix_s += 60.0
    assert bench.store.get(_KEY) is None and bench.store.items() == []


def test_other_keys_plain_values_and_wrong_types_are_refused() -> None:
    bench = Bench()
    packed, soon = msgpack.packb(b"one"), _NOW_UNIX_S + 60.0
    assert not bench.store.store_subkey(_OTHER_KEY, _peer(1), packed, soon)
    assert not bench.store.store(_KEY, packed, soon)
    assert bench.store.store(_KEY, packed, soon, subkey=_peer(9))
    for subkey in (1, None, b"x", "not a peer id", "12D3KooW" + "1" * 44):
        assert not bench.store.store_subkey(_KEY, subkey, packed, soon)
    for expires in (math.nan, math.inf, None, "soon", 5):
        assert not bench.store.store_subkey(_KEY, _peer(1), packed, expires)
    for value in (None, "text", b"", b"\xc4", msgpack.packb("text"), msgpack.packb([b"x"]), packed + b"\0"):
        assert not bench.store.store_subkey(_KEY, _peer(1), value, soon)
    assert list(bench.store.records()) == [_peer(9)] and bench.store.get(_OTHER_KEY) is None


def test_what_is_not_signed_by_its_peer_is_refused() -> None:
    bench = Bench()
    assert not bench.put(1, b"forged")
    assert bench.checked == [(_peer(1), b"forged")] and bench.store.records() == {}


@pytest.mark.parametrize(("for_s", "kept"), [(-200.0, False), (-100.0, True), (7200.0, True), (8000.0, False)])
def test_clocks_may_differ_a_little_and_nothing_outlives_its_truth(for_s: float, kept: bool) -> None:
    assert Bench().put(1, b"one", for_s) is kept


def test_size_and_number_are_bounded_and_known_peers_stay_welcome() -> None:
    bench = Bench(StoreLimits(records=3, total_bytes=10_000))
    assert bench.put(1, bytes(MAX_RECORD_BYTES)) and not bench.put(2, bytes(MAX_RECORD_BYTES + 1))
    assert bench.put(2, bytes(MAX_RECORD_BYTES)) and not bench.put(3, bytes(MAX_RECORD_BYTES))
    assert bench.put(3, b"small") and not bench.put(4, b"small")
    assert bench.put(1, b"smaller now", 70.0) and bench.put(3, bytes(MAX_RECORD_BYTES), 70.0)
    bench.now_unix_s += 65.0 + StoreLimits().clock_skew_s
    assert bench.put(4, b"room again")
    assert set(bench.store.records()) == {_peer(1), _peer(3), _peer(4)}


def test_the_cache_keeps_nothing() -> None:
    cache = NoCache()
    assert not cache.store(_KEY, b"x", 1.0) and not cache.store_subkey(_KEY, "a", b"x", 1.0)
    assert cache.get(_KEY) is None and _KEY not in cache


def test_only_one_byte_string_unpacks() -> None:
    for record in (b"", b"x", bytes(255), bytes(256), bytes(MAX_RECORD_BYTES)):
        assert unpack_record(msgpack.packb(record)) == record
    for value in (b"", b"\xc4", b"\xc5\x00", b"\xc6\x00\x00\x00\x01x", b"\xa1x", b"\xc4\x02x", b"\xc4\x01xx"):
        assert unpack_record(value) is None
