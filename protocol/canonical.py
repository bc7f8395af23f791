"""Canonical msgpack: every value has exactly one encoding, and anything else is refused.

Allowed: nil, bool, int of 64 bits, float64 (finite), UTF-8 text, bytes, arrays, and maps with text keys in increasing
order. Not allowed: float32, extension types, NaN and infinity, a longer form where a shorter one exists.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack

from tscale.protocol.errors import RefuseFrame

MAX_DEPTH = 8
MAX_ARRAY_LEN = 4096
MAX_MAP_LEN = 64


def pack(obj: Any) -> bytes:
    """The canonical encoding of `obj`; maps are sorted by key. Raises RefuseFrame for a value that has none."""
    try:
        return _encode(_canonical(obj, MAX_DEPTH))
    except (ValueError, TypeError, OverflowError) as error:
        raise RefuseFrame(f"this value has no canonical encoding: {type(error).__name__}") from error


def unpack(data: bytes, max_bytes: int, max_array_len: int = MAX_ARRAY_LEN) -> Any:
    """Decode canonical msgpack of at most `max_bytes`; arrays come back as tuples.

    Raises RefuseFrame for anything that `pack` would not have written. Nothing is allocated for lengths that the
    data claims beyond the caps.
    """
    if type(data) is not bytes:
        raise RefuseFrame("expected bytes")
    if len(data) > max_bytes:
        raise RefuseFrame(f"{len(data)} bytes are more than the cap of {max_bytes}")
    try:
        obj = msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_sorted_map,
            ext_hook=_refuse_extension,
            max_array_len=min(max_array_len, len(data)),
            max_map_len=min(MAX_MAP_LEN, len(data)),
        )
        _check_plain(obj, MAX_DEPTH)
        again = _encode(obj)
    except RefuseFrame:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise RefuseFrame(f"not canonical msgpack: {type(error).__name__}") from error
    if again != data:
        raise RefuseFrame("not canonical msgpack: a shorter or another form exists")
    return obj


def pack_trusted(obj: Any) -> bytes:
    """The encoding of a value built here from plain tuples, ints, floats, text and bytes; `pack` without its checks."""
    return _encode(obj)


def _encode(obj: Any) -> bytes:
    encoded: bytes = msgpack.packb(obj, use_bin_type=True, use_single_float=False)
    return encoded


def _sorted_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    last: str | None = None
    for key, _ in pairs:
        if type(key) is not str or (last is not None and key <= last):
            raise RefuseFrame("not canonical msgpack: map keys must be text, increasing and different")
        last = key
    return dict(pairs)


def _refuse_extension(code: int, data: bytes) -> Any:
    raise RefuseFrame("not canonical msgpack: extension types are not allowed")


def _check_plain(obj: Any, depth_left: int) -> None:
    """Refuse what the decoder lets through: timestamps, NaN, infinity, deep nesting."""
    kind = type(obj)
    if kind is tuple or kind is dict:
        if depth_left == 0:
            raise RefuseFrame("not canonical msgpack: nested too deeply")
        for item in obj.values() if kind is dict else obj:
            _check_plain(item, depth_left - 1)
    elif kind is float:
        if not math.isfinite(obj):
            raise RefuseFrame("not canonical msgpack: NaN and infinity are not allowed")
    elif not (kind is bytes or kind is int or kind is str or obj is None or kind is bool):
        raise RefuseFrame("not canonical msgpack: extension types are not allowed")


def _canonical(obj: Any, depth_left: int) -> Any:
    """A copy with tuples for sequences and sorted maps."""
    if isinstance(obj, (tuple, list)):
        if depth_left == 0 or len(obj) > MAX_ARRAY_LEN:
            raise ValueError
        return tuple(_canonical(item, depth_left - 1) for item in obj)
    if isinstance(obj, dict):
        if depth_left == 0 or len(obj) > MAX_MAP_LEN or any(type(key) is not str for key in obj):
            raise ValueError
        return {key: _canonical(obj[key], depth_left - 1) for key in sorted(obj)}
    if isinstance(obj, (bytearray, memoryview)):
        return bytes(obj)
    _check_plain(obj, depth_left)
    return obj
