"""Which addresses of this machine to tell other peers, and which of theirs to believe."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil

from tscale.protocol.addrs import PeerAddr, find_problem, parse_addr
from tscale.protocol.errors import BadInput, PortInUse

MAX_ADDRS = 8
"""A peer is told and believed at most this many addresses."""

_VIRTUAL = ("docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "podman", "cni", "lxc", "lxdbr", "flannel", "kube")
# TEST-NET-1 and the documentation prefix: "connecting" a datagram socket to them sends nothing, it only picks a route
_ROUTE_PROBES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))

_Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Machine:
    """The network interfaces of a machine: the text addresses by interface, and those the default route uses."""

    interfaces: dict[str, tuple[str, ...]]
    route_ips: tuple[str, ...] = ()


def look_at_machine() -> Machine:
    """Read this machine's interfaces and default route. Sends nothing."""
    interfaces = {
        name: tuple(item.address.split("%")[0] for item in items if item.family in (socket.AF_INET, socket.AF_INET6))
        for name, items in psutil.net_if_addrs().items()
    }
    return Machine(interfaces, tuple(ip for ip in (_route_ip(*probe) for probe in _ROUTE_PROBES) if ip is not None))


def advertised(addrs: list[str], machine: Machine, host: str) -> list[str]:
    """The addresses of `addrs` (multiaddrs this peer listens on or was seen at) that other peers should be told.

    Loopback only when the node was asked to listen there or when nothing else is left; addresses of container and
    VM bridges only when nothing better is left. The default route's address first, then public ones, then the rest.
    """
    parsed = [
        (addr, ip_address(addr.host)) for addr in map(parse_addr, _usable(addrs)) if addr.family in ("ip4", "ip6")
    ]
    named = [addr.text for addr in map(parse_addr, _usable(addrs)) if addr.family.startswith("dns")]
    virtual = _virtual_ips(machine)
    ranked = sorted(
        ((_rank(ip, machine, virtual, host), index, addr.text) for index, (addr, ip) in enumerate(parsed)),
    )
    best = [(rank, text) for rank, _, text in ranked if rank < _NEVER]
    good = [text for rank, text in best if rank < _POOR] or [text for _, text in best[:1]]
    return list(dict.fromkeys(named + good))[:MAX_ADDRS]


def believable(addrs: tuple[str, ...], public: bytes, own_host: str) -> tuple[PeerAddr, ...]:
    """The addresses of another peer's record worth dialling: usable, of that peer, and not this machine's own ports.

    Loopback addresses are believed only by a node that itself listens on loopback: otherwise a stranger's record
    could make every peer dial services on its own machine.
    """
    wanted = []
    for addr in map(parse_addr, _usable(list(addrs[: 4 * MAX_ADDRS]))):
        if addr.public not in (None, public):
            continue
        if addr.family in ("ip4", "ip6") and not _dialable(ip_address(addr.host), is_loopback(own_host)):
            continue
        if addr.family.startswith("dns") and addr.host.lower().endswith("localhost") and not is_loopback(own_host):
            continue
        wanted.append(addr)
    return tuple(dict.fromkeys(wanted))[:MAX_ADDRS]


def listen_addrs(host: str, port: int) -> list[str]:
    """The multiaddrs to listen on. `::` is every address of both families, where the machine has IPv6."""
    ip = ip_address(host)
    if isinstance(ip, IPv4Address):
        return [f"/ip4/{ip}/tcp/{port}"]
    both = [f"/ip4/0.0.0.0/tcp/{port}"] if ip.is_unspecified else []
    return both + [f"/ip6/{ip}/tcp/{port}"] if socket.has_ipv6 else both


def require_free_port(host: str, port: int) -> None:
    """Raise PortInUse when another program listens on the port, BadInput when the address can't be listened on.

    p2pd can't be trusted to notice: it listens with SO_REUSEPORT, so two of one user share a port without a word.
    """
    family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # binding beside a listener succeeds on some systems; listening does not
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(f"port {port} of {host} is in use: stop the other program or use --port 0") from error
            raise BadInput(
                f"can't listen on {host} port {port} ({error.strerror}): take another port or host"
            ) from error


def is_loopback(host: str) -> bool:
    """Whether a literal address is loopback. Names are not."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


_POOR = 10
_NEVER = 20


def _rank(ip: _Address, machine: Machine, virtual: frozenset[str], host: str) -> int:
    if ip.is_unspecified or ip.is_multicast or (ip.is_link_local and ip.version == 6):
        return _NEVER
    if ip.is_loopback:
        return 0 if is_loopback(host) else _POOR + 2
    if str(ip) in virtual:
        return 1 if str(ip) == host else _POOR + 1
    if ip.is_link_local:
        return _POOR
    if str(ip) in machine.route_ips:
        return 2
    return 3 if ip.is_global else 4


def _dialable(ip: _Address, loopback_ok: bool) -> bool:
    if ip.is_loopback:
        return loopback_ok
    return not (ip.is_unspecified or ip.is_multicast or ip.is_link_local)


def _virtual_ips(machine: Machine) -> frozenset[str]:
    return frozenset(ip for name, ips in machine.interfaces.items() if name.lower().startswith(_VIRTUAL) for ip in ips)


def _usable(addrs: list[str]) -> list[str]:
    return [text for text in addrs if find_problem(text) is None]


def _route_ip(family: socket.AddressFamily, target: str) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
