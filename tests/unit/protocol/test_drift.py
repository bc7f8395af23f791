"""A peer whose state others contradict: whom it believes, and how it comes out when nobody offers their state."""

from __future__ import annotations

import pytest

from tests.helpers.solo import LENGTH_S, T0, Solo, announce, manifest, other, state_of
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.hashing import digest
from tscale.protocol.messages import Push
from tscale.protocol.records import Manifest, SignedRecord

ALICE, BOB, CAROL = other(1), other(2), other(3)
FALSE = digest("test", b"a flipped bit")
RIGHT = digest("test", b"right")


def folded(mine: bytes, own_tokens: int = 0) -> tuple[Solo, SignedRecord[Manifest]]:
    """A peer at a manifest of Alice, Bob and Carol, with its own idea of the state after it."""
    solo = Solo().boot().at(T0 + LENGTH_S * 1.1).meet(ALICE, BOB, CAROL)
    parts = [announce(who, 0) for who in (ALICE, BOB, CAROL)]
    first = manifest(ALICE, 0, parts)
    for who, part in zip((ALICE, BOB, CAROL), parts, strict=True):
        solo.hold(who, part)
    solo.ask(ALICE, Push((first.bytes,)))
    (fold,) = solo.take(fx.Fold)
    solo.feed(ev.Folded(fold.manifest, mine))
    if own_tokens:
        solo.feed(ev.ContributionFailed(0, "it came too late"))
        solo.take(fx.MakeContribution)
        solo.at(T0 + LENGTH_S * 2.0 + 0.1)
        solo.contribute(own_tokens)
    solo.effects.clear()
    return solo, first


def contradict(solo: Solo, first: SignedRecord[Manifest], round_: int, state: bytes | None = None) -> None:
    """Alice and Bob have trained from the manifest, and say what the state after it is."""
    for who in (ALICE, BOB):
        solo.hold(who, announce(who, round_, first.digest, base_state=state or state_of(first.digest)))


def keep_contradicting(solo: Solo, first: SignedRecord[Manifest], rounds: int, state: bytes | None = None) -> None:
    """So for some rounds; nobody offers the state. The worker's answers are left to the test."""
    for round_ in range(1, 1 + rounds):
        solo.meet(ALICE, BOB)
        contradict(solo, first, round_, state)
        solo.at(T0 + LENGTH_S * (round_ + 1) + 1.0)


def notices(solo: Solo) -> list[str]:
    return [notice.event for notice in solo.take(fx.Notice)]


@pytest.mark.parametrize("own_tokens", [0, 199, 5_000])
def test_authors_are_counted_and_not_their_tokens(own_tokens: int) -> None:
    solo, first = folded(FALSE, own_tokens)
    contradict(solo, first, 1)
    assert solo.machine.sync.drifted


def test_one_author_with_many_tokens_does_not_outvote_two() -> None:
    solo, first = folded(RIGHT, 100)
    solo.hold(BOB, announce(BOB, 1, first.digest, base_state=RIGHT))
    solo.hold(ALICE, announce(ALICE, 1, first.digest, base_state=FALSE, tokens=1_000_000))
    assert not solo.machine.sync.drifted and notices(solo) == []


def test_a_peer_that_is_no_longer_contradicted_goes_on() -> None:
    solo, first = folded(FALSE)
    contradict(solo, first, 1)
    assert solo.machine.sync.drifted
    solo.at(T0 + LENGTH_S * 4.5)
    assert solo.machine.sync.drifted, "what was said is still known"
    solo.at(T0 + LENGTH_S * 5.5)
    (fold,) = solo.take(fx.Fold)
    solo.feed(ev.Folded(fold.manifest, FALSE))
    assert not solo.machine.sync.drifted
    assert solo.take(fx.SetTraining)[-1].on


def test_the_head_is_folded_again_at_once_and_that_may_repair_it() -> None:
    solo, first = folded(FALSE)
    contradict(solo, first, 1)
    (fold,) = solo.take(fx.Fold)
    assert fold.manifest == first.digest
    solo.feed(ev.Folded(fold.manifest, state_of(first.digest)))
    assert not solo.machine.sync.drifted and notices(solo)[-1] == "repaired"
    assert solo.machine.sync.states[first.digest] == state_of(first.digest)


def test_who_contradicts_a_state_that_came_out_twice_stops_a_peer_less_and_less_often() -> None:
    solo, first = folded(RIGHT)
    stopped: list[bool] = []
    for round_ in range(1, 121):
        solo.meet(ALICE, BOB)
        contradict(solo, first, round_, FALSE)
        for fold in solo.take(fx.Fold):
            solo.feed(ev.Folded(fold.manifest, RIGHT))
        stopped.append(solo.machine.sync.drifted)
        solo.at(T0 + LENGTH_S * (round_ + 1) + 1.0)
        solo.effects = [effect for effect in solo.effects if isinstance(effect, (fx.Notice, fx.Fold))]
    assert stopped[:6] == [False] * 6, "the first time it is not stopped at all"
    assert notices(solo).count("drifted") <= 6
    assert sum(stopped[:60]) > sum(stopped[60:]) > 0 and sum(stopped) < 30, stopped


def test_a_peer_that_can_not_hear_the_liars_still_hears_the_others() -> None:
    solo, first = folded(RIGHT)
    solo.hold(ALICE, announce(ALICE, 1, first.digest, base_state=FALSE))
    solo.hold(CAROL, announce(CAROL, 1, first.digest, base_state=FALSE))
    (fold,) = solo.take(fx.Fold)
    solo.feed(ev.Folded(fold.manifest, RIGHT))
    assert not solo.machine.sync.drifted
    drift, head = solo.machine.sync.drift, solo.machine.head
    assert head is not None and not drift.hears(ALICE.public) and drift.hears(BOB.public)
    solo.hold(BOB, announce(BOB, 1, first.digest, base_state=FALSE))
    assert (drift.find_majority(head) == FALSE) == (BOB.public < solo.identity.public)


def test_a_loaded_state_of_before_does_not_make_it_wait_again() -> None:
    """The others' older state is taken over and what follows is folded: that gives the same, so it is right."""
    solo, first = folded(RIGHT)
    drift = solo.machine.sync.drift
    contradict(solo, first, 1, FALSE)
    (fold,) = solo.take(fx.Fold)
    solo.feed(ev.Folded(fold.manifest, RIGHT))
    solo.at(T0 + LENGTH_S * 8.1).meet(ALICE, BOB)
    solo.effects.clear()
    contradict(solo, first, 7, FALSE)
    (fold,) = solo.take(fx.Fold)
    solo.feed(ev.Folded(fold.manifest, RIGHT))
    assert drift.drifted and drift.loads, "they say it again: the state before the head may be broken"
    head = solo.machine.head
    assert head is not None
    drift.reset()  # as when an older state was loaded
    for _ in range(5):
        drift.check(head, RIGHT)
        assert not drift.drifted
    solo.feed(ev.Tick())
    assert notices(solo).count("goes_on_with_own_state") == 1


def test_a_head_that_can_not_be_folded_again_is_kept() -> None:
    """The blobs are gone: there is nothing better than the state that is here."""
    solo, first = folded(FALSE)
    for who in (ALICE, BOB, CAROL):
        solo.feed(ev.BlobMissing(announce(who, 0).record.blob.root))
    contradict(solo, first, 1)
    assert solo.machine.sync.drift.loads, "a snapshot may turn up"
    keep_contradicting(solo, first, 8)
    assert solo.take(fx.Fold) == [] and not solo.machine.sync.drifted
    assert "goes_on_with_own_state" in notices(solo)


def test_a_worker_with_a_state_that_nobody_vouches_for_starts_over_in_the_end() -> None:
    solo, _ = folded(FALSE)
    solo.machine.sync.drift.start(foreign=True)
    solo.at(T0 + LENGTH_S * 6.0)
    assert solo.machine.sync.drifted and solo.take(fx.RestartFromGenesis) == []
    solo.at(T0 + LENGTH_S * 9.0)
    assert len(solo.take(fx.RestartFromGenesis)) == 1
