"""What a node needs from a network: authenticated requests to peers by public key, and a directory of peer records."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tscale.protocol.errors import TscaleError

MAX_PAYLOAD_BYTES = (1 << 20) + (1 << 16)
"""No request and no reply is longer: one 1 MiB chunk and room for its envelope."""

MAX_RECORD_BYTES = 4096
"""No record in the directory is longer."""

MAX_RECORDS = 512
"""`discover` returns no more records than this."""

RequestHandler = Callable[[bytes, bytes], Awaitable[bytes]]
"""`async (peer_public, payload) -> reply`. The transport vouches for `peer_public`."""


class TransportError(TscaleError):
    """A request brought no reply: nobody there, no way to dial, refused, too slow, or too large.

    It says nothing about whether the peer saw the request.
    """


class WrongPeer(TransportError):
    """Another peer answers at the address: its key is not the one that was asked for."""


@dataclass
class Traffic:
    """Bytes since the start, in both roles, payloads and frame headers, without the cost of encryption and TCP."""

    up_bytes: int = 0
    down_bytes: int = 0


@dataclass(frozen=True)
class SeedStatus:
    """What is known of one seed address. `problem` is one line, empty while the seed answers."""

    addr: str
    reachable: bool
    problem: str = ""


class Transport(Protocol):
    """A peer's end of the network. All methods belong to one event loop."""

    async def start(self) -> None:
        """Listen and begin to join. Returns once requests can be sent, whether or not a seed answers."""

    async def close(self) -> None:
        """Stop answering, end every request with TransportError, leave nothing behind. May be called twice."""

    async def request(self, peer_public: bytes, payload: bytes, timeout_s: float) -> bytes:
        """Send one request and wait for its reply. Raises TransportError, at the latest after `timeout_s`."""

    def set_handler(self, handler: RequestHandler) -> None:
        """Answer requests with this. What it raises becomes an error at the asking peer and nothing else."""

    def learn_addrs(self, peer_public: bytes, addrs: tuple[str, ...]) -> None:
        """Remember where a peer can be dialled; replaces what was known. Addresses that can't be used are left out."""

    def own_addrs(self) -> list[str]:
        """Where others may dial this peer: multiaddrs ending in its peer id, the best first."""

    async def publish(self, record: bytes, expires_unix_s: float) -> None:
        """Put this peer's signed record into the directory. Raises TransportError when nothing took it."""

    async def discover(self) -> list[bytes]:
        """The records in the directory, not verified, at most MAX_RECORDS of at most MAX_RECORD_BYTES."""

    def seeds_status(self) -> tuple[SeedStatus, ...]:
        """The seeds given at the start and whether they answer."""

    @property
    def up_bytes(self) -> int:
        """Bytes sent since the start."""

    @property
    def down_bytes(self) -> int:
        """Bytes received since the start."""
