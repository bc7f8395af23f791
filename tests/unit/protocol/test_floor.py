"""Chains out of nowhere: what a peer takes from somebody's floor, and what it counts against its sender."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.solo import LENGTH_S, T0, Solo, announce, manifest, other
from tscale.protocol.hashing import digest
from tscale.protocol.messages import ChainReply, GetChain, Push
from tscale.protocol.records import Manifest, SignedRecord

ALICE, BOB = other(1), other(2)
Signed = SignedRecord[Manifest]


def joining(rounds: float) -> Solo:
    """A fresh trainer that met ALICE after this many rounds."""
    return Solo().boot().at(T0 + LENGTH_S * rounds).meet(ALICE)


def ask_of(solo: Solo) -> Any:
    """Make the machine ask BOB for his chain."""
    stray = manifest(BOB, 1, [announce(BOB, 1, digest("test", b"?"))], digest("test", b"?"), before=10**6)
    solo.ask(BOB, Push((stray.bytes,)))
    found = [request for request, message in solo.requests() if isinstance(message, GetChain)]
    assert [request.peer for request in found] == [BOB.public]
    return found[0]


def floor(tokens: int) -> Signed:
    """A manifest out of nowhere that claims a long history."""
    parent = digest("test", b"nowhere")
    part = announce(BOB, 1, parent)
    return manifest(BOB, 1, [part], parent, total_tokens=tokens)


def test_a_peer_that_follows_a_chain_takes_no_other_ones_floor() -> None:
    """Nobody can check what lies below it."""
    solo = joining(2.1).meet(BOB)
    part = announce(ALICE, 0)
    first = manifest(ALICE, 0, [part])
    solo.hold(ALICE, part)
    solo.ask(ALICE, Push((first.bytes,)))
    solo.fold()
    bad = floor(10**7)
    solo.reply(ask_of(solo), ChainReply((bad.bytes,), True))
    assert solo.machine.view.chain.get(bad.digest) is None
    assert solo.machine.view.chain.best().digest == first.digest


def test_a_newcomer_takes_a_floor_but_not_an_impossible_one() -> None:
    for tokens, taken in ((10**7, True), ((1 << 53) - 1, False)):
        solo = joining(2.1).meet(BOB)
        claimed = floor(tokens)
        solo.reply(ask_of(solo), ChainReply((claimed.bytes,), True))
        assert (solo.machine.view.chain.get(claimed.digest) is not None) == taken


@pytest.mark.parametrize("junk", [b"", b"\x94", announce(BOB, 0).bytes])
def test_a_chain_with_something_else_in_it_counts_against_its_sender(junk: bytes) -> None:
    solo = joining(2.1).meet(BOB)
    solo.reply(ask_of(solo), ChainReply((junk,), False))
    assert solo.machine.view.members.contacts[BOB.public].strikes == 1
