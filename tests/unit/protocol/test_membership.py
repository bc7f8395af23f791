"""Who is in the swarm: which records are believed, who counts as alive, and whom to talk to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.helpers.solo import other, peer_record
from tscale.protocol.dice import Dice
from tscale.protocol.identity import Identity
from tscale.protocol.membership import (
    ALIVE_HEARTBEATS,
    FORGET_AFTER_S,
    MAX_CONTACTS,
    MAX_MEET_FAILURES,
    MEET_CHANCE,
    PROVEN_HEARTBEATS,
    RECORD_HEARTBEATS,
    STALE_CHANCE,
    STRIKES_HALVE_S,
    Contact,
    Membership,
)

OWN, ALICE, BOB, CAROL = (other(number) for number in range(4))
BEAT_S = 6.0
NOW = 1_000_000.0
ADDRS = ("/ip4/127.0.0.1/tcp/4001",)


def members() -> Membership:
    return Membership(OWN.public, BEAT_S)


def meet(found: Membership, identity: Identity, now: float = NOW, **changes: Any) -> bool:
    """Learn of a peer, and hear from it."""
    learned = found.learn(peer_record(identity, now, **changes), now)
    found.heard(identity.public, now)
    return learned


def living(found: Membership, now: float = NOW) -> set[bytes]:
    return {contact.public for contact in found.alive(now)}


def test_a_fresh_record_and_a_word_make_a_living_contact() -> None:
    found = members()
    assert found.learn(peer_record(ALICE, NOW), NOW)
    assert living(found) == set(), "anybody can sign a record for a key of his own"
    found.heard(ALICE.public, NOW)
    assert living(found) == {ALICE.public}
    assert found.contacts[ALICE.public].addrs == peer_record(ALICE, NOW).record.addrs


@pytest.mark.parametrize("after_s", [0.0, -1.0])
def test_only_a_newer_record_replaces_one(after_s: float) -> None:
    found = members()
    found.learn(peer_record(ALICE, NOW), NOW)
    assert not found.learn(peer_record(ALICE, NOW + after_s, addrs=ADDRS), NOW + 1.0)
    assert found.learn(peer_record(ALICE, NOW + 1.0, addrs=ADDRS), NOW + 1.0)
    assert found.contacts[ALICE.public].addrs == ADDRS


def test_expired_future_and_own_records_are_not_taken() -> None:
    found = members()
    assert not found.learn(peer_record(ALICE, NOW - 700.0), NOW)
    assert not found.learn(peer_record(ALICE, NOW + BEAT_S + 6.0), NOW)
    assert not found.learn(peer_record(OWN, NOW), NOW)
    assert found.contacts == {}


def test_a_record_without_addresses_keeps_the_known_ones() -> None:
    """A peer that can only dial out says so with an empty list; what others told of it may still be tried."""
    found = members()
    found.bootstrap(ALICE.public, ADDRS)
    found.learn(peer_record(ALICE, NOW, addrs=()), NOW)
    assert found.contacts[ALICE.public].addrs == ADDRS


def test_missed_heartbeats_are_silence_and_a_word_ends_it() -> None:
    assert ALIVE_HEARTBEATS >= 2.0, "one lost heartbeat is no silence"
    found = members()
    meet(found, ALICE)
    silent = NOW + ALIVE_HEARTBEATS * BEAT_S
    assert living(found, silent - 0.6) == {ALICE.public}
    assert living(found, silent + 0.6) == set()
    found.heard(ALICE.public, silent + 1.2)
    assert living(found, silent + 2.0) == {ALICE.public}


def test_goodbye_is_believed_at_once() -> None:
    found = members()
    meet(found, ALICE)
    assert living(found) == {ALICE.public}
    found.learn(peer_record(ALICE, NOW + 0.1, leaving=True), NOW + 0.1)
    assert living(found, NOW + 0.1) == set()
    found.heard(ALICE.public, NOW + 0.2)
    assert living(found, NOW + 1.0) == set()


def test_seeds_are_alive_but_do_not_train() -> None:
    found = members()
    meet(found, ALICE, role="seed")
    meet(found, BOB)
    assert living(found) == {ALICE.public, BOB.public}
    assert found.alive_trainers(NOW) == {BOB.public}


def test_failures_back_off_up_to_half_a_minute_and_a_word_resets_them() -> None:
    found = members()
    found.learn(peer_record(ALICE, NOW), NOW)
    waits = []
    for _ in range(12):
        found.failed(ALICE.public, NOW)
        waits.append(found.contacts[ALICE.public].retry_unix_s - NOW)
    assert waits[:3] == [3.0, 6.0, 12.0] and waits[-1] == 30.0 and waits == sorted(waits)
    assert found.gossip_targets(Dice(1), NOW, 1) == []
    found.heard(ALICE.public, NOW)
    assert found.gossip_targets(Dice(1), NOW, 1) == [ALICE.public]


def test_gossip_goes_to_the_living_and_now_and_then_to_the_silent() -> None:
    found = members()
    meet(found, ALICE)
    meet(found, BOB)
    found.bootstrap(CAROL.public, ADDRS)
    dice = Dice(5)
    picked = Counter(found.gossip_targets(dice, NOW, 1)[0] for _ in range(4000))
    assert abs(picked[CAROL.public] / 4000 - STALE_CHANCE) < 0.02
    assert abs(picked[ALICE.public] - picked[BOB.public]) < 300
    assert CAROL.public not in found.push_targets(dice, NOW, 5)


def test_with_nobody_alive_bootstrap_contacts_are_asked() -> None:
    found = members()
    assert found.gossip_targets(Dice(1), NOW, 1) == []
    found.bootstrap(CAROL.public, ADDRS)
    found.bootstrap(OWN.public, ADDRS)
    assert found.gossip_targets(Dice(1), NOW, 1) == [CAROL.public]


def test_a_full_house_lets_the_longest_silent_go_and_never_a_living_one() -> None:
    found = members()
    for number in range(MAX_CONTACTS):
        public = number.to_bytes(32, "little")
        found.contacts[public] = Contact(public, heard_unix_s=NOW - 1000.0 - number)
    oldest = (MAX_CONTACTS - 1).to_bytes(32, "little")
    assert found.learn(peer_record(ALICE, NOW), NOW)
    assert len(found.contacts) == MAX_CONTACTS and oldest not in found.contacts
    full = members()
    for number in range(MAX_CONTACTS):
        public = number.to_bytes(32, "little")
        full.contacts[public] = Contact(public, record=peer_record(BOB, NOW).record, heard_unix_s=NOW)
    assert not full.learn(peer_record(ALICE, NOW), NOW)
    assert len(full.contacts) == MAX_CONTACTS


def test_strangers_that_only_dial_in_push_each_other_out() -> None:
    found = members()
    found.bootstrap(BOB.public, ADDRS)
    found.learn(peer_record(ALICE, NOW), NOW)
    for number in range(MAX_CONTACTS + 50):
        public = number.to_bytes(32, "little")
        found.contact(public)
        found.heard(public, NOW + number)
    assert len(found.contacts) == MAX_CONTACTS
    assert {ALICE.public, BOB.public} <= set(found.contacts)
    assert bytes(32) not in found.contacts and public in found.contacts


def test_peers_are_forgotten_a_day_after_their_last_word_but_not_bootstrap_ones() -> None:
    found = members()
    meet(found, ALICE)
    found.bootstrap(BOB.public, ADDRS)
    found.sweep(NOW + 1000.0)
    assert found.contacts[ALICE.public].signed is None, "an expired record is not passed on"
    found.sweep(NOW + FORGET_AFTER_S + 1.0)
    assert set(found.contacts) == {BOB.public}


def test_an_author_that_the_chain_has_taken_lives_without_a_word() -> None:
    """In a large swarm most peers never speak to each other."""
    found = members()
    found.learn(peer_record(ALICE, NOW), NOW)
    assert found.alive_trainers(NOW) == set()
    found.vouch(frozenset({ALICE.public, BOB.public}))
    assert found.alive_trainers(NOW) == {ALICE.public}
    found.vouch(frozenset())
    assert found.alive_trainers(NOW) == set()


def test_who_has_not_spoken_for_long_is_a_stranger_again() -> None:
    found = members()
    meet(found, ALICE)
    later = NOW + PROVEN_HEARTBEATS * BEAT_S
    for moment, alive in ((later - 1.0, {ALICE.public}), (later + 1.0, set())):
        found.learn(peer_record(ALICE, moment), moment)
        assert living(found, moment) == alive


def test_strangers_are_tried_once_and_then_like_the_silent() -> None:
    found = members()
    meet(found, ALICE)
    found.learn(peer_record(BOB, NOW), NOW)
    dice = Dice(5)

    def pick(now: float) -> bytes:
        found._met_s = 0.0  # each time as if the last stranger was long ago
        return found.gossip_targets(dice, now, 1)[0]

    picked = Counter(pick(NOW) for _ in range(4000))
    assert abs(picked[BOB.public] / 4000 - MEET_CHANCE - (1 - MEET_CHANCE) * STALE_CHANCE) < 0.02
    assert all(found.push_targets(dice, NOW, 3) == [ALICE.public] for _ in range(20))
    found.failed(BOB.public, NOW)
    assert {pick(NOW) for _ in range(100)} == {ALICE.public}
    for identity in (ALICE, BOB):
        found.learn(peer_record(identity, NOW + 20.0), NOW + 20.0)
    picked = Counter(pick(NOW + 20.0) for _ in range(4000))
    assert abs(picked[BOB.public] / 4000 - STALE_CHANCE) < 0.02


def test_a_stranger_is_tried_beside_a_living_peer_and_not_in_its_place() -> None:
    """Where peers come and go most strangers are gone, and what is new must not wait for their silence."""
    found = members()
    meet(found, ALICE)
    found.learn(peer_record(BOB, NOW), NOW)
    dice = Dice(5)
    seen = set()
    for _ in range(40):
        found._met_s = 0.0
        seen.add(tuple(found.gossip_targets(dice, NOW, 1)))
    assert seen == {(ALICE.public,), (BOB.public, ALICE.public)}


def test_a_flood_of_invented_peers_displaces_nobody_who_has_spoken() -> None:
    found = members()
    meet(found, ALICE)
    stranger = peer_record(BOB, NOW).record
    for number in range(MAX_CONTACTS - 1):
        public = number.to_bytes(32, "little")
        found.contacts[public] = Contact(public, record=stranger)
    assert meet(found, CAROL), "there is room for one more"
    assert len(found.contacts) == MAX_CONTACTS
    assert living(found) == {ALICE.public, CAROL.public}


def test_a_record_is_not_good_for_longer_than_an_honest_one() -> None:
    found = members()
    old = peer_record(ALICE, NOW, expires_unix_s=NOW + 86_000.0)
    found.vouch(frozenset({ALICE.public}))
    end = NOW + RECORD_HEARTBEATS * BEAT_S
    assert not found.learn(old, end + 1.0)
    assert found.learn(old, end - 1.0)
    found.sweep(end + 1.0)
    assert found.contacts[ALICE.public].signed is None


def test_strangers_are_forgotten_with_their_records_and_sooner_when_nobody_answers() -> None:
    found = members()
    for identity in (ALICE, BOB, CAROL):
        found.learn(peer_record(identity, NOW), NOW)
    found.vouch(frozenset({CAROL.public}))
    for _ in range(MAX_MEET_FAILURES):
        found.failed(BOB.public, NOW)
    found.sweep(NOW + 1.0)
    assert set(found.contacts) == {p.public for p in (ALICE, BOB, CAROL)}, "their records are fresh"
    found.sweep(NOW + ALIVE_HEARTBEATS * BEAT_S + 1.0)
    assert set(found.contacts) == {ALICE.public, CAROL.public}
    found.sweep(NOW + RECORD_HEARTBEATS * BEAT_S + 1.0)
    assert set(found.contacts) == {CAROL.public}


def test_strangers_are_dialled_one_after_the_other_however_many_there_are() -> None:
    found = members()
    found.bootstrap(CAROL.public, ADDRS)
    for number in range(1000, 1040):
        found.learn(peer_record(other(number), NOW), NOW)
    dice, dialled = Dice(3), 0
    for tick in range(400):
        for public in found.gossip_targets(dice, NOW + tick * 0.025, 1):
            dialled += public != CAROL.public
            found.failed(public, NOW + tick * 0.025)
    assert dialled == 7, "in ten seconds, a quarter of a heartbeat apart"


def test_a_living_peer_that_owes_an_answer_is_asked_before_strangers() -> None:
    found = members()
    meet(found, ALICE)
    for number in range(1000, 1040):
        found.learn(peer_record(other(number), NOW), NOW)
    found.asked(ALICE.public, NOW)
    late = NOW + 0.3 * BEAT_S
    assert not found.is_ready(found.contacts[ALICE.public], late)
    dice = Dice(3)
    picked = Counter(found.gossip_targets(dice, late + tick * 0.3, 1)[0] for tick in range(20))
    assert picked[ALICE.public] >= 10


def test_strikes_halve_with_time() -> None:
    found = members()
    found.contact(ALICE.public).strikes = 17
    seen = []
    for step in range(8):
        now = NOW + step * STRIKES_HALVE_S / 2.0
        found.heard(ALICE.public, now)
        found.sweep(now)
        seen.append(found.contacts[ALICE.public].strikes)
    assert seen == [17, 17, 8, 8, 4, 4, 2, 2]
    found.sweep(NOW - 100.0)
    found.heard(ALICE.public, NOW + 1e6)
    found.sweep(NOW + 1e6)
    assert found.contacts[ALICE.public].strikes == 0
