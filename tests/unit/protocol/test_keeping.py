"""Floods of claimed manifests: what is kept is bounded, and never at the cost of the chain that is followed."""

from __future__ import annotations

import pytest

from tests.helpers.solo import LENGTH_S, SPEC, T0, Solo, announce, manifest, other, state_of
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol import keeping
from tscale.protocol.chain import Chain
from tscale.protocol.hashing import blob_ref, digest
from tscale.protocol.keeping import MAX_CHILDREN
from tscale.protocol.messages import Push
from tscale.protocol.records import Manifest, SignedRecord

ALICE = other(1)
Signed = SignedRecord[Manifest]


def solo_at(rounds: int) -> tuple[Solo, list[Signed]]:
    """A peer that has folded Alice's rounds 0 .. rounds-1."""
    solo = Solo().boot()
    made: list[Signed] = []
    for round_ in range(rounds):
        solo.at(T0 + LENGTH_S * (round_ + 1.1)).meet(ALICE)
        part = announce(ALICE, round_, made[-1].digest if made else announce(ALICE, 0).record.base)
        solo.hold(ALICE, part)
        made.append(manifest(ALICE, round_, [part], part.record.base, before=100 * round_))
        solo.ask(ALICE, Push((made[-1].bytes,)))
        solo.fold()
        solo.effects.clear()
    return solo, made


def claim(number: int, round_: int, parent: bytes, before: int) -> Signed:
    """A stranger's manifest over a blob that nobody has."""
    who = other(1000 + number)
    blob = blob_ref(b"none %d %d" % (number, round_))
    part = announce(who, round_, parent, blob=blob, tokens=SPEC.caps.max_contribution_tokens)
    return manifest(who, round_, [part], parent, before=before)


def push(solo: Solo, *manifests: Signed) -> None:
    for at in range(0, len(manifests), 16):
        solo.ask(other(999_999), Push(tuple(signed.bytes for signed in manifests[at : at + 16])))


def test_a_flood_of_siblings_leaves_room_for_the_honest_one() -> None:
    solo, made = solo_at(3)
    solo.at(T0 + LENGTH_S * 4.1).meet(ALICE)
    parent, chain = made[-1].digest, solo.machine.view.chain
    flood = [claim(n, 3, parent, 300) for n in range(MAX_CHILDREN + 40)]
    push(solo, *flood[:70])
    part = announce(ALICE, 3, parent)
    right = manifest(ALICE, 3, [part], parent, before=300)
    solo.ask(ALICE, Push((right.bytes,)))
    push(solo, *flood[70:])
    assert len(chain.links[parent].children) == MAX_CHILDREN
    assert right.digest in chain.links, "who contributed to the parent comes before strangers"
    assert chain.size_bytes == sum(len(link.signed.bytes) for link in chain.links.values() if link.signed)
    live = {signed.digest for signed in solo.machine.spread.live.values()}
    assert sum(signed.digest in live for signed in flood) < MAX_CHILDREN, "what went is not passed on"
    solo.at(solo.now + 0.5)
    solo.hold(ALICE, part)
    assert solo.fold().manifest == right.digest


@pytest.mark.parametrize("bound", ["MAX_BESIDE", "MAX_BESIDE_BYTES"])
def test_what_lies_beside_the_followed_chain_is_bounded(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    solo, made = solo_at(6)
    chain = solo.machine.view.chain
    each = len(claim(0, 2, made[0].digest, 100).bytes)
    monkeypatch.setattr(keeping, bound, 20 if bound == "MAX_BESIDE" else 20 * each)
    for n in range(60):  # each a chain of two, from another place of the followed one
        on = made[n % 5]
        first = claim(n, on.record.round + 1, on.digest, on.record.total_tokens)
        push(solo, first, claim(100 + n, first.record.round + 1, first.digest, first.record.total_tokens))
    assert all(signed.digest in chain.links for signed in made)
    beside = [link for link in chain.links.values() if link.digest not in {signed.digest for signed in made}]
    assert len(beside) <= 20 + 3, "genesis, and the newest with what is before it"
    assert sum(len(link.signed.bytes) for link in beside if link.signed) <= (20 + 2) * each
    assert solo.machine.sync.best_usable().digest == made[-1].digest
    assert set(solo.machine.sync.states) <= set(chain.links)


def test_a_restart_keeps_its_own_chain_until_the_worker_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = solo_at(6)
    monkeypatch.setattr(keeping, "MAX_BESIDE", 4)
    solo = Solo()
    solo.machine.restore([signed.bytes for signed in made], {}, {})
    solo.at(T0 + LENGTH_S * 7.1)
    push(solo, *(claim(n, 6, made[-1].digest, 600) for n in range(12)))
    chain = solo.machine.view.chain
    assert all(signed.digest in chain.links for signed in made)
    assert len(chain.links) <= 1 + len(made) + 5
    solo.feed(ev.WorkerReady(made[2].digest, state_of(made[2].digest), None))
    push(solo, *(claim(50 + n, 6, made[-1].digest, 600) for n in range(3)))
    assert solo.take(fx.RestartFromGenesis) == [] and made[2].digest in chain.links


def test_the_blobs_ahead_of_a_restarted_worker_stay_while_another_chain_is_claimed() -> None:
    solo, made = solo_at(6)
    first = claim(1, 5, made[4].digest, 500)
    push(solo, first, claim(2, 6, first.digest, first.record.total_tokens))
    solo.feed(ev.WorkerDied("killed"))
    solo.effects.clear()
    solo.at(T0 + LENGTH_S * 10.3)  # longer than announcements are kept
    dropped = {effect.root for effect in solo.take(fx.DropBlob)}
    solo.feed(ev.WorkerReady(made[2].digest, state_of(made[2].digest), made[1].digest))
    folded = []
    for _ in range(8):
        for fold in solo.take(fx.Fold):
            folded.append(fold.manifest)
            solo.feed(ev.Folded(fold.manifest, state_of(fold.manifest)))
    assert folded == [signed.digest for signed in made[3:]]
    assert not dropped & {signed.contributions[0].record.blob.root for signed in made[3:]}


def test_a_chain_of_any_length_becomes_invalid_at_once() -> None:
    chain, parent, before = Chain(SPEC), announce(ALICE, 0).record.base, 0
    first = None
    for round_ in range(1200):
        part = announce(ALICE, round_, parent, base_state=digest("test", b"s"))
        signed = manifest(ALICE, round_, [part], parent, before=before, parent_state=digest("test", b"s"))
        link, _ = chain.insert(signed)
        assert link is not None
        first, parent, before = first or link, signed.digest, before + 100
    assert first is not None
    chain.mark_invalid(first)
    assert chain.best() is chain.genesis and sum(link.invalid for link in chain.links.values()) == 1200
    assert len(chain.remove(first)) == 1200 and set(chain.links) == {chain.genesis.digest} and chain.size_bytes == 0
