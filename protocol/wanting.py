"""The contributions of manifests ahead: fetching them, what they still cost, and letting go of those not needed."""

from __future__ import annotations

from collections.abc import Iterable

from tscale.protocol.chain import Link
from tscale.protocol.records import SnapshotRecord
from tscale.protocol.view import View


def fetch_parts(view: View, steps: Iterable[Link]) -> bool:
    """Want the blobs of these manifests. True when one seems lost: long wanted, and nobody has it."""
    lost = False
    for link in steps:
        for part in link.signed.contributions if link.signed else ():
            if view.holds(part.record.blob.root):
                continue
            want = view.transfers.wants.get(part.record.blob)
            if want is None:
                view.want(part.record.blob, "contribution", part.public)
                want = view.transfers.wants[part.record.blob]
            lost = lost or view.now - want.since_s > view.spec.rounds.length_s
    return lost


def count_missing_bytes(view: View, steps: Iterable[Link]) -> int:
    """The bytes of the blobs of these manifests that are not here."""
    blobs = (p.record.blob for link in steps if link.signed for p in link.signed.contributions)
    return sum(blob.size_bytes for blob in blobs if not view.holds(blob.root))


def is_replay_cheaper(view: View, steps: list[Link], offer: SnapshotRecord | None, limit: int) -> bool:
    """Whether replaying these manifests takes fewer bytes than the offered snapshot and what follows it.

    Beyond `limit` manifests the blobs of the older ones may be gone everywhere.
    """
    if len(steps) <= 2:
        return True
    if offer is None:
        return len(steps) <= 4 * limit
    if len(steps) > limit:
        return False
    after = [link for link in steps if link.round > offer.round]
    if len(after) == len(steps):
        return True
    size_bytes = 0 if view.holds(offer.blob.root) else offer.blob.size_bytes
    return count_missing_bytes(view, steps) <= size_bytes + count_missing_bytes(view, after)


def forget_wants_before(view: View, round_: int) -> None:
    """Contributions that a snapshot makes needless must not take its place on the line."""
    wants = view.transfers.wants
    for link in view.chain.links.values():
        if wants and link.signed is not None and link.round <= round_:
            for part in link.signed.contributions:
                if part.record.blob in wants:
                    view.transfers.forget(part.record.blob.root)
