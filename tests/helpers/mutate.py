"""Mutated inputs for parsers, the same for the same seed: flipped bits, cuts, splices, odd heads, odd values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from tscale.protocol.canonical import pack, unpack
from tscale.protocol.errors import RefuseFrame

DEFAULT_RUNS = 20_000

# Heads of long msgpack values, of extensions, of floats
_ODD_HEADS = """
c1 c4ff c5ffff c6ffffffff c70500 d6ff00000000 d8 d9ff daffff dbffffffff dcffff ddffffffff deffff dfffffffff
ca7fc00000 cb7ff8000000000000 cbfff0000000000000 cfffffffffffffffff d38000000000000000 80 90 a0 c0 c2 c3 00 ff
eda080 e280ae c080
"""
# Pieces that mean something in JSON and in links
_ODD_TEXT = (
    b'"',
    b"{",
    b"[",
    b"null",
    b"1e999",
    b"NaN",
    b"\\ud800",
    b"//",
    b"%2f",
    b"%",
    b"&seed=",
    b"/p2p/",
    b"\n",
    b"\0",
)
_ODD = (*map(bytes.fromhex, _ODD_HEADS.split()), *_ODD_TEXT)

_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -0.0, 1.0, 1e308, 5e-324),
    *("", "x", "é" * 40, "\u202e", "/ip4/1.2.3.4/tcp/1", b"", bytes(31), bytes(32), bytes(33), bytes(64)),
    *((), (None,), (0,) * 40, {}, {"a": 1}),
)


def runs() -> int:
    """How many mutated inputs a parser gets: TSCALE_FUZZ_N, or the default of a normal run."""
    return int(os.environ.get("TSCALE_FUZZ_N", DEFAULT_RUNS))


def mutations(samples: tuple[bytes, ...], seed: int, count: int) -> Iterator[bytes]:
    """`count` inputs, each one to four changes away from a sample."""
    rng = Random(seed)
    for _ in range(count):
        data = rng.choice(samples)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            data = rng.choice(_CHANGES)(rng, data, samples)
        yield data


def packed_mutations(samples: tuple[bytes, ...], seed: int, count: int) -> Iterator[bytes]:
    """As `mutations` for canonical msgpack; half of them change a value inside and are canonical again."""
    rng = Random(seed)
    plain = [unpack(sample, 1 << 20) for sample in samples]
    for data in mutations(samples, seed + 1, count):
        if rng.random() < 0.5:
            yield data
            continue
        try:
            yield pack(_change_value(rng, rng.choice(plain)))
        except RefuseFrame:
            yield data


def _flip(rng: Random, data: bytes, samples: tuple[bytes, ...]) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _cut(rng: Random, data: bytes, samples: tuple[bytes, ...]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _remove(rng: Random, data: bytes, samples: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 8, 64)) :]


def _insert(rng: Random, data: bytes, samples: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(_ODD) + data[at:]


def _overwrite(rng: Random, data: bytes, samples: tuple[bytes, ...]) -> bytes:
    at, odd = rng.randrange(len(data) + 1), rng.choice(_ODD)
    return data[:at] + odd + data[at + len(odd) :]


def _splice(rng: Random, data: bytes, samples: tuple[bytes, ...]) -> bytes:
    other = rng.choice(samples)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _extend(rng: Random, data: bytes, samples: tuple[bytes, ...]) -> bytes:
    return data + rng.randbytes(rng.choice((1, 1, 4, 100)))


_CHANGES: tuple[Callable[[Random, bytes, tuple[bytes, ...]], bytes], ...] = (
    *(_flip, _flip, _flip, _cut, _remove),
    *(_insert, _overwrite, _splice, _extend),
)


def _change_value(rng: Random, value: Any) -> Any:
    """Replace one value somewhere inside, follow packed byte strings, drop or double an item, rename a key."""
    if isinstance(value, tuple) and value and rng.random() < 0.9:
        weights = [
            8 if isinstance(item, (tuple, dict)) or (isinstance(item, bytes) and len(item) > 64) else 1
            for item in value
        ]
        at = rng.choices(range(len(value)), weights)[0]
        change = rng.random()
        if change < 0.05:
            return value[:at] + value[at + 1 :]
        if change < 0.1:
            return value[:at] + value[at : at + 1] + value[at:]
        return (*value[:at], _change_value(rng, value[at]), *value[at + 1 :])
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(sorted(value))
        rest = {name: item for name, item in value.items() if name != key}
        change = rng.random()
        if change < 0.05:
            return rest
        return {**rest, (key + "_" if change < 0.1 else key): _change_value(rng, value[key])}
    if _is_packed(value) and rng.random() < 0.8:
        try:
            return pack(_change_value(rng, unpack(value, len(value))))
        except RefuseFrame:
            return value[:-1]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 256, -(2**33)))
    return rng.choice(_ODD_VALUES)


def _is_packed(value: Any) -> bool:
    """Whether a value is likely a packed record or body inside another."""
    return isinstance(value, bytes) and len(value) > 64
