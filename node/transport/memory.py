"""A network in memory with seeded faults, for tests of everything above the transport.

All its waiting is on the event loop's clock, so that a loop with a virtual clock runs it in no time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from tscale.node.transport.base import (
    MAX_PAYLOAD_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    RequestHandler,
    SeedStatus,
    Traffic,
    TransportError,
)
from tscale.protocol.addrs import find_problem
from tscale.protocol.identity import peer_id


@dataclass(frozen=True)
class Faults:
    """What happens to each request: lost (the asker waits in vain), its reply lost, handled twice, late.

    The first three are probabilities; the delay is uniform in the range and counts once each way.
    """

    drop: float = 0.0
    drop_reply: float = 0.0
    duplicate: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)


class MemoryNetwork:
    """The ether. The same seed and the same order of calls give the same faults."""

    def __init__(self, seed: int, now_unix_s: Callable[[], float], faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.rng = random.Random(seed)
        self._now_unix_s = now_unix_s
        self._peers: dict[bytes, MemoryTransport] = {}
        self._links: set[frozenset[bytes]] = set()
        self._cuts: set[frozenset[bytes]] = set()
        self._records: dict[bytes, tuple[bytes, float]] = {}

    def transport(self, public: bytes, listen: bool = True) -> MemoryTransport:
        """An end of the network; with `listen=False` others reach it only after it has dialled them."""
        return MemoryTransport(self, public, listen)

    def cut(self, one: bytes, other: bytes) -> None:
        """Nothing passes between two peers, in either direction."""
        self._cuts.add(frozenset((one, other)))
        self._links.discard(frozenset((one, other)))

    def part(self, *sides: set[bytes]) -> None:
        """Cut every pair of peers on different sides."""
        for index, side in enumerate(sides):
            for other in sides[index + 1 :]:
                for pair in ((one, two) for one in side for two in other):
                    self.cut(*pair)

    def heal(self) -> None:
        """Undo all cuts; connections are dialled anew."""
        self._cuts.clear()

    def kill(self, public: bytes) -> None:
        """A peer is gone without a word; its records stay until they expire."""
        peer = self._peers.pop(public, None)
        self._links = {link for link in self._links if public not in link}
        if peer is not None:
            peer.end_calls()

    def join(self, peer: MemoryTransport) -> None:
        """Add an end; replaces one with the same key."""
        self._peers[peer.public] = peer

    def reach(self, asker: bytes, public: bytes) -> MemoryTransport:
        """The peer, dialled when needed. Raises TransportError when there is no way."""
        target = self._peers.get(public)
        link = frozenset((asker, public))
        if target is None or link in self._cuts or asker not in self._peers:
            raise TransportError("nobody listens at its address")
        if link not in self._links and not target.listens:
            raise TransportError("no address of it is known")
        self._links.add(link)
        return target

    def keep(self, public: bytes, record: bytes, expires_unix_s: float) -> None:
        """Put a record into the directory."""
        self._records[public] = (record, expires_unix_s)

    def records_for(self, public: bytes) -> list[bytes]:
        """The records that have not expired and whose authors are not cut off from the reader."""
        now_unix_s = self._now_unix_s()
        self._records = {author: item for author, item in self._records.items() if item[1] > now_unix_s}
        seen = (author for author in self._records if frozenset((author, public)) not in self._cuts)
        return [self._records[author][0] for author in sorted(seen)][:MAX_RECORDS]


class MemoryTransport:
    """A Transport on a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, public: bytes, listens: bool) -> None:
        self.public = public
        self.listens = listens
        self.addrs: dict[bytes, tuple[str, ...]] = {}
        self._network = network
        self._handler: RequestHandler | None = None
        self._traffic = Traffic()
        self._calls: set[asyncio.Task[bytes]] = set()
        self._strays: set[asyncio.Task[bytes]] = set()

    async def start(self) -> None:
        """Join the network."""
        self._network.join(self)

    async def close(self) -> None:
        """Leave it."""
        self._network.kill(self.public)
        self.end_calls()

    async def request(self, peer_public: bytes, payload: bytes, timeout_s: float) -> bytes:
        """Ask a peer, with the network's faults."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise TransportError(f"a request of {len(payload)} bytes is longer than {MAX_PAYLOAD_BYTES}")
        call = asyncio.create_task(self._call(peer_public, payload))
        self._calls.add(call)
        try:
            done, _ = await asyncio.wait({call}, timeout=timeout_s)
            if not done:
                raise TransportError(f"no reply within {timeout_s:g} s")
            if call.cancelled():
                raise TransportError("the network is not running")
            return call.result()
        finally:
            call.cancel()
            self._calls.discard(call)
            await asyncio.gather(call, return_exceptions=True)

    def set_handler(self, handler: RequestHandler) -> None:
        """Answer requests with this."""
        self._handler = handler

    def learn_addrs(self, peer_public: bytes, addrs: tuple[str, ...]) -> None:
        """Keep the usable ones, for the test to look at; peers are found by key here."""
        self.addrs[peer_public] = tuple(addr for addr in addrs if find_problem(addr) is None)

    def own_addrs(self) -> list[str]:
        """A made-up address that is this peer's alone."""
        if not self.listens:
            return []
        host = ".".join(str(part) for part in (10, *self.public[:3]))
        return [f"/ip4/{host}/tcp/4001/p2p/{peer_id(self.public)}"]

    async def publish(self, record: bytes, expires_unix_s: float) -> None:
        """Put a record into the network's directory."""
        if len(record) > MAX_RECORD_BYTES:
            raise TransportError(f"a record of {len(record)} bytes is longer than {MAX_RECORD_BYTES}")
        self._network.keep(self.public, record, expires_unix_s)

    async def discover(self) -> list[bytes]:
        """The directory as seen from here."""
        return self._network.records_for(self.public)

    def seeds_status(self) -> tuple[SeedStatus, ...]:
        """There are no seeds in memory."""
        return ()

    @property
    def up_bytes(self) -> int:
        """Bytes sent."""
        return self._traffic.up_bytes

    @property
    def down_bytes(self) -> int:
        """Bytes received."""
        return self._traffic.down_bytes

    def end_calls(self) -> None:
        """End what is under way, as a crash does."""
        for task in [*self._calls, *self._strays]:
            task.cancel()

    async def _call(self, peer_public: bytes, payload: bytes) -> bytes:
        faults, rng = self._network.faults, self._network.rng
        dropped, reply_dropped, twice = (
            rng.random() < chance for chance in (faults.drop, faults.drop_reply, faults.duplicate)
        )
        there_s, back_s = (rng.uniform(*faults.delay_s) for _ in range(2))
        self._network.reach(self.public, peer_public)
        await asyncio.sleep(there_s)
        if dropped:
            await asyncio.Event().wait()
        target = self._network.reach(self.public, peer_public)
        self._traffic.up_bytes += len(payload)
        if twice:
            self._strays.add(stray := asyncio.create_task(target.answer(self.public, payload)))
            stray.add_done_callback(self._end_stray)
        reply = await target.answer(self.public, payload)
        await asyncio.sleep(back_s)
        if reply_dropped:
            await asyncio.Event().wait()
        self._network.reach(self.public, peer_public)
        self._traffic.down_bytes += len(reply)
        return reply

    async def answer(self, asker: bytes, payload: bytes) -> bytes:
        """Handle a request as the receiving end does. Raises TransportError for whatever goes wrong."""
        self._traffic.down_bytes += len(payload)
        if self._handler is None:
            raise TransportError("the peer refused: not ready")
        try:
            reply = await self._handler(asker, payload)
        except Exception as error:
            raise TransportError("the peer refused: the request failed here") from error
        if len(reply) > MAX_PAYLOAD_BYTES:
            raise TransportError("the peer refused: the reply is too long")
        self._traffic.up_bytes += len(reply)
        return reply

    def _end_stray(self, task: asyncio.Task[bytes]) -> None:
        self._strays.discard(task)
        if not task.cancelled():
            # read it, so that asyncio does not complain about it
            task.exception()
