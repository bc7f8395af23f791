"""Wire versions: which one two peers speak, or why they can't, told on both ends."""

from __future__ import annotations

from dataclasses import dataclass

WIRE_VERSION = 1
WIRE_MIN = 1


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The wire versions a peer speaks, both ends included."""

    wire_min: int
    wire_max: int


OURS = VersionRange(WIRE_MIN, WIRE_VERSION)


@dataclass(frozen=True, slots=True)
class Agreed:
    """Both speak `version`, the highest in common."""

    version: int


@dataclass(frozen=True, slots=True)
class Refused:
    """No version in common. `reason_here` is for our user, `reason_there` goes to the other end."""

    reason_here: str
    reason_there: str


def negotiate(here: VersionRange, there: VersionRange) -> Agreed | Refused:
    """The highest version both ranges hold, or a reason for each end."""
    version = min(here.wire_max, there.wire_max)
    if version >= max(here.wire_min, there.wire_min):
        return Agreed(version)
    if here.wire_max < there.wire_min:
        return Refused(_reason(here, there, "update this node"), _reason(there, here, "the other one must update"))
    return Refused(_reason(here, there, "the other one must update"), _reason(there, here, "update this node"))


def _reason(own: VersionRange, other: VersionRange, advice: str) -> str:
    return f"this node speaks wire {_text(own)}, the other one {_text(other)}: {advice}"


def _text(versions: VersionRange) -> str:
    low, high = versions.wire_min, versions.wire_max
    return f"version {high}" if low == high else f"versions {low} to {high}"
