"""Which addresses are told to others and which of theirs are believed."""

from __future__ import annotations

import socket

import pytest

from tscale.node.netaddr import (
    Machine,
    advertised,
    believable,
    is_loopback,
    listen_addrs,
    look_at_machine,
    require_free_port,
)
from tscale.protocol.errors import BadInput, PortInUse
from tscale.protocol.identity import Identity

_HOME = Machine(
    interfaces={
        "lo": ("127.0.0.1", "::1"),
        "docker0": ("172.17.0.1",),
        "br-1f2e": ("172.18.0.1",),
        "eth0": ("192.168.1.20", "fe80::1", "2a02:8109::20"),
        "wlan0": ("192.168.2.7",),
    },
    route_ips=("192.168.1.20",),
)
_PEER = Identity.from_secret(b"\x01" * 32)
_OTHER = Identity.from_secret(b"\x02" * 32)


def _tcp(*hosts: str) -> list[str]:
    return [f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/4001" for host in hosts]


def test_loopback_and_bridges_are_left_out_and_the_default_route_comes_first() -> None:
    seen = _tcp("172.17.0.1", "127.0.0.1", "::1", "192.168.2.7", "fe80::1", "172.18.0.1", "192.168.1.20")
    assert advertised(seen, _HOME, "0.0.0.0") == _tcp("192.168.1.20", "192.168.2.7")


def test_the_public_address_that_others_saw_comes_before_private_ones() -> None:
    seen = _tcp("192.168.2.7", "8.8.4.4", "192.168.1.20")
    assert advertised(seen, _HOME, "0.0.0.0") == _tcp("192.168.1.20", "8.8.4.4", "192.168.2.7")


def test_loopback_when_it_was_asked_for_or_nothing_else_is_there() -> None:
    assert advertised(_tcp("127.0.0.1"), _HOME, "127.0.0.1") == _tcp("127.0.0.1")
    alone = Machine({"lo": ("127.0.0.1",)})
    assert advertised(_tcp("127.0.0.1"), alone, "0.0.0.0") == _tcp("127.0.0.1")
    assert advertised(_tcp("127.0.0.1", "172.17.0.1"), _HOME, "0.0.0.0") == _tcp("172.17.0.1")
    assert advertised([], _HOME, "0.0.0.0") == []


def test_a_bridge_that_was_asked_for_is_told() -> None:
    assert advertised(_tcp("172.17.0.1"), _HOME, "172.17.0.1") == _tcp("172.17.0.1")


def test_what_is_not_an_address_is_left_out() -> None:
    seen = ["/ip4/8.8.4.4/udp/4001/quic-v1", "nonsense", "/dns4/seed.example.org/tcp/4001", *_tcp("192.168.1.20")]
    assert advertised(seen, _HOME, "0.0.0.0") == ["/dns4/seed.example.org/tcp/4001", *_tcp("192.168.1.20")]


def test_a_strangers_loopback_is_believed_only_by_a_node_on_loopback() -> None:
    addrs = (*_tcp("127.0.0.1", "::1", "0.0.0.0", "224.0.0.1", "169.254.1.1", "8.8.4.4"), "/dns4/localhost/tcp/22")
    assert [addr.host for addr in believable(addrs, _PEER.public, "0.0.0.0")] == ["8.8.4.4"]
    on_loopback = [addr.host for addr in believable(addrs, _PEER.public, "127.0.0.1")]
    assert on_loopback == ["127.0.0.1", "::1", "8.8.4.4", "localhost"]


def test_addresses_of_another_peer_are_not_believed_and_their_number_is_bounded() -> None:
    own, other = (f"/ip4/8.8.4.4/tcp/1/p2p/{identity.peer_id}" for identity in (_PEER, _OTHER))
    assert [addr.public for addr in believable((own, other), _PEER.public, "0.0.0.0")] == [_PEER.public]
    many = tuple(f"/ip4/8.8.4.4/tcp/{port}" for port in range(1, 5000))
    assert len(believable(many, _PEER.public, "0.0.0.0")) == 8


def test_where_to_listen() -> None:
    assert listen_addrs("0.0.0.0", 4001) == ["/ip4/0.0.0.0/tcp/4001"]
    assert listen_addrs("127.0.0.1", 0) == ["/ip4/127.0.0.1/tcp/0"]
    if socket.has_ipv6:
        assert listen_addrs("::", 4001) == ["/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"]
    assert is_loopback("127.3.2.1") and is_loopback("::1") and not is_loopback("localhost")


def test_a_port_that_another_program_holds_is_noticed_even_with_reuseport() -> None:
    with socket.socket() as holder:
        if hasattr(socket, "SO_REUSEPORT"):
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 is in use"):
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", 0)
    with pytest.raises(BadInput, match="can't listen on 192.0.2.77"):
        require_free_port("192.0.2.77", 4001)


def test_this_machine_can_be_read() -> None:
    machine = look_at_machine()
    assert any("127.0.0.1" in ips for ips in machine.interfaces.values())
    known = {ip for ips in machine.interfaces.values() for ip in ips}
    assert set(machine.route_ips) <= known
