"""The contributions a peer knows of: one per author and round, and no more than it can keep."""

from __future__ import annotations

from tests.helpers.solo import announce, other
from tscale.protocol.hashing import blob_ref
from tscale.protocol.pool import MAX_PER_ROUND, Pool

ALICE, BOB = other(1), other(2)


def test_the_first_of_an_author_and_round_stays() -> None:
    pool = Pool()
    first, second = announce(ALICE, 3), announce(ALICE, 3, blob=blob_ref(b"another"))
    assert pool.add(first) and not pool.add(first) and not pool.add(second)
    assert pool.of_round(3) == {ALICE.public: first}
    assert pool.naming(second.record.blob.root) == []
    assert pool.add(announce(ALICE, 4)) and pool.add(announce(BOB, 3))
    assert set(pool.of_round(3)) == {ALICE.public, BOB.public}
    assert pool.of_round(9) == {}


def test_blobs_lead_to_their_announcement() -> None:
    pool = Pool()
    signed = announce(ALICE, 3)
    pool.add(signed)
    assert pool.naming(signed.record.blob.root) == [signed]


def test_old_rounds_are_forgotten_with_their_blobs() -> None:
    pool = Pool()
    signed = [announce(ALICE, round_) for round_ in range(6)]
    for item in signed:
        pool.add(item)
    pool.forget_before(4)
    assert set(pool.by_round) == {4, 5}
    assert [len(pool.naming(item.record.blob.root)) for item in signed] == [0, 0, 0, 0, 1, 1]


def test_a_flood_of_authors_ends_at_the_cap() -> None:
    pool = Pool()
    signed = announce(ALICE, 3)
    pool.by_round[3] = {i.to_bytes(32, "little"): signed for i in range(MAX_PER_ROUND)}
    assert not pool.add(announce(BOB, 3))
    assert pool.add(announce(BOB, 4))
