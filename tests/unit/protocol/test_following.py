"""Others whose chain does not arrive: this peer is not in step, for as long as that can be believed."""

from __future__ import annotations

from tests.helpers.solo import LENGTH_S, T0, Solo, announce, other
from tscale.protocol.following import PATIENCE_ROUNDS
from tscale.protocol.hashing import digest
from tscale.protocol.messages import Push

ALICE, BOB, CAROL = (other(number) for number in range(1, 4))


def pass_round(solo: Solo, round_: int, *unknown: object) -> None:
    """The peer contributes and seals alone; these others announce from manifests nobody knows here."""
    solo.at(T0 + (round_ + 1) * LENGTH_S + 0.1)
    for identity in (ALICE, BOB, CAROL):
        if identity in unknown:
            solo.meet(identity)
            base = digest("test", b"elsewhere", round_.to_bytes(4, "little"))
            solo.ask(identity, Push((announce(identity, round_, base).bytes,)))
    solo.at(solo.now + 0.3)


def trains(solo: Solo) -> bool:
    return solo.machine.rounds.training


def test_others_whose_bases_stay_unknown_show_that_this_peer_is_not_in_step() -> None:
    solo = Solo().boot().at(T0 + 6.0).meet(ALICE, BOB, CAROL)
    pass_round(solo, 0, ALICE, BOB)
    assert trains(solo), "one round says little: a manifest may be on its way"
    pass_round(solo, 1, ALICE, BOB)
    assert not trains(solo) and "link may be too slow" in solo.machine.rounds.reason


def test_a_claim_of_few_authors_stops_nobody() -> None:
    solo = Solo().boot().at(T0 + 6.0).meet(ALICE, BOB, CAROL)
    for round_ in range(4):
        solo.at(T0 + (round_ + 1) * LENGTH_S)
        solo.meet(BOB, CAROL)
        records = (announce(BOB, round_).bytes, announce(CAROL, round_).bytes)
        solo.ask(BOB, Push(records))
        pass_round(solo, round_, ALICE)
        assert trains(solo)


def test_a_chain_that_never_arrives_is_not_waited_for_for_ever() -> None:
    solo = Solo().boot().at(T0 + 6.0).meet(ALICE, BOB)
    stopped = []
    for round_ in range(40):
        pass_round(solo, round_, ALICE, BOB)
        if not trains(solo):
            stopped.append(round_)
    assert stopped[0] == 1
    assert PATIENCE_ROUNDS <= len(stopped) <= 2.5 * PATIENCE_ROUNDS, stopped
