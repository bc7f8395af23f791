"""How records travel: heartbeats, pushes of what is new, gossip for the rest, and nothing passed on twice."""

from __future__ import annotations

import pytest

from tests.helpers.solo import GENESIS, T0, Solo, announce, manifest, other, peer_record, solo_spec
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.messages import MAX_IDS, MAX_RECORDS, RECORDS_BUDGET_BYTES, Gossip, GossipReply, Push
from tscale.protocol.records import PeerRecord, open_record
from tscale.protocol.spread import MAX_HAVE_IDS, RETRY_GOSSIPS

ALICE, BOB, CAROL = other(1), other(2), other(3)


def pushed(solo: Solo) -> list[tuple[bytes, tuple[bytes, ...]]]:
    """(peer, records) of the pushes asked for."""
    return [(request.peer, message.records) for request, message in solo.requests() if isinstance(message, Push)]


def test_the_own_record_is_published_and_renewed_before_it_is_silence() -> None:
    solo = Solo().boot()
    found = [open_record(effect.record, (PeerRecord,)) for effect in solo.take(fx.Publish)]
    assert found and all(signed.public == solo.identity.public for signed in found)
    record = found[-1].record
    assert record.role == "trainer" and record.addrs == ("/ip4/127.0.0.1/tcp/3999",) and not record.leaving
    solo.at(T0 + 20.0)
    again = [open_record(effect.record, (PeerRecord,)).record for effect in solo.take(fx.Publish)]
    times = [record.issued_unix_s, *(later.issued_unix_s for later in again)]
    gaps = [later - sooner for sooner, later in zip(times, times[1:], strict=False)]
    assert gaps and all(0.0 < gap < 2.0 * solo.machine.view.pace.heartbeat_s for gap in gaps)


def test_new_addresses_are_told_at_once_and_equal_ones_are_not_news() -> None:
    solo = Solo().boot()
    solo.take(fx.Publish)
    solo.feed(ev.AddrsChanged(("/ip4/127.0.0.1/tcp/3999",)))
    assert solo.take(fx.Publish) == []
    solo.feed(ev.AddrsChanged(("/ip4/10.0.0.9/tcp/4001",)))
    (published,) = solo.take(fx.Publish)
    assert open_record(published.record, (PeerRecord,)).record.addrs == ("/ip4/10.0.0.9/tcp/4001",)


def test_leaving_is_said_to_living_peers_before_the_end() -> None:
    solo = Solo().boot().meet(ALICE, BOB)
    solo.requests()
    solo.feed(ev.Leaving())
    told = pushed(solo)
    assert {peer for peer, _ in told} == {ALICE.public, BOB.public}
    for _, records in told:
        said = [open_record(data, (PeerRecord,)).record for data in records if b"\xa4peer" in data[:8]]
        assert any(record.leaving for record in said)


def test_a_new_announcement_is_passed_on_once() -> None:
    solo = Solo().boot().meet(ALICE, BOB, CAROL)
    solo.at(solo.now + 2.0).requests()
    signed = announce(ALICE, 0)
    solo.ask(ALICE, Push((signed.bytes,)))
    solo.at(solo.now + 2.0)
    assert sum(signed.bytes in records for _, records in pushed(solo)) >= 1
    solo.ask(BOB, Push((signed.bytes,)))
    solo.at(solo.now + 2.0)
    assert sum(signed.bytes in records for _, records in pushed(solo)) == 0


def test_what_is_pushed_fits_one_message() -> None:
    solo = Solo(spec=solo_spec()).boot().meet(BOB)
    for number in range(100, 130):
        solo.ask(ALICE, Push((announce(other(number), 0).bytes,)))
    solo.at(solo.now + 3.0)
    for _, records in pushed(solo):
        assert sum(map(len, records)) <= RECORDS_BUDGET_BYTES and len(records) <= 512


def test_gossip_swaps_what_each_side_lacks() -> None:
    solo = Solo().boot().meet(ALICE)
    solo.at(solo.now + 3.0)
    asked = [request for request, message in solo.requests() if isinstance(message, Gossip)]
    assert asked and asked[0].peer == ALICE.public
    mine = peer_record(BOB, solo.now)
    live = announce(CAROL, 0)
    solo.ask(CAROL, Push((live.bytes,)))
    solo.reply(asked[-1], GossipReply(live.digest[:8], b"", (mine.bytes,)))
    assert BOB.public in solo.machine.view.members.contacts
    assert (ALICE.public, (live.bytes,)) in pushed(solo)


def test_what_a_peer_can_serve_is_remembered_up_to_a_limit() -> None:
    solo = Solo().boot().meet(ALICE)
    blob = announce(CAROL, 0).record.blob
    solo.ask(CAROL, Push((announce(CAROL, 0).bytes,)))
    solo.ask(ALICE, Gossip(b"", bytes(8 * 8000) + blob.root[:8]))
    kept = solo.machine.view.members.contacts[ALICE.public].have
    assert len(kept) == 8 * MAX_HAVE_IDS and kept.endswith(blob.root[:8])
    assert ALICE.public in solo.machine.view.transfers.wants[blob].holders


def test_gossip_stays_within_its_caps_however_much_is_known() -> None:
    solo = Solo().boot().meet(ALICE)
    own = solo.machine.spread.live
    for number in range(MAX_IDS + 100):
        own[number.to_bytes(8, "little")] = next(iter(own.values()))
    solo.at(solo.now + 2.0)
    asked = [message for _, message in solo.requests() if isinstance(message, Gossip)]
    assert asked and all(len(message.known) <= 8 * MAX_IDS for message in asked)


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    solo = Solo().boot().meet(ALICE)
    solo.at(solo.now + 3.0)
    (request, _), *_ = [pair for pair in solo.requests() if isinstance(pair[1], Gossip)]
    reply = GossipReply(b"", b"", (peer_record(BOB, solo.now).bytes,))
    solo.reply(request, reply)
    solo.machine.view.members.contacts.pop(BOB.public)
    solo.reply(request, reply)
    assert BOB.public not in solo.machine.view.members.contacts


def test_a_failed_request_lets_the_peer_rest() -> None:
    solo = Solo().boot().meet(ALICE)
    solo.at(solo.now + 3.0)
    request, _ = solo.requests()[0]
    solo.feed(ev.RequestFailed(request.token, "timed out"))
    contact = solo.machine.view.members.contacts[ALICE.public]
    assert contact.failures == 1 and contact.retry_unix_s > solo.now


@pytest.mark.parametrize(("round_", "taken"), [(0, True), (1, False)], ids=["this round", "a round that has not begun"])
def test_only_rounds_of_this_time_are_taken(round_: int, taken: bool) -> None:
    solo = Solo().boot()
    solo.ask(ALICE, Push((announce(ALICE, round_).bytes,)))
    assert bool(solo.machine.view.pool.of_round(round_)) == taken


def test_an_old_announcement_is_not_taken() -> None:
    solo = Solo().boot().at(T0 + 100.0)
    solo.ask(ALICE, Push((announce(ALICE, 1).bytes,)))
    assert solo.machine.view.pool.of_round(1) == {}


@pytest.mark.parametrize(
    "changes", [{"tokens": 1_000_001}, {"rung": 9}, {"swarm": "else-" + "a" * 26}], ids=["tokens", "rung", "swarm"]
)
def test_an_announcement_over_the_spec_is_neither_taken_nor_passed_on(changes: dict[str, object]) -> None:
    solo = Solo().boot().meet(BOB)
    solo.at(solo.now + 2.0).requests()
    signed = announce(ALICE, 0, **changes)
    solo.ask(ALICE, Push((signed.bytes,)))
    solo.at(solo.now + 2.0)
    assert solo.machine.view.pool.of_round(0) == {}
    assert not any(signed.bytes in records for _, records in pushed(solo))


def test_a_second_announcement_of_an_author_is_not_taken() -> None:
    solo = Solo().boot()
    first, second = announce(ALICE, 0), announce(ALICE, 0, tokens=900)
    solo.ask(ALICE, Push((first.bytes,)))
    solo.ask(ALICE, Push((second.bytes,)))
    assert solo.machine.view.pool.of_round(0)[ALICE.public].digest == first.digest


def test_a_manifest_from_the_future_is_not_taken() -> None:
    solo = Solo().boot()
    early = manifest(ALICE, 5, [announce(ALICE, 5)])
    solo.ask(ALICE, Push((early.bytes,)))
    assert solo.machine.view.chain.get(early.digest) is None


def test_addresses_of_others_are_handed_to_the_transport() -> None:
    solo = Solo().boot()
    solo.effects.clear()
    record = peer_record(ALICE, solo.now)
    solo.feed(ev.Discovered((record.bytes, b"junk")))
    assert solo.take(fx.LearnAddrs) == [fx.LearnAddrs(ALICE.public, record.record.addrs)]


def test_the_genesis_is_what_everybody_starts_from() -> None:
    assert Solo().boot().machine.head is not None
    assert Solo().boot().machine.head.digest == GENESIS  # type: ignore[union-attr]


def invented(count: int, now: float) -> tuple[bytes, ...]:
    """Peer records of keys that nobody runs."""
    return tuple(peer_record(other(number), now, addrs=()).bytes for number in range(1000, 1000 + count))


def test_invented_peers_are_nobody_to_push_to_or_to_wait_for() -> None:
    solo = Solo(upload_bps=1e5).boot().meet(ALICE)
    solo.ask(ALICE, Push(invented(300, solo.now)))
    assert len(solo.machine.view.members.contacts) == 301
    assert solo.machine.rounds.others() == {ALICE.public}
    solo.at(solo.now + 0.4).requests()
    solo.ask(ALICE, Push((announce(ALICE, 0).bytes,)))
    solo.at(solo.now + 0.4)
    assert {peer for peer, _ in pushed(solo)} == {ALICE.public}


def test_a_flood_of_peers_displaces_no_round_from_a_message() -> None:
    solo = Solo().boot().meet(ALICE)
    solo.ask(ALICE, Push(invented(400, solo.now)))
    solo.ask(ALICE, Push(tuple(peer_record(other(n), solo.now, addrs=()).bytes for n in range(2000, 2400))))
    signed = announce(ALICE, 0)
    solo.requests()
    solo.ask(ALICE, Push((signed.bytes,)))
    reply = solo.ask(BOB, Gossip(b"", b""))
    assert isinstance(reply, GossipReply) and len(reply.records) == MAX_RECORDS
    own = solo.machine.spread.own_record
    living = solo.machine.view.members.contacts[ALICE.public].signed
    assert own is not None and living is not None
    assert reply.records[:3] == (own.bytes, signed.bytes, living.bytes)
    solo.at(solo.now + 0.4)
    assert (ALICE.public, signed.bytes) in [(peer, records[0]) for peer, records in pushed(solo)]


def test_gossip_that_fails_at_once_is_no_storm() -> None:
    solo = Solo().boot()
    solo.machine.view.members.bootstrap(ALICE.public, ())
    solo.machine.view.members.bootstrap(BOB.public, ())
    for number in range(1000, 1300):
        solo.machine.view.members.bootstrap(other(number).public, ())
    solo.requests()
    sent = 0
    for _ in range(500):
        solo.now += 0.02
        solo.feed(ev.Tick())
        for request, message in solo.requests():
            sent += isinstance(message, Gossip)
            solo.feed(ev.RequestFailed(request.token, "connection refused"))
    assert sent <= 1 + 10.0 / (RETRY_GOSSIPS * solo.machine.view.pace.gossip_s)


def test_records_of_peers_that_made_room_for_others_are_not_kept() -> None:
    solo = Solo().boot().meet(ALICE)
    solo.ask(ALICE, Push(invented(20, solo.now)))
    live, contacts = solo.machine.spread.live, solo.machine.view.members.contacts
    assert len(live) == 22
    for number in range(1000, 1010):
        del contacts[other(number).public]
    solo.machine.spread.sweep(-10, -10)
    assert len(live) == 12
