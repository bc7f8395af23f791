"""The manifest chain: each rule of validity by itself, weights, and a head that no order of arrival changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.solo import GENESIS, SPEC, announce, manifest, other
from tscale.protocol.chain import Chain, Link, candidate_order, genesis_digest, majority_state
from tscale.protocol.gains import scaled_gain
from tscale.protocol.hashing import BlobRef, digest
from tscale.protocol.records import Manifest, SignedRecord
from tscale.protocol.spec import AdmissionSpec

FIXED = settings(derandomize=True, deadline=None, max_examples=60, database=None)
ALICE, BOB, CAROL = sorted((other(1), other(2), other(3)), key=lambda identity: identity.public)
LONE = [rung.lone_only for rung in SPEC.codec.rungs].index(True)


def added(chain: Chain, signed: SignedRecord[Manifest]) -> Link:
    link, why = chain.insert(signed)
    assert why == "added" and link is not None, why
    return link


def refusal(signed: SignedRecord[Manifest], chain: Chain | None = None) -> str:
    link, why = (chain or Chain(SPEC)).insert(signed)
    assert link is None
    return why


# -- validity ---------------------------------------------------------------------------------------------------------


def test_a_valid_manifest_is_added_once() -> None:
    chain = Chain(SPEC)
    signed = manifest(ALICE, 4, [announce(ALICE, 4), announce(BOB, 3)])
    link = added(chain, signed)
    assert (link.round, link.tokens, link.total, link.depth, link.invalid) == (4, 200, 200, 1, False)
    assert link.parent is chain.genesis and chain.get(signed.digest) is link
    assert link.authors == {ALICE.public, BOB.public}
    version = chain.version
    assert chain.insert(signed) == (link, "known") and chain.version == version


def test_genesis_differs_between_swarms() -> None:
    assert genesis_digest("a-x") != genesis_digest("b-x")
    assert Chain(SPEC).genesis.digest == GENESIS


def test_an_unknown_parent_is_said() -> None:
    assert refusal(manifest(ALICE, 1, [announce(ALICE, 1)], digest("test", b"?"))) == "its parent is not known"


@pytest.mark.parametrize("round_", [3, 2])
def test_a_round_comes_after_its_parents(round_: int) -> None:
    chain = Chain(SPEC)
    first = manifest(ALICE, 3, [announce(ALICE, 3)])
    added(chain, first)
    later = manifest(ALICE, round_, [announce(BOB, round_, first.digest)], first.digest, before=100)
    assert refusal(later, chain) == "its round is not after its parent's"


def test_rounds_may_be_skipped() -> None:
    chain = Chain(SPEC)
    first = manifest(ALICE, 3, [announce(ALICE, 3)])
    added(chain, first)
    assert added(chain, manifest(BOB, 9, [announce(BOB, 9, first.digest)], first.digest, before=100)).total == 200


@pytest.mark.parametrize("total", [101, 200, 1 << 53])
def test_the_total_of_tokens_adds_up(total: int) -> None:
    signed = manifest(ALICE, 1, [announce(ALICE, 1)], total_tokens=total - 1)
    if total == 101:
        added(Chain(SPEC), signed)
        return
    assert refusal(signed) == "its total of tokens does not add up"


def test_the_number_of_contributions_has_a_cap() -> None:
    spec = replace(SPEC, rounds=replace(SPEC.rounds, max_contributions=2))
    genesis = genesis_digest(spec.swarm_id)
    parts = [announce(who, 1, genesis, swarm=spec.swarm_id) for who in (ALICE, BOB, CAROL)]
    chain = Chain(spec)
    signed = manifest(ALICE, 1, parts, genesis, swarm=spec.swarm_id)
    assert refusal(signed, chain) == "it has more contributions than the spec allows"
    added(chain, manifest(ALICE, 1, parts[:2], genesis, swarm=spec.swarm_id))


def test_a_closed_swarm_takes_only_its_keys() -> None:
    spec = replace(SPEC, admission=AdmissionSpec(open=False, keys=(ALICE.public,)))
    genesis = genesis_digest(spec.swarm_id)
    mine = announce(ALICE, 1, genesis, swarm=spec.swarm_id)
    theirs = announce(BOB, 1, genesis, swarm=spec.swarm_id)
    by_bob = manifest(BOB, 1, [mine], genesis, swarm=spec.swarm_id)
    with_bob = manifest(ALICE, 1, [mine, theirs], genesis, swarm=spec.swarm_id)
    assert refusal(by_bob, Chain(spec)) == "its sealer is not admitted"
    assert refusal(with_bob, Chain(spec)) == "a contribution's author is not admitted"
    added(Chain(spec), manifest(ALICE, 1, [mine], genesis, swarm=spec.swarm_id))


def test_a_blob_counts_once_whoever_announces_it() -> None:
    chain = Chain(SPEC)
    mine = announce(ALICE, 1)
    for rung in (0, 1):
        copy = announce(BOB, 1, blob=mine.record.blob, rung=rung)
        assert refusal(manifest(ALICE, 1, [mine, copy]), chain) == "it has one blob twice"
    first = manifest(ALICE, 1, [mine])
    added(chain, first)
    again = announce(BOB, 2, first.digest, blob=mine.record.blob)
    later = manifest(ALICE, 2, [announce(CAROL, 2, first.digest), again], first.digest, before=100)
    assert refusal(later, chain) == "a contribution's blob is in the parent already"


def test_another_swarms_manifest_is_refused() -> None:
    name = "other-" + SPEC.swarm_id.split("-", 1)[1]
    parts = [announce(ALICE, 1, swarm=name)]
    assert refusal(manifest(ALICE, 1, parts, swarm=name)) == "it is of another swarm"


@pytest.mark.parametrize(("round_", "good"), [(5, True), (4, True), (3, False)])
def test_a_contribution_is_of_this_round_or_the_one_before(round_: int, good: bool) -> None:
    chain = Chain(SPEC)
    link, why = chain.insert(manifest(ALICE, 5, [announce(BOB, round_)]))
    assert why == ("added" if good else "a contribution is of another round")


def chain_of(count: int) -> tuple[Chain, list[SignedRecord[Manifest]]]:
    """Rounds 0 .. count-1, each with one contribution of ALICE on the manifest before."""
    chain, made = Chain(SPEC), []
    parent = GENESIS
    for round_ in range(count):
        made.append(manifest(ALICE, round_, [announce(ALICE, round_, parent)], parent, before=100 * round_))
        added(chain, made[-1])
        parent = made[-1].digest
    return chain, made


@pytest.mark.parametrize(("base", "age"), [(2, 0), (1, 1), (0, None)])
def test_a_base_is_the_parent_or_the_one_before(base: int, age: int | None) -> None:
    chain, made = chain_of(3)
    parent = made[2].digest
    assert Chain.age(made[base].digest, chain.links[parent]) == age
    signed = manifest(BOB, 3, [announce(BOB, 3, made[base].digest)], parent, before=300)
    link, why = chain.insert(signed)
    assert why == ("added" if age is not None else "a contribution has an older base")


def test_a_base_of_another_branch_is_refused() -> None:
    chain, made = chain_of(3)
    aside = manifest(BOB, 2, [announce(BOB, 2, made[1].digest)], made[1].digest, before=200)
    added(chain, aside)
    signed = manifest(BOB, 3, [announce(BOB, 3, aside.digest)], made[2].digest, before=300)
    assert refusal(signed, chain) == "a contribution has an older base"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": SPEC.caps.max_contribution_tokens + 1},
        {"blob": BlobRef(digest("test", b"large"), SPEC.caps.max_blob_bytes + 1)},
    ],
    ids=["tokens", "bytes"],
)
def test_a_contribution_keeps_to_the_caps(changes: dict[str, Any]) -> None:
    assert refusal(manifest(ALICE, 1, [announce(ALICE, 1, **changes)])) == "a contribution is over the spec's caps"


def test_a_rung_is_in_the_spec() -> None:
    signed = manifest(ALICE, 1, [announce(ALICE, 1, rung=len(SPEC.codec.rungs))])
    assert refusal(signed) == "a contribution has a rung that the spec lacks"


def test_a_contribution_counts_once() -> None:
    chain = Chain(SPEC)
    part = announce(BOB, 4)
    first = manifest(ALICE, 4, [part])
    added(chain, first)
    again = manifest(ALICE, 5, [part, announce(ALICE, 5, first.digest)], first.digest, before=100)
    assert refusal(again, chain) == "a contribution is in the parent already"


def test_an_author_may_have_two_rounds_in_one_manifest() -> None:
    assert added(Chain(SPEC), manifest(ALICE, 5, [announce(BOB, 4), announce(BOB, 5)])).taken == {
        (BOB.public, 4),
        (BOB.public, 5),
    }


def test_a_lone_contribution_is_valid_alone() -> None:
    lone = announce(ALICE, 1, rung=LONE)
    added(Chain(SPEC), manifest(ALICE, 1, [lone]))
    with_another = manifest(ALICE, 1, [lone, announce(BOB, 1)])
    assert refusal(with_another) == "it has a contribution that only a lone peer may make"


def test_a_sealer_whose_state_differs_from_the_majority_is_refused() -> None:
    wrong = digest("test", b"drifted")
    parts = [announce(ALICE, 1, base_state=wrong), announce(BOB, 1), announce(CAROL, 1)]
    good = manifest(ALICE, 1, parts)
    bad = manifest(ALICE, 1, parts, parent_state=wrong)
    assert refusal(bad) == "its sealer's state differs from the majority of its contributors'"
    added(Chain(SPEC), good)


def test_the_majority_is_of_tokens_and_only_of_the_base() -> None:
    mine, theirs = digest("test", b"mine"), digest("test", b"theirs")
    parts = (
        announce(ALICE, 1, tokens=100, base_state=mine),
        announce(BOB, 1, tokens=60, base_state=theirs),
        announce(CAROL, 1, digest("test", b"older"), tokens=10_000, base_state=theirs),
    )
    assert majority_state(parts, GENESIS) == mine
    assert majority_state(parts[1:], GENESIS) == theirs
    tie = (parts[0], announce(BOB, 1, tokens=100, base_state=theirs))
    assert majority_state(tie, GENESIS) is None
    assert majority_state((), GENESIS) is None


# -- weights ----------------------------------------------------------------------------------------------------------


def test_shares_are_tokens_times_age_beside_the_gain_of_the_rung_for_so_many() -> None:
    chain, made = chain_of(2)
    sparse, denser = SPEC.codec.rungs[0], SPEC.codec.rungs[2]
    assert sparse.gain != denser.gain
    parts = [
        announce(ALICE, 2, made[1].digest, tokens=300),
        announce(BOB, 2, made[0].digest, tokens=200),  # one base older
        announce(CAROL, 2, made[1].digest, tokens=100, rung=2),
    ]
    link = added(chain, manifest(ALICE, 2, parts, made[1].digest, before=200))
    got = {part.announcement.public: (part.share, part.gain) for part in chain.parts(link)}
    assert SPEC.outer.age_factor == 0.5
    peers = 500.0**2 / (300.0**2 + 2 * 100.0**2)
    assert got == {
        ALICE.public: (300.0, scaled_gain(sparse.gain, peers)),
        BOB.public: (100.0, scaled_gain(sparse.gain, peers)),
        CAROL.public: (100.0, scaled_gain(denser.gain, peers)),
    }
    assert got[ALICE.public][1] > got[CAROL.public][1] == 1.0  # not below a plain mean
    assert [part.announcement.public for part in chain.parts(link)] == [ALICE.public, BOB.public, CAROL.public]


@pytest.mark.parametrize(
    ("tokens", "shares"),
    [
        ((100, 200, 10_000), [100.0, 200.0, 800.0]),
        ((100, 200, 300), [100.0, 200.0, 300.0]),
        ((100, 10_000), [100.0, 10_000.0]),  # of two nobody can say which claims too much
    ],
)
def test_one_claim_does_not_outweigh_the_others(tokens: tuple[int, ...], shares: list[float]) -> None:
    chain, made = chain_of(1)
    parts = [
        announce(author, 1, made[0].digest, tokens=claim)
        for author, claim in zip((ALICE, BOB, CAROL), tokens, strict=False)
    ]
    link = added(chain, manifest(ALICE, 1, parts, made[0].digest, before=100))
    assert sorted(part.share for part in chain.parts(link)) == shares
    assert link.tokens == sum(tokens), "what was claimed counts for the schedule"


def test_a_lone_dense_contribution_has_gain_one() -> None:
    """A swarm of one steps exactly like a plain loop."""
    chain = Chain(SPEC)
    link = added(chain, manifest(ALICE, 1, [announce(ALICE, 1, rung=LONE, tokens=12_345)]))
    assert [(part.share, part.gain) for part in chain.parts(link)] == [(12_345.0, 1.0)]
    assert chain.parts(chain.genesis) == ()


# -- fork choice ------------------------------------------------------------------------------------------------------


def tree() -> list[SignedRecord[Manifest]]:
    """Three branches on genesis and forks on them: parents before children."""
    made: list[SignedRecord[Manifest]] = []

    def grow(sealer: Any, round_: int, tokens: int, on: SignedRecord[Manifest] | None = None) -> SignedRecord[Manifest]:
        parent = on.digest if on else GENESIS
        before = on.record.total_tokens if on else 0
        part = announce(sealer, round_, parent, tokens=tokens)
        made.append(manifest(sealer, round_, [part], parent, before=before))
        return made[-1]

    a, b, c = grow(ALICE, 0, 100), grow(BOB, 0, 900), grow(CAROL, 1, 50)
    a1, a2 = grow(ALICE, 1, 200, a), grow(BOB, 1, 200, a)
    grow(CAROL, 2, 250, a1)
    grow(ALICE, 2, 100, a2)
    grow(BOB, 3, 120, b)
    grow(CAROL, 2, 349, c)
    return made


TREE = tree()


def insert_in_any_order(manifests: list[SignedRecord[Manifest]]) -> Chain:
    """Those whose parent is not there yet come again, as gossip would bring them."""
    chain, waiting = Chain(SPEC), list(manifests)
    while waiting:
        left = [signed for signed in waiting if chain.insert(signed)[0] is None]
        assert len(left) < len(waiting)
        waiting = left
    return chain


@FIXED
@given(st.permutations(TREE))
def test_the_head_does_not_depend_on_the_order_of_arrival(manifests: list[SignedRecord[Manifest]]) -> None:
    expected = insert_in_any_order(TREE).best().digest
    chain = insert_in_any_order(manifests)
    assert chain.best().digest == expected
    assert len(chain.links) == len(manifests) + 1


@FIXED
@given(st.permutations(TREE), st.sets(st.integers(0, 8), min_size=1))
def test_with_some_unusable_it_does_not_either(manifests: list[SignedRecord[Manifest]], usable: set[int]) -> None:
    good = {TREE[i].digest for i in usable} | {GENESIS}

    def is_usable(link: Link) -> bool:
        return link.digest in good

    assert insert_in_any_order(manifests).best(is_usable).digest == insert_in_any_order(TREE).best(is_usable).digest


def test_what_is_behind_a_branch_counts_not_its_own_tokens() -> None:
    """BOB's 900 tokens with 120 behind them lose against ALICE's 100 with 450 behind."""
    chain = insert_in_any_order(TREE)
    assert [link.signed and link.signed.record.total_tokens for link in chain.path(chain.root, chain.best()) or []] == [
        100,
        300,
        550,
    ]


def test_childless_siblings_go_by_round_then_by_the_candidates_order() -> None:
    chain = Chain(SPEC)
    parts = [announce(who, 1) for who in (ALICE, BOB, CAROL)]
    links = [added(chain, manifest(who, 1, parts)) for who in (ALICE, BOB, CAROL)]
    links.append(added(chain, manifest(ALICE, 1, parts[:1])))  # an equivocating sealer
    first = min(links[:3], key=lambda link: candidate_order(chain.genesis, 1, link.signed.public))  # type: ignore[union-attr]
    same = [link for link in links if link.signed and first.signed and link.signed.public == first.signed.public]
    assert chain.best() is min(same, key=lambda link: link.digest)
    # an earlier round wins whoever sealed it, and however many tokens it has
    early = added(chain, manifest(CAROL, 0, [announce(CAROL, 0, tokens=1)]))
    assert chain.best() is early


def test_contributors_of_the_parent_come_first_among_candidates() -> None:
    chain, made = chain_of(1)
    parent = chain.links[made[0].digest]
    order = [candidate_order(parent, 1, who.public) for who in (ALICE, BOB, CAROL)]
    assert order[0] < min(order[1:]) and order[0][0] == 0
    assert len({place for _, place in order}) == 3
    assert [candidate_order(parent, 2, who.public) for who in (ALICE, BOB, CAROL)] != order


def test_an_invalid_manifest_takes_its_descendants_with_it() -> None:
    chain = insert_in_any_order(TREE)
    before = chain.best()
    top = before.parent and before.parent.parent
    assert top is not None
    chain.mark_invalid(top)
    assert chain.best() not in (before, before.parent, top)
    assert before.invalid
    child = manifest(BOB, 9, [announce(BOB, 9, before.digest)], before.digest, before=before.total)
    link, why = chain.insert(child)
    assert why == "added" and link is not None and link.invalid
