"""Fetching the spec before a node is a peer: seeds that are down, slow, lying, of another swarm, or somebody else."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.helpers.virtual_loop import run_virtually
from tscale.node.bootstrap import ASK_TIMEOUT_S, contacts_of, contacts_of_links, fetch_spec, is_peer_record
from tscale.node.transport.base import TransportError, WrongPeer
from tscale.node.transport.memory import MemoryNetwork, MemoryTransport
from tscale.protocol.canonical import pack
from tscale.protocol.errors import BadInput, VersionRefused
from tscale.protocol.hashing import blob_ref
from tscale.protocol.identity import Identity
from tscale.protocol.messages import GetSpec, Message, Refused, SpecReply, decode, encode
from tscale.protocol.presets import preset
from tscale.protocol.records import PeerRecord, seal_record
from tscale.protocol.spec import SwarmSpec

SPEC = preset("nano", data=(blob_ref(b"call me ishmael"),), owner=bytes(32), t0_unix_s=0.0)
GOOD = SpecReply(SPEC.to_bytes())
LIE = SpecReply(replace(SPEC, seed=7).to_bytes())
IDENTITIES = [Identity.from_secret(bytes([number]) * 32) for number in range(4)]


class Seeds:
    """Seeds that answer with one message each; None is a seed that is down."""

    def __init__(self, *replies: Message | None) -> None:
        self.network = MemoryNetwork(1, lambda: 0.0)
        self.said: list[str] = []
        self.asked: list[int] = []
        self.replies = list(replies)
        self.own = self.network.transport(IDENTITIES[3].public)

    async def run(self) -> SwarmSpec:
        await self.own.start()
        seeds = [self.network.transport(IDENTITIES[number].public) for number in range(len(self.replies))]
        for number, seed in enumerate(seeds):
            if self.replies[number] is not None:
                await self.raise_seed(seed, number)
        addrs = tuple(seed.own_addrs()[0] for seed in seeds)
        return await fetch_spec(self.own, SPEC.swarm_id, addrs, self.said.append)

    async def raise_seed(self, seed: MemoryTransport, number: int) -> None:
        async def answer(peer: bytes, payload: bytes) -> bytes:
            assert decode(payload).message == GetSpec()
            self.asked.append(number)
            reply = self.replies[number]
            assert reply is not None
            return encode(SPEC.swarm_id, reply, 0.0)

        seed.set_handler(answer)
        await seed.start()


def test_the_first_good_answer_is_taken_whatever_the_others_say() -> None:
    seeds = Seeds(None, LIE, GOOD)
    assert run_virtually(seeds.run()) == SPEC
    assert seeds.said == []


def test_a_seed_that_never_answers_does_not_hold_up_the_others() -> None:
    async def scenario() -> None:
        seeds = Seeds(GOOD, GOOD)
        seeds.network.faults = replace(seeds.network.faults, delay_s=(0.1, 0.1))
        slow = seeds.own.request

        async def request(public: bytes, payload: bytes, timeout_s: float) -> bytes:
            if public == IDENTITIES[0].public:
                await asyncio.sleep(timeout_s)
                raise TransportError("no reply")
            return await slow(public, payload, timeout_s)

        seeds.own.request = request  # type: ignore[method-assign]
        assert await seeds.run() == SPEC
        assert asyncio.get_running_loop().time() < ASK_TIMEOUT_S / 10

    run_virtually(scenario())


def test_a_seed_that_is_down_is_waited_for_and_named() -> None:
    async def scenario() -> None:
        seeds = Seeds(None)
        task = asyncio.create_task(seeds.run())
        await asyncio.sleep(60.0)
        assert 3 <= len(seeds.said) <= 5
        assert set(seeds.said) == {
            f"waiting for a seed of {SPEC.swarm_id}: none of 1 answers (nobody listens at its address); still trying"
        }
        seeds.replies[0] = GOOD
        await seeds.raise_seed(seeds.network.transport(IDENTITIES[0].public), 0)
        # the waits between tries stay below 20 s
        assert await asyncio.wait_for(task, 20.0) == SPEC

    run_virtually(scenario())


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (LIE, "does not hash to the id: the link is wrong, or the seed lies"),
        (SpecReply(b"\xc1 not a spec"), "a spec that this version can't use"),
        (Refused("another swarm"), "the seed is in another swarm: check the id"),
    ],
)
def test_an_answer_that_will_not_change_is_an_error_once_nobody_else_is_left(reply: Message, says: str) -> None:
    seeds = Seeds(reply, reply)
    with pytest.raises(BadInput, match=says):
        run_virtually(seeds.run())
    assert sorted(seeds.asked) == [0, 1]


async def answer_in_wire_2(public: bytes, payload: bytes, timeout_s: float) -> bytes:
    header = pack((2, "whatever wire 2", {"has": "here"}))
    return len(header).to_bytes(4, "little") + header


def test_a_seed_of_another_wire_version_ends_the_node_with_a_code_of_its_own() -> None:
    seeds = Seeds(GOOD)
    seeds.own.request = answer_in_wire_2  # type: ignore[method-assign]
    with pytest.raises(VersionRefused, match="speaks wire version 2, this node only 1: update tscale-node") as caught:
        run_virtually(seeds.run())
    assert caught.value.exit_code == 7 and "\n" not in str(caught.value)


def test_a_liar_beside_a_seed_that_is_down_is_not_the_end() -> None:
    async def scenario() -> None:
        seeds = Seeds(LIE, None)
        task = asyncio.create_task(seeds.run())
        await asyncio.sleep(60.0)
        assert not task.done()
        assert seeds.asked == [0]
        seeds.replies[1] = GOOD
        await seeds.raise_seed(seeds.network.transport(IDENTITIES[1].public), 1)
        assert await asyncio.wait_for(task, 20.0) == SPEC

    run_virtually(scenario())


def test_another_peer_at_the_address_is_a_wrong_link() -> None:
    async def refuse(public: bytes, payload: bytes, timeout_s: float) -> bytes:
        raise WrongPeer("another peer answers at this address (its peer id is different)")

    seeds = Seeds(GOOD)
    seeds.own.request = refuse  # type: ignore[method-assign]
    with pytest.raises(BadInput, match="another peer answers at this address .*: check the link's peer id"):
        run_virtually(seeds.run())


def test_a_refusal_that_may_pass_is_not_the_end() -> None:
    async def scenario(seeds: Seeds) -> None:
        task = asyncio.create_task(seeds.run())
        await asyncio.sleep(3.0)
        seeds.replies[0] = GOOD
        assert await asyncio.wait_for(task, 20.0) == SPEC
        assert "the seed says: too busy" in seeds.said[0]

    run_virtually(scenario(Seeds(Refused("too busy"))))


def test_kept_records_give_contacts_and_damaged_ones_are_left_out() -> None:
    one, two = IDENTITIES[:2]
    addr = f"/ip4/10.0.0.1/tcp/4001/p2p/{one.peer_id}"
    record = PeerRecord(SPEC.swarm_id, "trainer", (addr,), "", 1, 1, 5.0, 60.0, False)
    good, silent = seal_record(one, record).bytes, seal_record(two, replace(record, addrs=())).bytes
    assert contacts_of([good[:-1], b"", silent, good]) == ((one.public, (addr,)),)
    assert is_peer_record(one.peer_id, good)
    assert not is_peer_record(two.peer_id, good) and not is_peer_record(one.peer_id, good + b"x")
    other = f"/ip4/10.0.0.2/tcp/1/p2p/{two.peer_id}"
    assert contacts_of_links((addr, other, addr)) == ((one.public, (addr, addr)), (two.public, (other,)))
