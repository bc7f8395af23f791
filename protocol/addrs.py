"""Peers' addresses: the few multiaddr forms that nodes listen on and dial (`/ip4/<ip>/tcp/<port>[/p2p/<peer id>]`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from tscale.protocol.errors import BadInput
from tscale.protocol.identity import find_public, peer_id

MAX_ADDR_CHARS = 256

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


@dataclass(frozen=True, slots=True)
class PeerAddr:
    """A parsed address. `public` is None when it names no peer."""

    family: str
    host: str
    port: int
    public: bytes | None

    @property
    def text(self) -> str:
        """The multiaddr."""
        tail = "" if self.public is None else f"/p2p/{peer_id(self.public)}"
        return f"/{self.family}/{self.host}/tcp/{self.port}{tail}"


def find_problem(text: str) -> str | None:
    """What is wrong with an address, in one line, or None when it can be used."""
    result = _parse(text)
    return result if isinstance(result, str) else None


def parse_addr(text: str) -> PeerAddr:
    """Parse one address. Raises BadInput with the reason."""
    result = _parse(text)
    if isinstance(result, str):
        raise BadInput(result)
    return result


def parse_multiaddr_peer(text: str) -> tuple[str, bytes]:
    """The address and the public key in a multiaddr that names its peer. Raises BadInput with the reason."""
    addr = parse_addr(text)
    if addr.public is None:
        raise BadInput(f"{text!r} names no peer: an address ends in /p2p/<peer id>")
    return addr.text, addr.public


def _parse(text: str) -> PeerAddr | str:
    shown = repr(text[:80])
    if len(text) > MAX_ADDR_CHARS or not text.isascii() or not text.isprintable():
        return f"{shown} is not an address: too long, or with characters no address has"
    if not text.startswith("/"):
        return f"{shown} is not a multiaddr: it looks like /ip4/203.0.113.5/tcp/4001/p2p/12D3KooW..."
    parts = text[1:].split("/")
    if parts.count("p2p") > 1 or sum(parts.count(key) for key in ("ip4", "ip6", "dns", "dns4", "dns6")) > 1:
        return f"{shown} is two addresses pasted as one: separate them"
    if len(parts) not in (4, 6) or parts[2] != "tcp" or (len(parts) == 6 and parts[4] != "p2p"):
        return f"{shown} is not /<ip4|ip6|dns>/<host>/tcp/<port>/p2p/<peer id>: only TCP addresses can be used"
    family, host, port = parts[0], parts[1], parts[3]
    if not _host_fits(family, host):
        return f"{host[:64]!r} is not a host for /{family[:8]}: check the address {shown}"
    if not _PORT.fullmatch(port) or int(port) > 65535:
        return f"{port[:16]!r} is not a TCP port: it is a number from 1 to 65535"
    public = None
    if len(parts) == 6:
        public = find_public(parts[5])
        if public is None:
            return f"wrong peer id {parts[5][:64]!r}: it has 52 characters and starts with 12D3KooW, copy it in full"
    return PeerAddr(family, host, int(port), public)


def _host_fits(family: str, host: str) -> bool:
    try:
        if family == "ip4":
            return str(IPv4Address(host)) == host
        if family == "ip6":
            return "%" not in host and bool(IPv6Address(host))
    except ValueError:
        return False
    return family in ("dns", "dns4", "dns6") and len(host) <= 200 and _HOST_NAME.fullmatch(host) is not None
