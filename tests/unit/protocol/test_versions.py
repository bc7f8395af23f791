"""Wire versions: read from any frame, and told to the user when they are not spoken here."""

from __future__ import annotations

import pytest

from tscale.protocol.canonical import pack
from tscale.protocol.messages import GetSpec, encode
from tscale.protocol.versions import WIRE_MIN, WIRE_VERSION, describe_other, is_spoken, read_version


def framed(head: object) -> bytes:
    header = pack(head)
    return len(header).to_bytes(4, "little") + header


def test_this_wire_version_is_one() -> None:
    assert (WIRE_MIN, WIRE_VERSION) == (1, 1)
    assert read_version(encode("ours", GetSpec(), 0.0)) == 1
    assert [is_spoken(version) for version in (0, 1, 2)] == [False, True, False]


@pytest.mark.parametrize("rest", [(), ("other", "fields", 1), (b"x" * 1000,)])
def test_a_version_is_read_whatever_else_its_header_has(rest: tuple[object, ...]) -> None:
    assert read_version(framed((7, *rest)) + b"bulk") == 7


@pytest.mark.parametrize(
    "frame",
    [b"", b"\x00", bytes(4), b"\xff\xff\xff\xff", b"\x05\x00\x00\x00\x91\x02", framed(()), framed("2"), framed((True,))]
    + [framed((version,)) for version in (0, -1, 1 << 16)],
)
def test_what_is_no_frame_has_no_version(frame: bytes) -> None:
    assert read_version(frame) is None


def test_the_older_end_is_told_to_update() -> None:
    assert describe_other(2) == "the seed speaks wire version 2, this node only 1: update tscale-node here"
    assert describe_other(0) == "the seed speaks wire version 0, this node only 1: the swarm's nodes have to be updated"
