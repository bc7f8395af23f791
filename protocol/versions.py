"""Wire versions: which one this program speaks, and what to do about a peer that speaks another one."""

from __future__ import annotations

from tscale.protocol.canonical import unpack
from tscale.protocol.errors import RefuseFrame

WIRE_VERSION = 1
WIRE_MIN = 1
"""The oldest version that is still spoken; a peer record carries both."""

_MAX_HEADER_BYTES = 1 << 20


def read_version(frame: bytes) -> int | None:
    """The wire version at the start of a frame's header, which is there in every version. None: this is no frame."""
    header_bytes = int.from_bytes(frame[:4], "little")
    if header_bytes > min(_MAX_HEADER_BYTES, len(frame) - 4):
        return None
    try:
        head = unpack(bytes(frame[4 : 4 + header_bytes]), _MAX_HEADER_BYTES)
    except RefuseFrame:
        return None
    first = head[0] if isinstance(head, tuple) and head else None
    return first if type(first) is int and 0 < first < 1 << 16 else None


def is_spoken(version: int) -> bool:
    """Whether this program speaks a wire version."""
    return WIRE_MIN <= version <= WIRE_VERSION


def describe_other(version: int) -> str:
    """For the user of a node that met a peer of a version it does not speak: who has to update."""
    advice = "update tscale-node here" if version > WIRE_VERSION else "the swarm's nodes have to be updated"
    return f"the seed speaks wire version {version}, this node only {_spoken()}: {advice}"


def _spoken() -> str:
    return str(WIRE_VERSION) if WIRE_MIN == WIRE_VERSION else f"{WIRE_MIN} to {WIRE_VERSION}"
