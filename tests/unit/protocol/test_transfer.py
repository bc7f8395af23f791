"""Fetching blobs by hash: what is asked of whom, what is believed, and what is not fetched twice."""

from __future__ import annotations

from random import Random

import pytest

from tscale.protocol.dice import Dice
from tscale.protocol.hashing import CHUNK_BYTES, BlobRef, blob_ref, chunk_hashes
from tscale.protocol.transfer import (
    BATCH_BYTES,
    HEDGE_FLOOR_BPS,
    HOLDER_REST_S,
    MAX_BATCH,
    MAX_DOUBTFUL,
    MAX_HEDGES,
    MAX_IN_FLIGHT,
    MAX_PER_PEER,
    MAX_SMALL_HEDGES,
    Ask,
    Transfers,
)

ALICE, BOB, CAROL, DAVE = (bytes([number]) * 32 for number in range(1, 5))
SMALL = b"a small blob"
LARGE = Random(0).randbytes(5 * CHUNK_BYTES + 7)
LARGE_REF, LARGE_HASHES = blob_ref(LARGE), chunk_hashes(LARGE)


def chunk(index: int, data: bytes = LARGE) -> bytes:
    return data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def anybody(peer: bytes) -> int:
    return 2


class Bench:
    """Transfers with their dice and time."""

    def __init__(self, patience_s: float = 1.0) -> None:
        self.transfers = Transfers(patience_s)
        self.dice = Dice(1)
        self.now = 100.0

    def want(self, ref: BlobRef, *holders: bytes, priority: int = 0, hashes: tuple[bytes, ...] | None = None) -> None:
        want = self.transfers.want(ref, priority, self.now)
        assert want is not None
        want.holders.update(holders)
        if hashes is not None:
            assert self.transfers.take_hashes(ref, hashes)

    def asks(self, can_ask=anybody) -> list[Ask]:
        return self.transfers.schedule(self.dice, self.now, can_ask)

    def receive(self, ask: Ask, data: bytes = LARGE) -> bool:
        """A good answer; whether the blob is whole now."""
        assert self.transfers.check_chunk(ask.blob, ask.index, chunk(ask.index, data))
        whole = self.transfers.took_chunk(ask.blob, ask.index)
        self.transfers.ended(ask, True, self.now)
        return whole


def test_a_small_blob_needs_no_hashes() -> None:
    bench = Bench()
    ref = blob_ref(SMALL)
    bench.want(ref, ALICE)
    (ask,) = bench.asks()
    assert ask == Ask(ref, 0, ALICE)
    assert bench.receive(ask, SMALL)
    assert ref.root in bench.transfers.complete and ref not in bench.transfers.wants
    assert bench.transfers.want(ref, 0, bench.now) is None


def test_a_large_blob_starts_with_its_hashes_and_ends_with_every_chunk() -> None:
    bench = Bench()
    bench.want(LARGE_REF, ALICE, BOB)
    (first,) = bench.asks()
    assert first.index == -1
    assert bench.transfers.take_hashes(LARGE_REF, LARGE_HASHES)
    bench.transfers.ended(first, True, bench.now)
    got: list[int] = []
    while LARGE_REF in bench.transfers.wants:
        asks = bench.asks()
        assert asks and max(sum(ask.peer == peer for ask in asks) for peer in (ALICE, BOB)) <= MAX_PER_PEER
        for ask in asks:
            got.append(ask.index)
            bench.receive(ask)
    assert sorted(got) == [0, 1, 2, 3, 4, 5]
    assert bench.transfers.complete[LARGE_REF.root] == (LARGE_REF, LARGE_HASHES)


@pytest.mark.parametrize(
    "hashes",
    [(), LARGE_HASHES[:-1], (*LARGE_HASHES, LARGE_HASHES[0]), (*LARGE_HASHES[:-1], bytes(32))],
    ids=["none", "short", "long", "wrong"],
)
def test_hashes_that_do_not_give_the_root_are_refused(hashes: tuple[bytes, ...]) -> None:
    bench = Bench()
    bench.want(LARGE_REF, ALICE)
    assert not bench.transfers.take_hashes(LARGE_REF, hashes)
    assert bench.transfers.wants[LARGE_REF].hashes is None


def test_a_chunk_is_what_its_hash_says_or_nothing() -> None:
    bench = Bench()
    bench.want(LARGE_REF, ALICE, hashes=LARGE_HASHES)
    check, blob = bench.transfers.check_chunk, LARGE_REF
    assert check(blob, 2, chunk(2)) and check(blob, 5, chunk(5))
    assert not check(blob, 2, chunk(3))
    assert not check(blob, 2, chunk(2)[:-1]) and not check(blob, 5, chunk(2))
    assert not check(blob, 6, b"") and not check(blob, -1, chunk(5))
    assert not check(BlobRef(bytes(32), len(LARGE)), 0, chunk(0))


def test_a_chunk_before_its_hashes_is_not_believed() -> None:
    bench = Bench()
    bench.want(LARGE_REF, ALICE)
    assert not bench.transfers.check_chunk(LARGE_REF, 0, chunk(0))
    assert not bench.transfers.took_chunk(LARGE_REF, 0)


def large(number: int, size: int = BATCH_BYTES + 1) -> BlobRef:
    """A blob of one chunk that is too large to share a request."""
    return blob_ref(bytes([number]) * size)


def test_urgent_wants_go_first_and_among_them_the_rarest() -> None:
    bench = Bench()
    refs = [large(number) for number in range(4)]
    bench.want(refs[0], ALICE, BOB, priority=0)
    bench.want(refs[1], ALICE, priority=0)
    bench.want(refs[2], ALICE, priority=1)
    bench.want(refs[3], priority=0)
    assert [(ask.blob, ask.more) for ask in bench.asks()] == [
        (refs[1], ()),
        (refs[0], ()),
        (refs[2], ()),
    ]
    assert not bench.transfers.wants[refs[3]].flying, "nobody has it"


def test_small_blobs_of_one_holder_share_a_request() -> None:
    bench = Bench()
    refs = [blob_ref(bytes([number])) for number in range(MAX_BATCH + 5)]
    for ref in refs:
        bench.want(ref, ALICE)
    bench.want(blob_ref(b"elsewhere"), BOB)
    asks = bench.asks()
    shared = [{ask.blob, *ask.more} for ask in asks if ask.peer == ALICE]
    assert [len(roots) for roots in shared] == [MAX_BATCH, 5]
    assert shared[0] | shared[1] == set(refs)
    assert [ask.more for ask in asks if ask.peer == BOB] == [()]


def test_of_a_shared_request_only_what_was_lacking_rests() -> None:
    bench = Bench()
    refs = [blob_ref(bytes([number])) for number in range(3)]
    for ref in refs:
        bench.want(ref, ALICE)
    (ask,) = bench.asks()
    blobs = (ask.blob, *ask.more)
    assert len(blobs) == 3
    data = next(bytes([number]) for number in range(3) if refs[number] == blobs[0])
    assert bench.transfers.check_chunk(blobs[0], 0, data) and bench.transfers.took_chunk(blobs[0], 0)
    bench.transfers.ended(ask, True, bench.now, lacking=blobs[1:2])
    (again,) = bench.asks()
    assert (again.blob, again.more) == (blobs[2], ())


def test_a_later_want_makes_it_more_urgent_never_less() -> None:
    bench = Bench()
    ref = blob_ref(SMALL)
    bench.want(ref, priority=1)
    bench.want(ref, priority=0)
    bench.want(ref, priority=1)
    assert bench.transfers.wants[ref].priority == 0


def test_the_least_busy_and_best_ranked_holder_is_asked() -> None:
    bench = Bench()
    bench.want(LARGE_REF, ALICE, BOB, CAROL, hashes=LARGE_HASHES)
    ranks = {ALICE: 1, BOB: 2, CAROL: 0}
    asks = bench.asks(lambda peer: ranks[peer])
    peers = [ask.peer for ask in asks]
    assert peers == [BOB] * MAX_PER_PEER + [ALICE] * MAX_PER_PEER, "those that answer first, then the silent one"
    assert CAROL not in peers, "a peer to leave alone is left alone"


def test_requests_in_flight_are_bounded() -> None:
    bench = Bench()
    for number in range(12):
        bench.want(large(number), *(bytes([peer]) * 32 for peer in range(50, 80)))
    asks = bench.asks()
    assert len(asks) == MAX_IN_FLIGHT
    assert bench.asks() == []
    bench.transfers.ended(asks[0], False, bench.now)
    assert len(bench.asks()) == 1


def test_a_holder_that_fails_rests_for_that_blob() -> None:
    bench = Bench()
    ref = blob_ref(SMALL)
    bench.want(ref, ALICE)
    (ask,) = bench.asks()
    bench.transfers.ended(ask, False, bench.now)
    assert bench.asks() == []
    bench.want(blob_ref(b"another"), ALICE)
    assert [again.blob for again in bench.asks()] == [blob_ref(b"another")]
    bench.now += HOLDER_REST_S + 0.1
    assert bench.asks() == [ask]


def test_a_lying_holder_does_not_keep_the_blob_from_arriving() -> None:
    bench = Bench()
    bench.want(LARGE_REF, ALICE, BOB, hashes=LARGE_HASHES)
    for _ in range(200):
        for ask in bench.asks():
            if ask.peer == ALICE:
                assert not bench.transfers.check_chunk(ask.blob, ask.index, bytes(CHUNK_BYTES))
                bench.transfers.ended(ask, False, bench.now)
            else:
                bench.receive(ask)
        if LARGE_REF.root in bench.transfers.complete:
            break
        bench.now += 0.01
    assert LARGE_REF.root in bench.transfers.complete
    assert bench.now < 100.5, "it did not wait for the liar"


@pytest.mark.parametrize(("size_bytes", "most"), [(100, MAX_SMALL_HEDGES), (BATCH_BYTES, MAX_HEDGES)])
def test_a_slow_answer_is_asked_of_another_holder(size_bytes: int, most: int) -> None:
    bench = Bench(patience_s=1.0)
    ref = blob_ref(bytes(size_bytes))
    bench.want(ref, *(bytes([number]) * 32 for number in range(1, 12)))
    (first,) = bench.asks()
    late_s = 1.0 + 8.0 * size_bytes / HEDGE_FLOOR_BPS
    bench.now += late_s - 0.01
    assert bench.asks() == []
    asked = [first.peer]
    for _ in range(most - 1):
        bench.now += late_s + 0.02
        (hedge,) = bench.asks()
        assert hedge.index == 0 and hedge.peer not in asked
        asked.append(hedge.peer)
    bench.now += 100.0
    assert bench.asks() == [], "no more than that at once"
    bench.transfers.ended(Ask(ref, 0, asked[0]), False, bench.now)
    (again,) = bench.asks()
    assert again.peer not in asked[1:]


def test_a_large_chunk_gets_the_time_that_a_slow_line_needs() -> None:
    bench = Bench(patience_s=1.0)
    bench.want(LARGE_REF, ALICE, BOB, hashes=LARGE_HASHES)
    bench.asks()
    bench.now += 1.0 + 8.0 * CHUNK_BYTES / HEDGE_FLOOR_BPS - 0.1
    assert bench.transfers.wants[LARGE_REF].overdue(bench.now, 1.0) == []
    bench.now += 0.2
    assert len(bench.transfers.wants[LARGE_REF].overdue(bench.now, 1.0)) == 4


def test_what_a_restart_left_is_not_fetched_again() -> None:
    bench = Bench()
    bench.transfers.partial[LARGE_REF] = (LARGE_HASHES, {0, 1, 2, 3})
    bench.want(LARGE_REF, ALICE, BOB)
    asks = bench.asks()
    assert sorted(ask.index for ask in asks) == [4, 5]
    assert [bench.receive(ask) for ask in asks] == [False, True]


def test_chunks_that_lie_in_another_blob_are_copied() -> None:
    """A drifted peer fetches only what differs from the snapshot it has."""
    bench = Bench()
    other = LARGE[: 2 * CHUNK_BYTES] + Random(1).randbytes(CHUNK_BYTES) + LARGE[3 * CHUNK_BYTES :]
    ref = blob_ref(other)
    bench.transfers.add_complete(LARGE_REF, LARGE_HASHES)
    bench.want(ref, ALICE, hashes=chunk_hashes(other))
    copies = bench.transfers.local_copies(ref)
    assert copies == [(i, LARGE_REF.root, i) for i in (0, 1, 3, 4, 5)]
    for index, _, _ in copies:
        assert not bench.transfers.took_chunk(ref, index)
    (ask,) = bench.asks()
    assert ask.index == 2 and bench.receive(ask, other)


def test_a_forgotten_blob_is_wanted_anew_and_no_source_of_copies() -> None:
    bench = Bench()
    bench.transfers.add_complete(LARGE_REF, LARGE_HASHES)
    bench.transfers.forget(LARGE_REF.root)
    assert bench.transfers.index == {}
    bench.want(LARGE_REF, ALICE)
    assert [ask.index for ask in bench.asks()] == [-1]
    bench.transfers.forget(LARGE_REF.root)
    assert bench.asks() == []
    bench.transfers.ended(Ask(LARGE_REF, -1, ALICE), False, bench.now)
    assert bench.transfers.busy == {} and bench.transfers.in_flight == 0


def test_forgetting_one_of_two_equal_chunks_keeps_the_other() -> None:
    bench = Bench()
    twin = LARGE + b"a tail"
    bench.transfers.add_complete(LARGE_REF, LARGE_HASHES)
    bench.transfers.add_complete(blob_ref(twin), chunk_hashes(twin))
    bench.transfers.forget(LARGE_REF.root)
    assert bench.transfers.index[LARGE_HASHES[0]] == (blob_ref(twin).root, 0)


def test_each_announced_size_of_a_root_is_a_want_and_the_true_one_ends_them_all() -> None:
    bench = Bench()
    ref = blob_ref(SMALL)
    for size_bytes in (1, len(SMALL) + 1, 1 << 40):
        bench.want(BlobRef(ref.root, size_bytes), ALICE)
    bench.want(ref, BOB)
    (ask,) = [ask for ask in bench.asks() if ask.blob == ref]
    assert ask.peer == BOB
    assert bench.receive(ask, SMALL)
    assert bench.transfers.wants == {} and not bench.transfers.is_wanted(ref.root)
    assert bench.transfers.want(BlobRef(ref.root, 1), 0, bench.now) is None


def test_a_part_of_an_earlier_run_is_not_taken_for_another_size() -> None:
    bench = Bench()
    bench.transfers.partial[LARGE_REF] = (LARGE_HASHES, {0, 1, 2, 3})
    false = BlobRef(LARGE_REF.root, 40 * CHUNK_BYTES)
    bench.want(false, ALICE)
    assert [ask.index for ask in bench.asks()] == [-1]
    assert not bench.transfers.check_chunk(false, 30, bytes(CHUNK_BYTES))
    bench.want(LARGE_REF, BOB)
    assert sorted(ask.index for ask in bench.asks()) == [4, 5]


def test_requests_to_peers_that_may_never_answer_leave_room_for_the_others() -> None:
    """A flood of blobs that only silent strangers have must not hold up what an answering peer has."""
    bench = Bench()
    for number in range(40):
        bench.want(large(number), bytes([100 + number]) * 32)
    bench.want(large(99), ALICE, BOB)
    asks = bench.asks(lambda peer: 2 if peer in (ALICE, BOB) else 1)
    assert [ask.doubtful for ask in asks].count(True) == MAX_DOUBTFUL
    assert [ask.blob for ask in asks if not ask.doubtful] == [large(99)]
    gone = next(ask for ask in asks if ask.doubtful)
    bench.transfers.ended(gone, False, bench.now)
    assert len(bench.asks(lambda peer: 1)) == 1
