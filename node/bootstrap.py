"""Before a node is a peer: fetching the swarm's spec from the seeds, and remembering peers from the last run."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable

from tscale.node.transport.base import Transport, TransportError
from tscale.protocol.addrs import parse_multiaddr_peer
from tscale.protocol.errors import BadInput, RefuseFrame
from tscale.protocol.identity import find_public
from tscale.protocol.messages import GetSpec, Refused, SpecReply, decode, encode
from tscale.protocol.records import PeerRecord, open_record
from tscale.protocol.spec import SwarmSpec

_LOG = logging.getLogger("tscale.node")
ASK_TIMEOUT_S = 10.0
RETRY_S = (1.0, 15.0)
SAY_EVERY_S = 15.0


def is_peer_record(peer: str, record: bytes) -> bool:
    """Whether a directory entry is a peer record signed by that peer."""
    try:
        return open_record(record, (PeerRecord,)).public == find_public(peer)
    except RefuseFrame:
        return False


def contacts_of(records: Iterable[bytes]) -> tuple[tuple[bytes, tuple[str, ...]], ...]:
    """Keys and addresses in kept peer records; damaged ones are left out."""
    found = []
    for data in records:
        try:
            signed = open_record(data, (PeerRecord,))
        except RefuseFrame:
            continue
        if signed.record.addrs:
            found.append((signed.public, signed.record.addrs))
    return tuple(found)


async def fetch_spec(
    transport: Transport, swarm_id: str, seeds: tuple[str, ...], say: Callable[[str], None]
) -> SwarmSpec:
    """Ask the seeds in turn until one sends the spec whose hash is in the id. Raises BadInput when one sends another.

    Keeps trying while none answers, and says what it waits for.
    """
    if not seeds:
        raise BadInput(f"{swarm_id} names no seed and this machine has no spec of it: join with the creator's full link")
    publics = list(dict.fromkeys(parse_multiaddr_peer(seed)[1] for seed in seeds))
    for seed in seeds:
        addr, public = parse_multiaddr_peer(seed)
        transport.learn_addrs(public, (addr,))
    wait_s, said_s = RETRY_S[0], float("-inf")
    while True:
        reasons = []
        for public in publics:
            try:
                return await _ask(transport, swarm_id, public)
            except (TransportError, RefuseFrame) as error:
                reasons.append(str(error))
        now_s = time.monotonic()
        if now_s - said_s > SAY_EVERY_S:
            said_s = now_s
            say(f"waiting for a seed of {swarm_id}: none of {len(publics)} answers ({reasons[0]}); still trying")
        await asyncio.sleep(wait_s * random.uniform(0.75, 1.25))
        wait_s = min(wait_s * 1.5, RETRY_S[1])


async def _ask(transport: Transport, swarm_id: str, public: bytes) -> SwarmSpec:
    reply = await transport.request(public, encode(swarm_id, GetSpec(), time.time()), ASK_TIMEOUT_S)
    message = decode(reply).message
    if isinstance(message, Refused):
        raise RefuseFrame(f"the seed says: {message.reason[:80]}")
    if not isinstance(message, SpecReply):
        raise RefuseFrame("the seed sent no spec")
    spec = SwarmSpec.from_bytes(message.spec)
    if spec.swarm_id != swarm_id:
        raise BadInput(f"the seed sent a spec that does not hash to {swarm_id}: the link is wrong, or the seed lies")
    return spec
