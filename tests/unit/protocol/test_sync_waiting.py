"""What a peer waits for, and what it fetches meanwhile, before it folds."""

from __future__ import annotations

from tests.helpers.chains import ALICE, BOB, chain_of, joining, root_of, serve_blobs
from tests.helpers.solo import LENGTH_S, announce, manifest
from tscale.protocol import effects as fx
from tscale.protocol.messages import Push
from tscale.protocol.sync import SIBLING_WAIT


def test_a_sibling_waits_a_moment_for_the_blobs_of_the_better_manifest() -> None:
    """Else a joiner folds whichever of two is smaller, and is at a state of its own until the rest has come."""
    for late, folded in ((0.4, False), (1.5, True)):
        solo = joining(1.1).meet(BOB)
        pair = [manifest(who, 0, [announce(who, 0)]) for who in (ALICE, BOB)]
        for signed in pair:
            solo.ask(ALICE, Push((signed.bytes,)))
        better = solo.machine.sync.target().digest
        worse = next(signed for signed in pair if signed.digest != better)
        came = solo.now
        serve_blobs(solo, ALICE if worse is pair[0] else BOB)
        solo.at(came + late * SIBLING_WAIT * LENGTH_S)
        assert [fold.manifest for fold in solo.take(fx.Fold)] == ([worse.digest] if folded else [])
        if not folded:
            serve_blobs(solo, ALICE, BOB)
            assert solo.fold().manifest == better


def test_while_claims_are_doubted_the_next_manifest_is_fetched_all_the_same() -> None:
    """The peer stands where the living authors are. What they seal next must not wait for its blobs by chance."""
    solo = joining(2.1)
    (first,) = chain_of(1)
    solo.ask(ALICE, Push((first.bytes,)))
    serve_blobs(solo, ALICE)
    solo.fold()
    solo.ask(ALICE, Push((announce(ALICE, 1, first.digest).bytes,)))
    serve_blobs(solo, ALICE)
    sync = solo.machine.sync
    sync.chase._doubt_until_s = solo.now + 100.0
    second = manifest(ALICE, 1, [announce(BOB, 1, first.digest)], first.digest, before=100)
    solo.ask(ALICE, Push((second.bytes,)))
    assert sync.target() is sync.head
    solo.at(solo.now + 1.0)
    assert root_of(second) in {blob.root for blob in solo.machine.view.transfers.wants}
