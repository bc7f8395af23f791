"""Following the chain: what is folded when, forks of one round, joining by snapshot, drift, and hostile chains."""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.chains import ALICE, BOB, CAROL, Signed, chain_of, joining, root_of, serve_blobs
from tests.helpers.solo import (
    GENESIS,
    LENGTH_S,
    SPEC,
    T0,
    Solo,
    announce,
    manifest,
    other,
    snapshot_record,
    state_of,
)
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.hashing import blob_ref, chunk_hashes, digest
from tscale.protocol.intake import MAX_OFFERS_PER_PEER
from tscale.protocol.messages import ChainReply, ChunkReply, GetBlobs, GetChain, GetChunk, Push
from tscale.protocol.records import seal_record

# -- folding ----------------------------------------------------------------------------------------------------------


def test_a_manifest_is_folded_when_its_blobs_are_here_and_verified() -> None:
    solo = joining(1.1)
    (first,) = chain_of(1)
    solo.ask(ALICE, Push((first.bytes,)))
    assert solo.take(fx.Fold) == []
    assert serve_blobs(solo, ALICE) == {root_of(first)}
    assert solo.fold().manifest == first.digest
    head = solo.machine.head
    assert head is not None and head.digest == first.digest


def test_a_gap_is_filled_by_asking_and_folded_in_order() -> None:
    solo = joining(4.1)
    made = chain_of(4)
    solo.ask(ALICE, Push((made[3].bytes,)))
    solo.at(solo.now + 1.0)
    asked = [pair for pair in solo.requests() if isinstance(pair[1], GetChain)]
    assert asked and isinstance(asked[0][1], GetChain) and asked[0][1].locator[-1] == GENESIS
    solo.reply(asked[0][0], ChainReply(tuple(signed.bytes for signed in made), False))
    folded = []
    for _ in range(40):
        serve_blobs(solo, ALICE)
        for fold in solo.take(fx.Fold):
            folded.append(fold)
            solo.feed(ev.Folded(fold.manifest, state_of(fold.manifest)))
        solo.at(solo.now + 0.1)
    assert [(fold.round, fold.manifest, fold.parent) for fold in folded] == [
        (round_, made[round_].digest, made[round_ - 1].digest if round_ else GENESIS) for round_ in range(4)
    ]
    assert [fold.total_tokens for fold in folded] == [100, 200, 300, 400]


def test_only_one_fold_is_asked_for_at_a_time() -> None:
    solo = joining(2.1)
    made = chain_of(2)
    for signed in made:
        solo.ask(ALICE, Push((signed.bytes,)))
    serve_blobs(solo, ALICE)
    (asked,) = solo.take(fx.Fold)
    assert asked.manifest == made[0].digest
    solo.at(solo.now + 0.4)
    serve_blobs(solo, ALICE)
    assert solo.take(fx.Fold) == []


def test_a_fork_of_one_round_is_folded_from_the_state_before() -> None:
    """No download: the parent's state is still in the worker."""
    solo = joining(2.1)
    mine = chain_of(1)[0]
    solo.ask(ALICE, Push((mine.bytes,)))
    serve_blobs(solo, ALICE)
    solo.fold()
    part = announce(BOB, 0, tokens=50)
    rival = manifest(BOB, 0, [part])
    behind = manifest(BOB, 1, [announce(BOB, 1, rival.digest)], rival.digest, before=50)
    solo.meet(BOB)
    solo.ask(BOB, Push((rival.bytes, behind.bytes)))
    folds: list[fx.Fold] = []
    for _ in range(30):
        serve_blobs(solo, ALICE, BOB)
        for fold in solo.take(fx.Fold):
            folds.append(fold)
            solo.feed(ev.Folded(fold.manifest, state_of(fold.manifest)))
        solo.at(solo.now + 0.1)
    assert [(fold.manifest, fold.parent) for fold in folds] == [
        (rival.digest, GENESIS),
        (behind.digest, rival.digest),
    ]


def test_a_fold_that_shows_a_manifest_to_be_invalid_is_not_tried_again() -> None:
    solo = joining(1.1)
    (first,) = chain_of(1)
    solo.ask(ALICE, Push((first.bytes,)))
    serve_blobs(solo, ALICE)
    (fold,) = solo.take(fx.Fold)
    solo.feed(ev.FoldFailed(fold.manifest, "a contribution can't be folded", True))
    solo.at(solo.now + 3.0)
    assert first.digest not in [again.manifest for again in solo.take(fx.Fold)]
    link = solo.machine.view.chain.get(first.digest)
    assert link is not None and link.invalid


def test_a_refused_contribution_makes_its_manifests_invalid() -> None:
    solo = joining(1.1)
    (first,) = chain_of(1)
    solo.hold(ALICE, first.contributions[0], ok=False)
    solo.ask(ALICE, Push((first.bytes,)))
    solo.at(solo.now + 1.0)
    assert solo.take(fx.Fold) == []
    head = solo.machine.head
    assert head is not None and head.digest == GENESIS


def test_a_lost_blob_is_fetched_again() -> None:
    solo = joining(1.1)
    (first,) = chain_of(1)
    solo.hold(ALICE, first.contributions[0])
    solo.feed(ev.BlobMissing(root_of(first)))
    solo.ask(ALICE, Push((first.bytes,)))
    solo.at(solo.now + 1.0)
    assert root_of(first) in serve_blobs(solo, ALICE)
    assert solo.fold().manifest == first.digest


# -- the worker -------------------------------------------------------------------------------------------------------


def test_a_restarted_worker_goes_on_where_its_checkpoint_is() -> None:
    solo = joining(2.1)
    made = chain_of(2)
    solo.ask(ALICE, Push(tuple(signed.bytes for signed in made)))
    serve_blobs(solo, ALICE)
    solo.fold()
    solo.feed(ev.WorkerDied("killed"))
    assert solo.machine.head is None
    solo.effects.clear()
    solo.feed(ev.WorkerReady(made[0].digest, state_of(made[0].digest), GENESIS))
    for _ in range(5):
        serve_blobs(solo, ALICE)
        solo.at(solo.now + 0.1)
    assert solo.fold().manifest == made[1].digest


def test_a_checkpoint_of_no_known_manifest_starts_over() -> None:
    solo = Solo().boot()
    solo.feed(ev.WorkerReady(digest("test", b"unknown"), bytes(32), None))
    assert len(solo.take(fx.RestartFromGenesis)) == 1


def test_what_was_kept_is_restored_oldest_first_and_damage_is_counted() -> None:
    made = chain_of(5)
    solo = Solo()
    records = [signed.bytes for signed in made]
    assert solo.machine.restore([*records[:2], b"damaged", *records[2:]], {}, {}) == 1
    assert solo.machine.view.chain.best().digest == made[-1].digest
    solo.feed(ev.WorkerReady(made[-1].digest, state_of(made[-1].digest), None))
    assert solo.take(fx.RestartFromGenesis) == []
    head = solo.machine.head
    assert head is not None and head.round == 4


# -- snapshots --------------------------------------------------------------------------------------------------------


def offered(rounds: int, data: bytes, at: int) -> tuple[Solo, list[Signed]]:
    """A joiner that knows a long chain and an offer of the state after manifest `at`; no contribution can be had."""
    solo = joining(rounds + 0.1)
    made = chain_of(rounds)
    for signed in made:
        solo.ask(ALICE, Push((signed.bytes,)))
    solo.ask(ALICE, Push((snapshot_record(ALICE, made[at], data).bytes,)))
    return solo, made


def fetch_snapshot(solo: Solo, data: bytes, timeout_s: float = 30.0) -> bool:
    """Answer with the snapshot alone until the machine wants it loaded."""
    root, end = blob_ref(data).root, solo.now + timeout_s
    while solo.now < end:
        for request, message in solo.requests():
            if isinstance(message, GetChunk) and message.root == root:
                solo.reply(request, ChunkReply(root, 0), data)
            elif isinstance(message, (GetChunk, GetBlobs)):
                solo.feed(ev.RequestFailed(request.token, "not here"))
        if any(isinstance(effect, fx.LoadSnapshot) for effect in solo.effects):
            return True
        solo.at(solo.now + 0.2)
        solo.meet(ALICE)
    return False


def test_a_joiner_far_behind_loads_the_offered_state() -> None:
    data = b"the state" * 50
    solo, made = offered(20, data, 16)
    assert fetch_snapshot(solo, data)
    (load,) = solo.take(fx.LoadSnapshot)
    assert load == fx.LoadSnapshot(made[16].digest, blob_ref(data).root, 16, 1700, state_of(made[16].digest))
    solo.feed(ev.SnapshotLoaded(load.manifest, load.state))
    head = solo.machine.head
    assert head is not None and head.digest == made[16].digest
    for _ in range(30):
        serve_blobs(solo, ALICE)
        for fold in solo.take(fx.Fold):
            solo.feed(ev.Folded(fold.manifest, state_of(fold.manifest)))
        solo.at(solo.now + 0.2)
        solo.meet(ALICE)
    assert solo.machine.head is not None and solo.machine.head.digest == made[-1].digest


def test_a_state_that_the_chain_does_not_vouch_for_is_not_taken() -> None:
    """The next manifest names the digest of the state; an offer of another one is not even fetched."""
    data = b"poison" * 50
    solo = joining(20.1)
    made = chain_of(20)
    for signed in made:
        solo.ask(ALICE, Push((signed.bytes,)))
    honest = snapshot_record(ALICE, made[16], data).record
    solo.ask(BOB, Push((seal_record(BOB, replace(honest, state=digest("test", b"poison"))).bytes,)))
    solo.meet(BOB)
    assert not fetch_snapshot(solo, data, timeout_s=5.0)


def test_a_loaded_state_with_another_digest_trains_nothing() -> None:
    data = b"the state" * 50
    solo, made = offered(20, data, 16)
    assert fetch_snapshot(solo, data)
    (load,) = solo.take(fx.LoadSnapshot)
    solo.take(fx.SetTraining)
    solo.feed(ev.SnapshotLoaded(load.manifest, digest("test", b"something else")))
    solo.at(solo.now + 1.0)
    assert not any(effect.on for effect in solo.take(fx.SetTraining))
    assert "snapshot_wrong" in [notice.event for notice in solo.take(fx.Notice)]


def test_a_flood_of_offers_is_bounded() -> None:
    """Per author, and to rounds that have been."""
    solo = joining(20.1)
    made = chain_of(20)
    for signed in made:
        solo.ask(ALICE, Push((signed.bytes,)))
    offers = solo.machine.sync.snapshots.offers
    for number in range(40):
        solo.ask(BOB, Push((snapshot_record(BOB, made[16], b"%d" % number).bytes,)))
    future = replace(snapshot_record(CAROL, made[16], b"x").record, round=10**9)
    solo.ask(CAROL, Push((seal_record(CAROL, future).bytes,)))
    assert len(offers) == MAX_OFFERS_PER_PEER
    solo.ask(ALICE, Push((snapshot_record(ALICE, made[16], b"y").bytes,)))
    assert len(offers) == MAX_OFFERS_PER_PEER + 1


def test_every_few_rounds_a_snapshot_is_written_and_offered() -> None:
    solo = Solo().boot()
    wrote: list[int] = []
    for round_ in range(9):
        solo.at(T0 + LENGTH_S * (round_ + 1) + 0.3)
        solo.contribute()
        solo.fold()
        wrote += [effect.round for effect in solo.take(fx.WriteSnapshot)]
    assert wrote == [round_ for round_ in range(9) if round_ % SPEC.rounds.snapshot_every == 0]
    data = b"the state"
    head = solo.machine.head
    assert head is not None
    ready = ev.SnapshotReady(head.digest, head.round, state_of(head.digest), blob_ref(data), chunk_hashes(data))
    solo.effects.clear()
    solo.feed(ready)
    assert len(solo.take(fx.KeepRecord)) == 1


# -- drift ------------------------------------------------------------------------------------------------------------


def folded_with_a_flipped_bit() -> tuple[Solo, Signed]:
    """A peer whose state after a manifest of Alice, Bob and Carol is another one than theirs."""
    solo = joining(1.1)
    regulars = (ALICE, BOB, CAROL)
    first = manifest(ALICE, 0, [announce(who, 0) for who in regulars])
    solo.meet(BOB).meet(CAROL)
    solo.ask(ALICE, Push((first.bytes,)))
    for _ in range(4):
        serve_blobs(solo, *regulars)
        solo.at(solo.now + 0.3)
    (fold,) = solo.take(fx.Fold)
    solo.feed(ev.Folded(fold.manifest, digest("test", b"a flipped bit")))
    solo.effects.clear()
    return solo, first


def test_a_peer_whose_state_differs_from_the_majority_stops_contributing() -> None:
    solo, first = folded_with_a_flipped_bit()
    for who in (ALICE, BOB, CAROL):
        solo.ask(who, Push((announce(who, 1, first.digest).bytes,)))
    serve_blobs(solo, ALICE, BOB, CAROL)
    solo.at(solo.now + 0.4)
    assert solo.take(fx.SetTraining)[-1] == fx.SetTraining(False, "repairing the state")
    solo.at(T0 + 2 * LENGTH_S + 1.0)
    assert solo.take(fx.MakeContribution) == []


def test_claims_of_strangers_or_without_a_blob_stop_nobody() -> None:
    solo, first = folded_with_a_flipped_bit()
    stranger = other(9)
    solo.ask(stranger, Push((announce(stranger, 1, first.digest, tokens=1_000).bytes,)))
    serve_blobs(solo, stranger)
    solo.ask(ALICE, Push((announce(ALICE, 1, first.digest).bytes,)))
    solo.at(solo.now + 0.4)
    assert [effect.on for effect in solo.take(fx.SetTraining) if not effect.on] == []


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_a_seed_stores_what_the_swarm_makes_without_folding() -> None:
    solo = Solo(role="seed").boot().at(T0 + 2 * LENGTH_S + 1.0).meet(ALICE)
    made = chain_of(2)
    data = b"the state" * 50
    solo.ask(ALICE, Push((*(signed.bytes for signed in made), snapshot_record(ALICE, made[0], data).bytes)))
    got: set[bytes] = set()
    for _ in range(20):
        for request, message in solo.requests():
            if isinstance(message, GetChunk) and message.root == blob_ref(data).root:
                solo.reply(request, ChunkReply(message.root, 0), data)
                got.add(message.root)
            else:
                solo.effects.append(request)
        got |= serve_blobs(solo, ALICE)
        solo.at(solo.now + 0.3)
    assert got == {root_of(made[0]), root_of(made[1]), blob_ref(data).root}
    assert solo.take(fx.Fold) == [] and solo.take(fx.MakeContribution) == [] and solo.take(fx.VerifyBlob) == []
    kept = {effect.record for effect in solo.take(fx.KeepRecord)}
    assert {signed.bytes for signed in made} <= kept
