"""Before a node is a peer: fetching the swarm's spec from the seeds, and remembering peers from the last run."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tscale.node.transport.base import Transport, TransportError, WrongPeer
from tscale.protocol.addrs import parse_multiaddr_peer
from tscale.protocol.errors import BadInput, RefuseFrame, StopNode, VersionRefused
from tscale.protocol.identity import find_public
from tscale.protocol.messages import GetSpec, Refused, SpecReply, decode, encode
from tscale.protocol.records import PeerRecord, open_record
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.versions import describe_other, is_spoken, read_version

_LOG = logging.getLogger("tscale.node")
ASK_TIMEOUT_S = 10.0
RETRY_S = (1.0, 15.0)
SAY_EVERY_S = 15.0

Contact = tuple[bytes, tuple[str, ...]]
"""A peer's public key and its addresses."""


@dataclass(frozen=True)
class _Answer:
    """What one seed said: a good spec, or why not. `final`: asking it again would bring nothing else, and this is
    the node's error when no seed is left."""

    public: bytes
    spec: SwarmSpec | None
    reason: str = ""
    final: type[StopNode] | None = None


def is_peer_record(peer: str, record: bytes) -> bool:
    """Whether a directory entry is a peer record signed by that peer."""
    try:
        return open_record(record, (PeerRecord,)).public == find_public(peer)
    except RefuseFrame:
        return False


def contacts_of(records: Iterable[bytes]) -> tuple[Contact, ...]:
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


def contacts_of_links(seeds: Iterable[str]) -> tuple[Contact, ...]:
    """The peers in a list of multiaddrs. Raises BadInput for one that can't be used."""
    found: dict[bytes, list[str]] = {}
    for text in seeds:
        addr, public = parse_multiaddr_peer(text)
        found.setdefault(public, []).append(addr)
    return tuple((public, tuple(addrs)) for public, addrs in found.items())


async def fetch_spec(
    transport: Transport, swarm_id: str, seeds: tuple[str, ...], say: Callable[[str], None]
) -> SwarmSpec:
    """Ask all seeds at once until one sends the spec whose hash is in the id.

    Keeps trying while one may still answer, and says what it waits for. A seed that sends another spec, that speaks
    another wire version, or whose address belongs to another peer is not asked again; when no other is left, that is
    a BadInput or a VersionRefused.
    """
    if not seeds:
        raise BadInput(
            f"{swarm_id} names no seed and this machine has no spec of it: join with the creator's full link"
        )
    contacts = contacts_of_links(seeds)
    for public, addrs in contacts:
        transport.learn_addrs(public, addrs)
    asked = [public for public, _ in contacts]
    wait_s, said_s = RETRY_S[0], float("-inf")
    loop = asyncio.get_running_loop()
    while True:
        answers = await _ask_all(transport, swarm_id, asked)
        for answer in answers:
            if answer.spec is not None:
                return answer.spec
            if answer.final is not None:
                asked.remove(answer.public)
                _LOG.warning("seed_given_up seed=%s reason=%s", answer.public.hex()[:16], answer.reason)
        if not asked:
            last = answers[0]
            raise (last.final or BadInput)(f"no spec of {swarm_id}: {last.reason}")
        if loop.time() - said_s > SAY_EVERY_S:
            said_s = loop.time()
            reason = next(answer.reason for answer in answers if answer.final is None)
            say(f"waiting for a seed of {swarm_id}: none of {len(contacts)} answers ({reason}); still trying")
        await asyncio.sleep(wait_s * random.uniform(0.75, 1.25))
        wait_s = min(wait_s * 1.5, RETRY_S[1])


async def _ask_all(transport: Transport, swarm_id: str, publics: list[bytes]) -> list[_Answer]:
    """Every seed's answer, or those so far once one has sent a good spec."""
    tasks = [asyncio.create_task(_ask(transport, swarm_id, public)) for public in publics]
    answers: list[_Answer] = []
    try:
        for task in asyncio.as_completed(tasks):
            answers.append(await task)
            if answers[-1].spec is not None:
                break
    finally:
        for left in tasks:
            left.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers


async def _ask(transport: Transport, swarm_id: str, public: bytes) -> _Answer:
    try:
        reply = await transport.request(public, encode(swarm_id, GetSpec(), time.time()), ASK_TIMEOUT_S)
        version = read_version(reply)
        if version is not None and not is_spoken(version):
            return _Answer(public, None, describe_other(version), VersionRefused)
        message = decode(reply).message
    except WrongPeer as error:
        return _Answer(public, None, f"{error}: check the link's peer id and address, or ask for a new link", BadInput)
    except (TransportError, RefuseFrame) as error:
        return _Answer(public, None, str(error))
    if isinstance(message, Refused):
        if message.reason == "another swarm":
            return _Answer(public, None, "the seed is in another swarm: check the id, or ask for a new link", BadInput)
        return _Answer(public, None, f"the seed says: {message.reason[:80]}")
    if not isinstance(message, SpecReply):
        return _Answer(public, None, "the seed sent no spec")
    try:
        spec = SwarmSpec.from_bytes(message.spec)
    except RefuseFrame as error:
        reason = f"the seed sent a spec that this version can't use ({error}): update tscale-node, or the seed lies"
        return _Answer(public, None, reason, BadInput)
    if spec.swarm_id != swarm_id:
        reason = "the seed sent a spec that does not hash to the id: the link is wrong, or the seed lies"
        return _Answer(public, None, reason, BadInput)
    return _Answer(public, spec)
