"""The swarm's directory of peer records on hivemind's DHT: one key per swarm, one entry per peer.

hivemind's own storage keeps anything for anybody and its own lookup trusts what comes back, so both are replaced:
`RecordStore` takes only bounded entries under the swarm's key, and lookups treat each answer on its own.
Clocks of peers are not compared here (hivemind refuses a peer 3 seconds off); readers verify the signed times.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tscale.node.transport.base import MAX_RECORD_BYTES, MAX_RECORDS, TransportError
from tscale.node.transport.hivemind_parts import HivemindParts
from tscale.protocol.identity import find_public

_LOG = logging.getLogger("tscale.transport")
_REPLICAS = 5
_ROUNDS = 3
_PEERS_PER_ROUND = 8
_CALL_TIMEOUT_S = 3.0

RecordCheck = Callable[[str, bytes], bool]
"""`(peer_id, record) -> bool`: whether the record is signed by that peer. Called before an entry is stored."""


@dataclass(frozen=True)
class StoreLimits:
    """What the directory keeps for others. All entries together must fit a DHT answer of 4 MiB.

    `clock_skew_s` is how far peers' clocks may be apart before an entry counts as expired; `max_ahead_s` bounds how
    long an entry may live, so that a wrong clock can't plant one that outlives its truth.
    """

    records: int = 2 * MAX_RECORDS
    total_bytes: int = 2 << 20
    clock_skew_s: float = 120.0
    max_ahead_s: float = 7200.0


class RecordStore:
    """A DHT node's storage: the entries of one key. It stands in for hivemind's DHTLocalStorage."""

    def __init__(
        self, parts: HivemindParts, key: Any, limits: StoreLimits, now_unix_s: Callable[[], float], check: RecordCheck
    ) -> None:
        self._parts = parts
        self._key = key
        self._limits = limits
        self._now_unix_s = now_unix_s
        self._check = check
        self._entries: dict[str, tuple[bytes, float]] = {}
        self._total_bytes = 0

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Refuse plain values; entries go to `store_subkey`."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        """Keep a packed record for a peer id when it is newer, allowed, and fits. Returns whether it was kept."""
        if key != self._key or not isinstance(subkey, str) or not isinstance(value, bytes):
            return False
        if not isinstance(expiration_time, float) or not math.isfinite(expiration_time):
            return False
        now_unix_s = self._now_unix_s()
        self._drop_expired(now_unix_s)
        late = expiration_time < now_unix_s - self._limits.clock_skew_s
        early = expiration_time > now_unix_s + self._limits.max_ahead_s + self._limits.clock_skew_s
        known, known_until = self._entries.get(subkey, (b"", -math.inf))
        if late or early or expiration_time <= known_until:
            return False
        is_new = subkey not in self._entries
        if self._total_bytes - len(known) + len(value) > self._limits.total_bytes:
            return False
        if is_new and len(self._entries) >= self._limits.records:
            return False
        record = unpack_record(value)
        if record is None or find_public(subkey) is None or not self._check(subkey, record):
            return False
        self._entries[subkey] = (value, expiration_time)
        self._total_bytes += len(value) - len(known)
        return True

    def get(self, key: Any) -> Any:
        """The entries as hivemind packs them, or None."""
        self._drop_expired(self._now_unix_s())
        if key != self._key or not self._entries:
            return None
        dictionary = self._parts.dictionary()
        # frozen: what has expired is for the clock above to say, not for hivemind's
        dictionary.frozen = True
        for subkey, (value, expires_unix_s) in self._entries.items():
            dictionary.store(subkey, value, expires_unix_s)
        return self._parts.with_expiration(dictionary, dictionary.latest_expiration_time)

    def items(self) -> list[tuple[Any, Any]]:
        """What hivemind hands to a node that joins: the one key and its entries."""
        item = self.get(self._key)
        return [] if item is None else [(self._key, item)]

    def records(self) -> dict[str, bytes]:
        """The records by peer id, unpacked."""
        self._drop_expired(self._now_unix_s())
        unpacked = {subkey: unpack_record(value) for subkey, (value, _) in self._entries.items()}
        return {subkey: record for subkey, record in unpacked.items() if record is not None}

    def _drop_expired(self, now_unix_s: float) -> None:
        limit_unix_s = now_unix_s - self._limits.clock_skew_s
        for subkey in [subkey for subkey, (_, until) in self._entries.items() if until < limit_unix_s]:
            value, _ = self._entries.pop(subkey)
            self._total_bytes -= len(value)


class NoCache:
    """Stands in for the cache of a DHT node and keeps nothing."""

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Keep nothing."""
        return False

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        """Keep nothing."""
        return False

    def get(self, key: Any) -> None:
        """Nothing is here."""
        return

    def __contains__(self, key: Any) -> bool:
        return False


@dataclass(frozen=True)
class DirectoryConfig:
    """Which directory, and what it accepts. `serve` is whether this node keeps entries for others."""

    swarm_id: str
    serve: bool
    now_unix_s: Callable[[], float]
    check: RecordCheck
    limits: StoreLimits = StoreLimits()


class Directory:
    """This node's part of the DHT. Make it with `create` on a running P2P."""

    def __init__(self, parts: HivemindParts, node: Any, key: Any, store: RecordStore) -> None:
        self._parts = parts
        self._node = node
        self._key = key
        self._store = store

    @classmethod
    async def create(cls, parts: HivemindParts, p2p: Any, config: DirectoryConfig) -> Directory:
        """Start a DHT node without neighbours; `greet` finds them."""
        key = parts.dht_id.generate(source=f"tscale/{config.swarm_id}/peers")
        store = RecordStore(parts, key, config.limits, config.now_unix_s, config.check)
        node = await parts.dht_node.create(
            p2p=p2p,
            client_mode=not config.serve,
            wait_timeout=_CALL_TIMEOUT_S,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )
        node.protocol.storage = store
        node.protocol.cache = NoCache()
        return cls(parts, node, key, store)

    @property
    def neighbours(self) -> int:
        """How many DHT nodes are known."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def greet(self, peer: Any) -> bool:
        """Ping a connected peer (hivemind's PeerID): if it is a DHT node, both know each other afterwards."""
        return await self._node.protocol.call_ping(peer, validate=False, strict=False) is not None

    def knows(self, peer: Any) -> bool:
        """Whether the peer is among the neighbours."""
        return self._node.protocol.routing_table.get(peer_id=peer) is not None

    async def publish(self, peer_id: str, record: bytes, expires_unix_s: float) -> int:
        """Store a record here and at the nodes nearest to the key. Returns how many others took it.

        Raises TransportError when the record is too long or nobody, not even this node, took it.
        """
        if len(record) > MAX_RECORD_BYTES:
            raise TransportError(f"a record of {len(record)} bytes is longer than {MAX_RECORD_BYTES}")
        value = self._node.protocol.serializer.dumps(record)
        nearest, _ = await self._look_up()
        own = self._store.store_subkey(self._key, peer_id, value, float(expires_unix_s))
        calls = [
            self._node.protocol.call_store(peer, [self._key], [value], float(expires_unix_s), subkeys=[peer_id])
            for peer in nearest[:_REPLICAS]
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        taken = sum(1 for answer in answers if not isinstance(answer, BaseException) and answer and answer[0])
        if not own and not taken:
            raise TransportError("no DHT node took the peer record: its time may be expired, check the clock")
        return taken

    async def discover(self) -> list[bytes]:
        """All records found, this node's store first; at most MAX_RECORDS."""
        _, found = await self._look_up()
        merged = self._store.records()
        for answer in found:
            for subkey, record in answer.items():
                merged.setdefault(subkey, record)
        return list(merged.values())[:MAX_RECORDS]

    async def close(self) -> None:
        """Leave the DHT."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await self._node.shutdown()
        except TimeoutError:
            _LOG.debug("dht_close_timeout")

    async def _look_up(self) -> tuple[list[Any], list[dict[str, bytes]]]:
        """Ask the nodes nearest to the key, and those they name. Returns peers, nearest first, and their records."""
        table = self._node.protocol.routing_table
        known = dict(table.get_nearest_neighbors(self._key, _PEERS_PER_ROUND, exclude=self._node.node_id))
        asked: dict[Any, Any] = {}
        found: list[dict[str, bytes]] = []
        for _ in range(_ROUNDS):
            todo = sorted((node for node in known if node not in asked), key=self._key.xor_distance)[:_PEERS_PER_ROUND]
            if not todo:
                break
            answers = await asyncio.gather(*(self._ask(known[node]) for node in todo), return_exceptions=True)
            for node, answer in zip(todo, answers, strict=True):
                asked[node] = None
                if answer is None or isinstance(answer, BaseException):
                    continue
                records, nearest = answer
                asked[node] = known[node]
                found.append(records)
                known.update({node_id: peer for node_id, peer in nearest.items() if peer != self._node.peer_id})
        alive = [node for node in sorted(asked, key=self._key.xor_distance) if asked[node] is not None]
        return [asked[node] for node in alive], found

    async def _ask(self, peer: Any) -> tuple[dict[str, bytes], dict[Any, Any]] | None:
        answer = await self._node.protocol.call_find(peer, [self._key])
        if not answer:
            return None
        item, nearest = answer[self._key]
        records = {} if item is None else self._read(item.value)
        return records, dict(list(nearest.items())[: 2 * _PEERS_PER_ROUND])

    def _read(self, dictionary: Any) -> dict[str, bytes]:
        if not isinstance(dictionary, self._parts.dictionary):
            return {}
        records: dict[str, bytes] = {}
        for subkey, item in list(dictionary.data.items())[: 2 * MAX_RECORDS]:
            record = unpack_record(item.value) if isinstance(item.value, bytes) else None
            if isinstance(subkey, str) and record is not None:
                records[subkey] = record
        return records


def unpack_record(value: bytes) -> bytes | None:
    """The bytes in a msgpack `bin` that is nothing else, or None. This is how the DHT packs an entry."""
    if not value:
        return None
    width = {0xC4: 1, 0xC5: 2}.get(value[0])
    if width is None or len(value) < 1 + width:
        return None
    body = value[1 + width :]
    fits = len(body) <= MAX_RECORD_BYTES
    return body if fits and len(body) == int.from_bytes(value[1 : 1 + width], "big") else None
