"""Closing and sealing: when a peer asks for its contribution, when it seals, and what goes into the manifest."""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.solo import GENESIS, LENGTH_S, SPEC, T0, Solo, announce, manifest, other, solo_spec, state_of
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.chain import Chain, candidate_order, genesis_digest
from tscale.protocol.gains import scaled_gain
from tscale.protocol.identity import Identity
from tscale.protocol.messages import Push
from tscale.protocol.records import Manifest, SignedRecord
from tscale.protocol.spec import AdmissionSpec

CLOSE = T0 + LENGTH_S
ROUNDS = SPEC.rounds
LONE = [rung.lone_only for rung in SPEC.codec.rungs].index(True)
BY_RANK = sorted(range(1, 9), key=lambda n: candidate_order(Chain(SPEC).genesis, 0, other(n).public))
"""Numbers of eight peers, the first candidate of round 0 first."""
EARLY_S = 0.5


def ranked(place: int) -> Identity:
    return other(BY_RANK[place])


def booted(place: int) -> Solo:
    """The peer at this place among the candidates of round 0."""
    return Solo(number=BY_RANK[place]).boot()


def authors(signed: SignedRecord[Manifest]) -> set[bytes]:
    return {part.public for part in signed.contributions}


# -- closing ----------------------------------------------------------------------------------------------------------


def test_a_round_is_closed_once_and_not_before_its_end() -> None:
    solo = Solo().boot().at(CLOSE - 0.1)
    assert solo.take(fx.MakeContribution) == []
    solo.at(CLOSE + 0.3)
    assert solo.take(fx.MakeContribution) == [fx.MakeContribution(0, GENESIS, LONE)]
    solo.at(CLOSE + 3.0)
    assert solo.take(fx.MakeContribution) == []


def test_the_rung_follows_the_number_of_living_trainers() -> None:
    solo = Solo(upload_bps=1.0).boot().at(CLOSE - 1.0).meet(other(1))
    solo.at(CLOSE + 0.3)
    (make,) = solo.take(fx.MakeContribution)
    assert SPEC.codec.rungs[make.rung].name == "1/64"


def test_nothing_is_closed_while_training_is_not_allowed() -> None:
    solo = Solo().boot()
    solo.feed(ev.TrainingAllowed(False, "paused"))
    assert solo.take(fx.SetTraining)[-1] == fx.SetTraining(False, "paused")
    solo.at(CLOSE + 0.3)
    assert solo.take(fx.MakeContribution) == []


def test_a_failed_contribution_is_let_go_and_the_next_round_closed() -> None:
    solo = Solo().boot().at(CLOSE + 0.3)
    solo.take(fx.MakeContribution)
    solo.feed(ev.ContributionFailed(0, "no step was done"))
    assert [n.event for n in solo.take(fx.Notice)].count("no_contribution") == 1
    solo.at(CLOSE + LENGTH_S + 0.3)
    assert [make.round for make in solo.take(fx.MakeContribution)] == [1]


def test_a_contribution_without_tokens_is_not_announced() -> None:
    solo = Solo().boot().at(CLOSE + 0.3)
    assert solo.contribute(tokens=0) is None
    assert solo.at(CLOSE + 5.0).sealed() == []


def test_tokens_are_announced_up_to_the_cap() -> None:
    solo = Solo().boot().at(CLOSE + 0.3)
    signed = solo.contribute(tokens=10**9)
    assert signed is not None and signed.record.tokens == SPEC.caps.max_contribution_tokens


# -- sealing ----------------------------------------------------------------------------------------------------------


def test_a_lone_peer_seals_at_once_and_folds_with_gain_one() -> None:
    solo = Solo().boot().at(CLOSE + 0.3)
    own = solo.contribute()
    assert own is not None
    (signed,) = solo.sealed()
    assert (signed.record.round, signed.record.parent, signed.record.total_tokens) == (0, GENESIS, 100)
    assert signed.record.parent_state == state_of(GENESIS)
    assert signed.record.contributions == (own.bytes,)
    fold = solo.fold()
    assert fold == fx.Fold(signed.digest, GENESIS, 0, 100, ((own.record.blob.root, 100.0, 1.0),))
    head = solo.machine.head
    assert head is not None and head.digest == signed.digest


def test_the_first_candidate_seals_as_soon_as_all_it_expects_are_there() -> None:
    solo = booted(0).at(CLOSE - 1.0).meet(ranked(1), ranked(2)).at(CLOSE + 0.3)
    own = solo.contribute()
    assert own is not None
    solo.hold(ranked(1), announce(ranked(1), 0))
    assert solo.sealed() == [], "one is still missing"
    solo.hold(ranked(2), announce(ranked(2), 0))
    (signed,) = solo.sealed()
    assert solo.now < CLOSE + EARLY_S
    assert authors(signed) == {solo.identity.public, ranked(1).public, ranked(2).public}
    publics = [part.public for part in signed.contributions]
    assert publics == sorted(publics)


def test_the_first_candidate_waits_for_the_missing_no_longer_than_the_grace() -> None:
    solo = booted(0).at(CLOSE - 1.0).meet(ranked(1), ranked(2)).at(CLOSE + 0.3)
    solo.contribute()
    solo.hold(ranked(1), announce(ranked(1), 0))
    solo.at(CLOSE + ROUNDS.grace_min_s)
    assert solo.sealed() == []
    solo.at(CLOSE + ROUNDS.grace_max_s + 0.3)
    (signed,) = solo.sealed()
    assert authors(signed) == {solo.identity.public, ranked(1).public}


def test_a_later_candidate_leaves_the_earlier_one_its_time_and_then_seals() -> None:
    solo = booted(1).at(CLOSE - 1.0).meet(ranked(0)).at(CLOSE + 0.3)
    solo.contribute()
    solo.hold(ranked(0), announce(ranked(0), 0))
    solo.at(CLOSE + ROUNDS.grace_min_s + ROUNDS.step_min_s - 0.3)
    assert solo.sealed() == []
    solo.at(CLOSE + ROUNDS.grace_max_s + ROUNDS.step_max_s + 0.3)
    (signed,) = solo.sealed()
    assert authors(signed) == {solo.identity.public, ranked(0).public}


def test_each_rank_waits_a_step_longer() -> None:
    when: list[float] = []
    for place in (1, 2, 3):
        solo = booted(place).at(CLOSE - 1.0).meet(*map(ranked, range(place))).at(CLOSE + 0.3)
        solo.contribute()
        for earlier in map(ranked, range(place)):
            solo.hold(earlier, announce(earlier, 0))
        while not solo.sealed():
            solo.at(solo.now + 0.2)
            assert solo.now < CLOSE + LENGTH_S
        when.append(solo.now - CLOSE)
    gaps = [later - sooner for sooner, later in zip(when, when[1:], strict=False)]
    assert all(ROUNDS.step_min_s - 0.2 <= gap <= ROUNDS.step_max_s + 0.4 for gap in gaps), when


def test_a_manifest_of_another_candidate_ends_the_wait() -> None:
    solo = booted(1).at(CLOSE - 1.0).meet(ranked(0)).at(CLOSE + 0.3)
    solo.contribute()
    theirs = announce(ranked(0), 0)
    solo.hold(ranked(0), theirs)
    solo.ask(ranked(0), Push((manifest(ranked(0), 0, [theirs]).bytes,)))
    share, gain = float(theirs.record.tokens), scaled_gain(SPEC.codec.rungs[0].gain, 1.0)
    assert solo.fold().parts == ((theirs.record.blob.root, share, gain),)
    solo.at(CLOSE + 8.0)
    assert solo.sealed() == []


def test_what_missed_its_manifest_is_taken_by_the_next() -> None:
    """And counts with the spec's factor, because its base is one manifest older."""
    solo = booted(1).at(CLOSE - 1.0).meet(ranked(0)).at(CLOSE + 0.3)
    own = solo.contribute()
    theirs = announce(ranked(0), 0)
    solo.hold(ranked(0), theirs)
    first = manifest(ranked(0), 0, [theirs])
    solo.ask(ranked(0), Push((first.bytes,)))
    solo.fold()
    solo.at(CLOSE + LENGTH_S + 0.3)
    second = solo.contribute()
    assert own is not None and second is not None
    solo.at(CLOSE + LENGTH_S + 5.0)
    (signed,) = solo.sealed()
    kept = {part.digest for part in signed.contributions}
    shared = not SPEC.codec.rungs[own.record.rung].lone_only
    assert second.digest in kept and (own.digest in kept) == shared
    if shared:
        link = solo.machine.view.chain.get(signed.digest)
        assert link is not None
        shares = {part.announcement.digest: part.share for part in solo.machine.view.chain.parts(link)}
        assert shares[own.digest] < shares[second.digest]


def test_what_the_worker_refused_is_in_no_manifest() -> None:
    solo = booted(0).at(CLOSE - 1.0).meet(ranked(1), ranked(2)).at(CLOSE + 0.3)
    solo.contribute()
    solo.hold(ranked(1), announce(ranked(1), 0), ok=False)
    solo.hold(ranked(2), announce(ranked(2), 0))
    solo.at(CLOSE + 4.0)
    (signed,) = solo.sealed()
    assert authors(signed) == {solo.identity.public, ranked(2).public}


def test_a_contribution_from_an_older_base_waits_in_vain() -> None:
    solo = booted(0).at(CLOSE - 1.0).meet(ranked(1)).at(CLOSE + 0.3)
    solo.contribute()
    solo.hold(ranked(1), announce(ranked(1), 0, state_of(b"unknown")))
    solo.at(CLOSE + 4.0)
    (signed,) = solo.sealed()
    assert authors(signed) == {solo.identity.public}


def test_lone_contributions_are_left_out_when_others_are_there() -> None:
    solo = booted(0).at(CLOSE + 0.3)
    own = solo.machine.view
    (make,) = solo.take(fx.MakeContribution)
    assert own.spec.codec.rungs[make.rung].lone_only
    solo.effects.append(make)
    solo.meet(ranked(1), ranked(2))
    for who in (ranked(1), ranked(2)):
        solo.hold(who, announce(who, 0))
    assert solo.contribute() is not None
    solo.at(CLOSE + 4.0)
    (signed,) = solo.sealed()
    assert authors(signed) == {ranked(1).public, ranked(2).public}


def test_of_several_lone_contributions_the_sealer_takes_its_own() -> None:
    solo = booted(0).at(CLOSE + 0.3)
    solo.meet(ranked(1))
    solo.hold(ranked(1), announce(ranked(1), 0, rung=LONE))
    own = solo.contribute()
    assert own is not None and own.record.rung == LONE
    solo.at(CLOSE + 4.0)
    (signed,) = solo.sealed()
    assert authors(signed) == {solo.identity.public}


def test_over_the_cap_authors_take_turns() -> None:
    spec = solo_spec(max_contributions=2)
    genesis = genesis_digest(spec.swarm_id)
    chain = Chain(spec)
    order = sorted(range(1, 9), key=lambda n: candidate_order(chain.genesis, 0, other(n).public))
    solo = Solo(number=order[0], spec=spec).boot(genesis)
    others = [other(n) for n in order[1:4]]
    taken: list[set[bytes]] = []
    parent, close = genesis, CLOSE
    for round_ in range(2):
        solo.at(close - 1.0)
        solo.meet(*others, swarm=spec.swarm_id).at(close + 0.3)
        solo.contribute()
        for who in others:
            solo.hold(who, announce(who, round_, parent, swarm=spec.swarm_id, base_state=state_of(parent)))
        solo.at(close + 7.0)
        sealed = solo.sealed()
        assert len(sealed) == 1 and len(sealed[0].contributions) == 2
        taken.append(authors(sealed[0]))
        solo.fold()
        parent, close = sealed[0].digest, close + LENGTH_S
    assert not taken[0] & taken[1], "those not taken at first come next"


def test_a_closed_swarms_outsider_does_not_seal() -> None:
    spec = replace(SPEC, admission=AdmissionSpec(open=False, keys=(other(1).public,)))
    genesis = genesis_digest(spec.swarm_id)
    insider = Solo(number=1, spec=spec).boot(genesis).at(CLOSE + 0.3)
    outsider = Solo(number=2, spec=spec).boot(genesis).at(CLOSE + 0.3)
    for solo, count in ((insider, 1), (outsider, 0)):
        solo.contribute()
        solo.at(CLOSE + 4.0)
        assert len(solo.sealed()) == count


def test_the_grace_follows_what_was_needed_within_the_spec() -> None:
    solo = booted(0)
    rounds = solo.machine.rounds
    assert rounds.grace_s() == ROUNDS.grace_max_s, "nothing is known yet"
    close = CLOSE
    for round_, late_s in ((0, 0.3), (1, 5.0)):
        solo.at(close + late_s)
        solo.hold(ranked(1), announce(ranked(1), round_))
        if round_ == 0:
            assert ROUNDS.grace_min_s <= rounds.grace_s() < ROUNDS.grace_max_s
            assert ROUNDS.step_min_s <= rounds.step_s() <= ROUNDS.step_max_s
        close += LENGTH_S
    assert rounds.grace_s() == ROUNDS.grace_max_s, "a late one stretches it, up to the spec's limit"


def test_of_two_announcements_of_one_blob_the_first_that_came_is_taken() -> None:
    """Whoever copies another one's announcement gets no second weight for the blob, and not the credit either."""
    solo = booted(0).at(CLOSE - 1.0).meet(ranked(1), ranked(2), ranked(3)).at(CLOSE + 0.3)
    own = solo.contribute()
    assert own is not None
    theirs = announce(ranked(1), 0)
    solo.hold(ranked(1), theirs)
    copies = [
        announce(ranked(2), 0, blob=theirs.record.blob, tokens=9000),
        announce(ranked(3), 0, blob=own.record.blob, rung=own.record.rung),
    ]
    solo.ask(ranked(2), Push(tuple(copy.bytes for copy in copies)))
    solo.at(CLOSE + 4.0)
    (signed,) = solo.sealed()
    assert authors(signed) == {solo.identity.public, ranked(1).public}
    assert {part.digest for part in signed.contributions} == {own.digest, theirs.digest}


def test_a_copy_of_what_was_folded_before_is_not_taken_again() -> None:
    solo = booted(0).at(CLOSE - 1.0).meet(ranked(1), ranked(2)).at(CLOSE + 0.3)
    solo.contribute()
    theirs = announce(ranked(1), 0)
    solo.hold(ranked(1), theirs)
    solo.at(CLOSE + 4.0)
    (first,) = solo.sealed()
    solo.fold()
    solo.at(CLOSE + LENGTH_S + 0.3)
    solo.contribute()
    solo.ask(ranked(2), Push((announce(ranked(2), 1, first.digest, blob=theirs.record.blob).bytes,)))
    solo.at(CLOSE + LENGTH_S + 4.0)
    (second,) = solo.sealed()
    assert authors(second) == {solo.identity.public}
