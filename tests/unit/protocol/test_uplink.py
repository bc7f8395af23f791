"""A slow uplink: what is not sent because it would come too late, so that records get out."""

from __future__ import annotations

import pytest

from tests.helpers.solo import LENGTH_S, T0, Solo, announce, blob_of, other, peer_record
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.fetching import PUSH_AFTER_GOSSIPS
from tscale.protocol.hashing import blob_ref, chunk_hashes
from tscale.protocol.identity import Identity
from tscale.protocol.messages import BlobsReply, GetBlobs, GetChunk, Gossip, GossipReply, Push, PutChunk, Refused
from tscale.protocol.uplink import Uplink

ALICE, BOB, CAROL = (other(number) for number in range(1, 4))
CLOSE = T0 + LENGTH_S
SLOW_BPS = 16_000.0


def closed(upload_bps: float, size_bytes: int) -> Solo:
    """A peer among others whose first contribution has this size."""
    solo = Solo(upload_bps=upload_bps).boot().at(CLOSE - 1.0).meet(ALICE, BOB, CAROL).at(CLOSE + 0.1)
    solo.requests()
    (make,) = solo.take(fx.MakeContribution)
    data = blob_of(solo.identity, 0, size_bytes)[:size_bytes]
    solo.feed(ev.ContributionMade(0, make.base, blob_ref(data), chunk_hashes(data), 100, 1, 2.0, make.rung))
    return solo


def test_chunks_are_promised_one_after_another_until_the_next_would_come_too_late() -> None:
    uplink = Uplink(SLOW_BPS, 6.0)
    assert uplink.is_slow and uplink.fits(9_000) and not uplink.fits(9_001)
    assert [uplink.reserve(4_000, 100.0) for _ in range(3)] == [True, True, False]
    assert uplink.reserve(4_000, 103.0), "one of them is out by then"
    assert uplink.reserve(4_000, 50.0), "a clock that was set back blocks nothing"
    assert not uplink.reserve(9_001, 1e6)


def test_a_fast_uplink_is_not_limited() -> None:
    uplink = Uplink(20e6, 2.0)
    assert not uplink.is_slow and uplink.fits(1 << 30)
    assert all(uplink.reserve(1 << 20, 0.0) for _ in range(100))
    assert uplink.gossip_pause_s(1 << 20) == 0.0
    assert all(uplink.spend_on_records(1 << 20, 0.0) for _ in range(100))


@pytest.mark.parametrize(("size_bytes", "announced", "pushes"), [(9_001, 0, 0), (4_000, 1, 2), (8_000, 1, 1)])
def test_only_what_gets_out_in_time_is_announced_and_pushed(size_bytes: int, announced: int, pushes: int) -> None:
    solo = closed(SLOW_BPS, size_bytes)
    assert not any(isinstance(message, PutChunk) for _, message in solo.requests()), "whoever can ask is asking now"
    solo.at(solo.now + PUSH_AFTER_GOSSIPS * solo.machine.view.pace.gossip_s + 0.01)
    assert len(solo.machine.view.pool.of_round(0)) == announced
    assert sum(isinstance(message, PutChunk) for _, message in solo.requests()) == pushes
    assert solo.machine.fetching.undelivered_bytes == (0 if announced else size_bytes)
    assert len(solo.take(fx.DropBlob)) == 1 - announced


@pytest.mark.parametrize(("askers", "pushes"), [((), 2), ((ALICE,), 1), ((ALICE, BOB), 0)])
def test_what_others_ask_for_does_not_cross_the_uplink_a_second_time(askers: tuple[Identity, ...], pushes: int) -> None:
    solo = closed(20e6, 4_000)
    (signed,) = solo.machine.view.pool.of_round(0).values()
    for who in askers:
        assert solo.ask(who, GetChunk(signed.record.blob.root, 0)) != Refused("not here")
    solo.requests()
    solo.at(solo.now + PUSH_AFTER_GOSSIPS * solo.machine.view.pace.gossip_s + 0.01)
    pushed = [request.peer for request, message in solo.requests() if isinstance(message, PutChunk)]
    assert len(pushed) == pushes and not {who.public for who in askers} & set(pushed)
    solo.at(solo.now + 5.0)
    assert not any(isinstance(message, PutChunk) for _, message in solo.requests()), "once"


def test_alone_a_slow_peer_contributes_as_ever() -> None:
    solo = Solo(upload_bps=SLOW_BPS).boot().at(CLOSE + 0.1)
    (make,) = solo.take(fx.MakeContribution)
    data = blob_of(solo.identity, 0, 200_000)
    solo.feed(ev.ContributionMade(0, make.base, blob_ref(data), chunk_hashes(data), 100, 1, 2.0, make.rung))
    assert solo.machine.view.pool.of_round(0).keys() == {solo.identity.public}


def test_a_chunk_that_would_come_too_late_is_refused_and_not_offered() -> None:
    solo = closed(SLOW_BPS, 200)
    large, small = blob_of(ALICE, 0, 20_000), blob_of(BOB, 0, 100)
    for data in (large, small):
        solo.machine.view.transfers.add_complete(blob_ref(data), chunk_hashes(data))
    assert isinstance(solo.ask(CAROL, GetChunk(blob_ref(large).root, 0)), Refused)
    assert isinstance(solo.ask(CAROL, GetBlobs(blob_ref(small).root)), BlobsReply)
    reply = solo.ask(CAROL, Gossip(b"", b""))
    assert isinstance(reply, GossipReply)
    assert blob_ref(large).root[:8] not in reply.have and blob_ref(small).root[:8] in reply.have


def test_gossip_takes_a_quarter_of_a_slow_uplink_and_others_records_are_left_to_them() -> None:
    solo = Solo(upload_bps=4_000.0).boot().meet(ALICE, BOB, CAROL)
    records = tuple(peer_record(other(number), solo.now).bytes for number in range(1000, 1100))
    solo.ask(ALICE, Push(records))
    solo.requests()
    sent: list[int] = []
    for _ in range(40):
        solo.at(solo.now + 0.5)
        found = solo.requests()
        sent.extend(len(request.payload) for request, message in found if isinstance(message, Gossip))
        for request, message in found:
            if isinstance(message, Gossip):
                solo.reply(request, GossipReply(b"", b"", ()))
    assert len(sent) >= 2 and sum(sent) <= 0.25 * 500 * 20 + max(sent)
    passed = 0
    for round_ in range(1, 4):
        for identity in (ALICE, BOB, CAROL):
            solo.ask(ALICE, Push((announce(identity, round_).bytes,)))
            solo.at(solo.now + 0.5)
            passed += sum(message.records != () for _, message in solo.requests() if isinstance(message, Push))
    assert passed <= 4, "of 27 that a fast uplink carries"


@pytest.mark.parametrize(("upload_bps", "seals_at_once"), [(16_000.0, False), (20e6, True)])
def test_a_peer_whose_manifest_takes_long_seals_last(upload_bps: float, seals_at_once: bool) -> None:
    """It would be late, and without the others' last contributions."""
    solo = Solo(upload_bps=upload_bps).boot().at(CLOSE - 1.0).meet(ALICE).at(CLOSE + 0.1)
    assert solo.contribute() is not None
    solo.hold(ALICE, announce(ALICE, 0))
    solo.at(CLOSE + 5.0)
    assert bool(solo.sealed()) is seals_at_once
    solo.meet(ALICE).at(CLOSE + 10.5)
    assert bool(solo.sealed()) is not seals_at_once, "nobody else did"
