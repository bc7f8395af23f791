"""Addresses: the TCP multiaddr forms that nodes use, and a clear reason for every other."""

from __future__ import annotations

import pytest

from tests.helpers.protocol_samples import ALICE, BOB
from tscale.protocol.addrs import find_problem, parse_addr, parse_multiaddr_peer
from tscale.protocol.errors import BadInput

TAIL = f"/p2p/{ALICE.peer_id}"


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/127.0.0.1/tcp/4001",
        "/ip6/::1/tcp/1",
        "/dns/seed.example.org/tcp/65535",
        "/dns4/localhost/tcp/80",
        "/dns6/a-b.example/tcp/443",
    ],
)
def test_addresses_with_and_without_a_peer(text: str) -> None:
    assert parse_addr(text).text == text
    assert parse_addr(text).public is None
    assert parse_multiaddr_peer(text + TAIL) == (text + TAIL, ALICE.public)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a multiaddr"),
        ("127.0.0.1:4001", "not a multiaddr"),
        ("http://seed.example/", "not a multiaddr"),
        ("/ip4/127.0.0.1", "only TCP"),
        ("/ip4/127.0.0.1/udp/4001/quic-v1", "only TCP"),
        ("/ip4/127.0.0.1/tcp/4001/", "only TCP"),
        ("/ip4/127.0.0.1/tcp/4001/p2p", "only TCP"),
        ("/ip4/127.0.0.1/tcp/4001/ws/" + ALICE.peer_id, "only TCP"),
        ("/ip4/127.0.0.256/tcp/4001", "not a host"),
        ("/ip4/127.1/tcp/4001", "not a host"),
        ("/ip6/fe80::1%eth0/tcp/4001", "not a host"),
        ("/ip6/127.0.0.1/tcp/4001", "not a host"),
        ("/dns/-x/tcp/4001", "not a host"),
        ("/onion/abc/tcp/4001", "not a host"),
        ("/ip4/127.0.0.1/tcp/0", "not a TCP port"),
        ("/ip4/127.0.0.1/tcp/65536", "not a TCP port"),
        ("/ip4/127.0.0.1/tcp/04001", "not a TCP port"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/" + ALICE.peer_id[:-3], "wrong peer id"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/" + "x" * 52, "wrong peer id"),
        (f"/ip4/127.0.0.1/tcp/4001{TAIL}/ip4/127.0.0.1/tcp/4002/p2p/{BOB.peer_id}", "two addresses pasted as one"),
        ("/ip4/127.0.0.1/tcp/4001/ip4/127.0.0.1/tcp/4002", "two addresses pasted as one"),
        ("/ip4/127.0.0.1/tcp/4001\n", "characters no address has"),
        ("/dns/" + "a" * 300 + "/tcp/1", "too long"),
        ("/dns/é.example/tcp/1", "characters no address has"),
    ],
)
def test_the_reason_is_named(text: str, why: str) -> None:
    problem = find_problem(text)
    assert problem is not None
    assert why in problem
    assert "\n" not in problem
    with pytest.raises(BadInput):
        parse_addr(text)


def test_an_address_without_a_peer_names_no_peer() -> None:
    with pytest.raises(BadInput, match="names no peer"):
        parse_multiaddr_peer("/ip4/127.0.0.1/tcp/4001")
