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


@pytest.mark.parametrize(("own_tokens", "drifted"), [(0, True), (199, True), (200, False), (5_000, False)])
def test_ones_own_tokens_count_like_any_other(own_tokens: int, drifted: bool) -> None:
    solo, first = folded(FALSE, own_tokens)
    contradict(solo, first, 1)
    assert solo.machine.sync.drifted == drifted


def test_a_peer_that_is_no_longer_contradicted_goes_on() -> None:
    solo, first = folded(FALSE)
    contradict(solo, first, 1)
    assert solo.machine.sync.drifted
    solo.at(T0 + LENGTH_S * 4.5)
    assert solo.machine.sync.drifted, "what was said is still known"
    solo.at(T0 + LENGTH_S * 5.5)
    assert not solo.machine.sync.drifted and notices(solo)[-1] == "not_drifted"
    assert solo.take(fx.SetTraining)[-1].on


def test_without_an_offer_the_head_is_folded_again_and_that_may_repair_it() -> None:
    solo, first = folded(FALSE)
    keep_contradicting(solo, first, 5)
    assert solo.machine.sync.drifted and solo.take(fx.Fold) == [], "a snapshot may still turn up"
    keep_contradicting(solo, first, 8)
    (fold,) = solo.take(fx.Fold)
    assert fold.manifest == first.digest
    solo.feed(ev.Folded(fold.manifest, state_of(first.digest)))
    assert not solo.machine.sync.drifted and notices(solo)[-1] == "repaired"
    assert solo.machine.sync.states[first.digest] == state_of(first.digest)


def test_a_peer_that_folds_to_the_same_state_again_goes_on_and_is_deaf_for_a_while() -> None:
    """Its state is right, and those who contradict it are false: they may stop it, but less and less often."""
    right = digest("test", b"right")
    solo, first = folded(right)
    stopped: list[bool] = []
    for round_ in range(1, 121):
        solo.meet(ALICE, BOB)
        contradict(solo, first, round_, FALSE)
        solo.at(T0 + LENGTH_S * (round_ + 1) + 1.0)
        for fold in solo.take(fx.Fold):
            solo.feed(ev.Folded(fold.manifest, right))
        stopped.append(solo.machine.sync.drifted)
        solo.effects = [effect for effect in solo.effects if isinstance(effect, fx.Notice)]
    assert notices(solo).count("goes_on_with_own_state") == 4
    assert sum(stopped[:60]) > sum(stopped[60:]) > 0 and sum(stopped) < 36, stopped


def test_a_head_that_can_not_be_folded_again_is_kept() -> None:
    """The blobs are gone: there is nothing better than the state that is here."""
    solo, first = folded(FALSE)
    keep_contradicting(solo, first, 5)
    for who in (ALICE, BOB, CAROL):
        solo.feed(ev.BlobMissing(announce(who, 0).record.blob.root))
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
