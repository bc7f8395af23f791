"""Chains between peers: locators, what follows them, paths, floors, and forgetting what is old."""

from __future__ import annotations

import pytest

from tests.helpers.solo import GENESIS, SPEC, announce, manifest, other
from tscale.protocol.chain import Chain, Link
from tscale.protocol.records import Manifest, SignedRecord

ALICE, BOB = other(1), other(2)


def added(chain: Chain, signed: SignedRecord[Manifest]) -> Link:
    link, why = chain.insert(signed)
    assert why == "added" and link is not None, why
    return link


def chain_of(count: int) -> tuple[Chain, list[SignedRecord[Manifest]]]:
    """Rounds 0 .. count-1, each with one contribution of ALICE on the manifest before."""
    chain, made = Chain(SPEC), []
    parent = GENESIS
    for round_ in range(count):
        made.append(manifest(ALICE, round_, [announce(ALICE, round_, parent)], parent, before=100 * round_))
        added(chain, made[-1])
        parent = made[-1].digest
    return chain, made


def test_a_locator_starts_at_the_head_thins_out_and_ends_at_the_root() -> None:
    chain, made = chain_of(200)
    locator = chain.locator(chain.best())
    assert locator[0] == made[-1].digest and locator[-1] == GENESIS
    rounds = [chain.links[known].round for known in locator]
    assert rounds == sorted(rounds, reverse=True) and rounds[:9] == list(range(199, 190, -1))
    assert len(locator) < 25


@pytest.mark.parametrize("length", [0, 1, 5, 60, 150, 199])
def test_what_comes_after_a_locator_completes_the_askers_chain(length: int) -> None:
    chain, made = chain_of(200)
    asker, _ = chain_of(length)
    links, floor = chain.after(asker.locator(asker.best()), chain.best())
    assert not floor
    assert [link.digest for link in links] == [signed.digest for signed in made[length:]]


def test_after_a_fork_what_follows_the_common_part_is_sent() -> None:
    chain, made = chain_of(30)
    asker, _ = chain_of(20)
    aside = manifest(BOB, 20, [announce(BOB, 20, made[19].digest)], made[19].digest, before=2000)
    added(asker, aside)
    links, floor = chain.after(asker.locator(asker.best()), chain.best())
    assert not floor and [link.round for link in links] == list(range(20, 30))


def test_a_path_leads_down_or_is_none() -> None:
    chain, made = chain_of(5)
    links = [chain.links[signed.digest] for signed in made]
    aside = added(chain, manifest(BOB, 2, [announce(BOB, 2, made[1].digest)], made[1].digest, before=200))
    assert chain.path(links[1], links[4]) == links[2:]
    assert chain.path(links[3], links[3]) == []
    assert chain.path(links[4], links[1]) is None
    assert chain.path(links[2], aside) is None and chain.path(links[1], aside) == [aside]


def test_pruning_keeps_the_last_links_and_what_hangs_on_them() -> None:
    chain, made = chain_of(20)
    chain.keep = 5
    aside = added(chain, manifest(BOB, 17, [announce(BOB, 17, made[16].digest)], made[16].digest, before=1700))
    head = chain.best()
    gone = chain.prune(head)
    assert len(gone) == 15 and set(gone) == {GENESIS, *(signed.digest for signed in made[:14])}
    assert chain.root.digest == made[14].digest and chain.root.parent is None
    assert chain.best() is head and chain.get(aside.digest) is aside
    assert chain.prune(head) == []
    assert chain.locator(head)[-1] == chain.root.digest


def test_a_stranger_behind_a_pruned_chain_gets_it_from_its_floor() -> None:
    chain, made = chain_of(20)
    chain.keep = 5
    chain.prune(chain.best())
    links, floor = chain.after((GENESIS,), chain.best())
    assert floor and [link.round for link in links] == [15, 16, 17, 18, 19]
    fresh = Chain(SPEC)
    link, why = fresh.insert(made[15], as_floor=True)
    assert why == "added" and link is not None and (link.total, link.parent) == (1600, fresh.root)
    for signed in made[16:]:
        added(fresh, signed)
    assert fresh.best().digest == chain.best().digest
