"""The directory among real p2pd on loopback, and seeds that come late, are wrong, or go."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.helpers.p2p_peers import free_port, peers_in, until, until_joined
from tscale.node.transport.base import MAX_RECORD_BYTES, TransportError

pytestmark = pytest.mark.process


def test_records_are_found_by_all_and_junk_is_not_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            seed = await peers.start(1, check_record=lambda peer_id, record: not record.startswith(b"junk"))
            member = await peers.start(2, seeds=tuple(seed.own_addrs()))
            dialler = await peers.start(3, seeds=tuple(seed.own_addrs()), listen=False, serve_dht=False)
            await until_joined(member)
            await until_joined(dialler)
            record = b"member" + bytes(MAX_RECORD_BYTES - 6)
            await member.publish(record, time.time() + 60)
            await dialler.publish(b"dialler", time.time() + 60)
            assert sorted(await seed.discover()) == [b"dialler", record]
            assert sorted(await dialler.discover()) == [b"dialler", record]
            await dialler.publish(b"newer", time.time() + 90)
            assert sorted(await member.discover()) == sorted([b"newer", record])
            await dialler.publish(b"junk", time.time() + 120)
            assert b"junk" not in await seed.discover()
            with pytest.raises(TransportError, match="longer than"):
                await member.publish(bytes(MAX_RECORD_BYTES + 1), time.time() + 60)

    asyncio.run(scenario())


def test_a_seed_that_comes_later_is_found_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peers_in(tmp_path) as peers:
            port = free_port()
            addr = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peers.identity(1).peer_id}"
            early = await peers.start(2, seeds=(addr,))

            async def refused() -> bool:
                return [status.problem for status in early.seeds_status()] == ["nobody listens at its address"]

            await until(refused, "the missing seed is reported")
            assert await early.discover() == []
            await early.publish(b"early", time.time() + 60)
            impostor = await peers.start(9, port=port)

            async def named() -> bool:
                return "another peer answers" in early.seeds_status()[0].problem

            await until(named, "the wrong peer id is reported")
            await impostor.close()
            seed = await peers.start(1, port=port)
            assert seed.own_addrs() == [addr]
            await until_joined(early)

            async def handed_over() -> bool:
                return await seed.discover() == [b"early"]

            await until(handed_over, "the record reaches the seed")
            await seed.close()

            async def lost() -> bool:
                return not early.seeds_status()[0].reachable

            await until(lost, "the lost seed is noticed")

    asyncio.run(scenario())
