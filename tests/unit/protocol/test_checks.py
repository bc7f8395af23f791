"""Verdicts about contributions: what somebody claims of another one's blob must not touch the other one."""

from __future__ import annotations

import pytest

from tests.helpers.solo import DATA, LENGTH_S, T0, Solo, announce, blob_of, manifest, other, snapshot_record
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.effects import Claim
from tscale.protocol.hashing import BlobRef, blob_ref, chunk_hashes
from tscale.protocol.intake import MAX_OFFERS
from tscale.protocol.messages import Push, PutChunk
from tscale.protocol.pool import MAX_PER_ROUND, claim_of
from tscale.protocol.records import Announcement, SignedRecord

ALICE, BOB, CAROL = other(1), other(2), other(3)
CLOSE = T0 + LENGTH_S


def booted() -> Solo:
    solo = Solo().boot().at(CLOSE - 1.0).meet(ALICE, BOB, CAROL).at(CLOSE + 0.1)
    solo.effects.clear()
    return solo


def lie(honest: SignedRecord[Announcement], *, rung: int = 0, more_bytes: int = 0) -> SignedRecord[Announcement]:
    """Bob announces the blob of another peer with another rung or size."""
    blob = BlobRef(honest.record.blob.root, honest.record.blob.size_bytes + more_bytes)
    return announce(BOB, honest.record.round, rung=rung, blob=blob)


def push_blob(solo: Solo, signed: SignedRecord[Announcement]) -> None:
    data = blob_of(ALICE, 0)
    solo.ask(ALICE, PutChunk(signed.bytes, b"".join(chunk_hashes(data)), 0), data)


def judge(solo: Solo, good: Claim) -> list[Claim]:
    """Let the worker answer what it was asked: only one claim is true. Returns what was asked."""
    asked = [effect.claim for effect in solo.take(fx.VerifyBlob)]
    for claim in asked:
        solo.feed(ev.BlobVerified(claim, claim == good, "" if claim == good else "another rung"))
    return asked


@pytest.mark.parametrize("lie_first", [False, True])
@pytest.mark.parametrize("change", [{"rung": 1}, {"more_bytes": -5}, {"more_bytes": 1 << 21}])
def test_a_lie_about_a_blob_does_not_touch_its_author(change: dict[str, int], lie_first: bool) -> None:
    solo, honest = booted(), announce(ALICE, 0)
    false = lie(honest, **change)
    good = claim_of(honest.record)
    asked: list[Claim] = []
    if lie_first:
        solo.ask(BOB, Push((false.bytes,)))
        push_blob(solo, false)  # of no effect when it is the size that is wrong
        asked += judge(solo, good)
    push_blob(solo, honest)
    asked += judge(solo, good)
    if not lie_first:
        solo.ask(BOB, Push((false.bytes,)))
        asked += judge(solo, good)
    pool = solo.machine.view.pool
    assert pool.is_good(honest.record) and pool.fault(claim_of(false.record))
    assert good in asked and len(set(asked)) == len(asked) == 1 + ("rung" in change)

    for author in (ALICE, BOB):
        solo.machine.view.members.contacts[author.public].strikes = 0
    theirs, ours = manifest(BOB, 0, [false]), manifest(ALICE, 0, [honest])
    solo.ask(BOB, Push((theirs.bytes, ours.bytes)))
    solo.at(solo.now + 0.4)
    chain = solo.machine.view.chain
    assert chain.links[theirs.digest].invalid and not chain.links[ours.digest].invalid
    assert solo.fold().manifest == ours.digest


def test_a_manifest_before_the_verdict_is_judged_with_it() -> None:
    solo, honest = booted(), announce(ALICE, 0)
    false = lie(honest, rung=1)
    theirs, ours = manifest(BOB, 0, [false]), manifest(ALICE, 0, [honest])
    solo.ask(BOB, Push((theirs.bytes, ours.bytes)))
    push_blob(solo, honest)
    assert set(judge(solo, claim_of(honest.record))) == {claim_of(honest.record), claim_of(false.record)}
    chain = solo.machine.view.chain
    assert chain.links[theirs.digest].invalid and not chain.links[ours.digest].invalid


def test_what_is_said_of_one_root_is_checked_again_after_the_blob_was_lost() -> None:
    solo, honest = booted(), announce(ALICE, 0)
    push_blob(solo, honest)
    judge(solo, claim_of(honest.record))
    solo.feed(ev.BlobMissing(honest.record.blob.root))
    assert not solo.machine.view.pool.is_good(honest.record)
    push_blob(solo, honest)
    solo.machine.view.want(honest.record.blob, "contribution", ALICE.public)
    push_blob(solo, honest)
    assert judge(solo, claim_of(honest.record)) == [claim_of(honest.record)]


def test_verdicts_are_forgotten_with_their_rounds() -> None:
    solo = booted()
    for round_ in range(8):
        signed = announce(ALICE, round_)
        solo.hold(ALICE, signed, ok=round_ % 2 == 0)
        assert solo.machine.view.pool.fault(claim_of(signed.record)) is not None
        solo.at(solo.now + LENGTH_S)
    known = [solo.machine.view.pool.fault(claim_of(announce(ALICE, round_).record)) for round_ in range(8)]
    assert known[1] is None and known[3] is None and known[7] == "too large"


def test_a_shard_of_the_dataset_that_is_announced_as_a_contribution_stays() -> None:
    solo = booted()
    solo.ask(BOB, Push((announce(BOB, 0, blob=blob_ref(DATA)).bytes,)))
    solo.at(CLOSE + 8.0 * LENGTH_S)
    assert solo.machine.view.has(blob_ref(DATA))
    assert blob_ref(DATA).root not in [drop.root for drop in solo.take(fx.DropBlob)]


def test_a_full_round_still_takes_those_who_have_spoken() -> None:
    """Whoever signs with many keys must not keep out the others."""
    solo = booted()
    pool = solo.machine.view.pool
    pool.by_round[0] = {number.to_bytes(32, "little"): announce(BOB, 0) for number in range(MAX_PER_ROUND)}
    stranger = other(50)
    solo.ask(CAROL, Push((announce(stranger, 0).bytes, announce(ALICE, 0).bytes)))
    assert ALICE.public in pool.of_round(0) and stranger.public not in pool.of_round(0)


def test_offers_of_strangers_make_room_for_those_of_others() -> None:
    solo = booted()
    first = manifest(ALICE, 0, [announce(ALICE, 0)])
    flood = [snapshot_record(other(1000 + n // 16), first, bytes([n % 16])) for n in range(MAX_OFFERS)]
    for start in range(0, MAX_OFFERS, 512):
        solo.ask(BOB, Push(tuple(signed.bytes for signed in flood[start : start + 512])))
    offers = solo.machine.sync.offers
    assert len(offers) == MAX_OFFERS
    late = [snapshot_record(who, first, b"the state") for who in (ALICE, other(50))]
    solo.ask(CAROL, Push(tuple(signed.bytes for signed in late)))
    assert late[0].digest in offers and late[1].digest not in offers
    assert len(offers) == MAX_OFFERS and flood[0].digest[:8] not in solo.machine.spread.live
