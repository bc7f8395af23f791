"""Checks of single fields from the wire: each takes a decoded value and returns it in its final form, or None."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from tscale.protocol.addrs import find_problem
from tscale.protocol.hashing import HASH_BYTES, MAX_BLOB_BYTES, BlobRef

MAX_PEER_NAME_CHARS = 32
SWARM_ID_CHARS = 26

Check = Callable[[Any], Any]

_SWARM_NAME = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_SWARM_NAME_RE = re.compile(_SWARM_NAME)
_SWARM_ID_RE = re.compile(_SWARM_NAME + r"-[a-z2-7]{26}")


def is_swarm_name(text: str) -> bool:
    """Whether `text` may be a swarm's name: 1 to 32 of a-z, 0-9 and `-`, no `-` at either end."""
    return _SWARM_NAME_RE.fullmatch(text) is not None


def is_swarm_id(text: str) -> bool:
    """Whether `text` has the form `<name>-<26 base32 characters>`."""
    return len(text) <= 64 and _SWARM_ID_RE.fullmatch(text) is not None


def is_peer_name(text: str) -> bool:
    """Whether `text` may be shown as a peer's name: at most 32 printable characters in NFC, or nothing.

    Control, bidirectional, zero-width and unassigned characters are not printable; spaces may not lead, end or repeat.
    """
    if len(text) > MAX_PEER_NAME_CHARS or not text.isprintable() or not unicodedata.is_normalized("NFC", text):
        return False
    return text == " ".join(text.split(" ")).strip() and "  " not in text


def swarm_text(value: Any) -> str | None:
    """A swarm id."""
    return value if type(value) is str and is_swarm_id(value) else None


def peer_name(value: Any) -> str | None:
    """A peer's public name; may be empty."""
    return value if type(value) is str and is_peer_name(value) else None


def flag(value: Any) -> bool | None:
    """A bool."""
    return value if type(value) is bool else None


def digest32(value: Any) -> bytes | None:
    """A digest or a public key."""
    return value if type(value) is bytes and len(value) == HASH_BYTES else None


def blob_ref(value: Any) -> BlobRef | None:
    """`[root, size_bytes]` of a blob that isn't empty."""
    if type(value) is not tuple or len(value) != 2:
        return None
    root, size_bytes = value
    if type(root) is not bytes or len(root) != HASH_BYTES or type(size_bytes) is not int:
        return None
    return BlobRef(root, size_bytes) if 0 < size_bytes <= MAX_BLOB_BYTES else None


def integer(low: int, high: int) -> Check:
    """An int in [low, high]; never a bool or a float."""

    def check(value: Any) -> int | None:
        return value if type(value) is int and low <= value <= high else None

    return check


def finite(low: float, high: float) -> Check:
    """A float in [low, high]; never an int."""

    def check(value: Any) -> float | None:
        return value if type(value) is float and math.isfinite(value) and low <= value <= high else None

    return check


def one_of(words: tuple[str, ...]) -> Check:
    """One of a few words."""

    def check(value: Any) -> str | None:
        return value if type(value) is str and value in words else None

    return check


def addr_list(most: int) -> Check:
    """At most `most` different peer addresses."""

    def check(value: Any) -> tuple[str, ...] | None:
        if type(value) is not tuple or len(value) > most or any(type(item) is not str for item in value):
            return None
        return value if len(set(value)) == len(value) and all(find_problem(item) is None for item in value) else None

    return check


def byte_list(least: int, most: int, max_bytes: int) -> Check:
    """`least` to `most` byte strings of at most `max_bytes` each."""

    def check(value: Any) -> tuple[bytes, ...] | None:
        if type(value) is not tuple or not least <= len(value) <= most:
            return None
        return value if all(type(item) is bytes and len(item) <= max_bytes for item in value) else None

    return check
