"""Which kind of record a signed record holds, in a way that the type checker follows."""

from __future__ import annotations

from typing import TypeGuard

from tscale.protocol.records import Announcement, Manifest, PeerRecord, Record, SignedRecord, SnapshotRecord


def is_peer(signed: SignedRecord[Record]) -> TypeGuard[SignedRecord[PeerRecord]]:
    """Whether it is a peer record."""
    return isinstance(signed.record, PeerRecord)


def is_announcement(signed: SignedRecord[Record]) -> TypeGuard[SignedRecord[Announcement]]:
    """Whether it is an announcement."""
    return isinstance(signed.record, Announcement)


def is_manifest(signed: SignedRecord[Record]) -> TypeGuard[SignedRecord[Manifest]]:
    """Whether it is a manifest."""
    return isinstance(signed.record, Manifest)


def is_snapshot(signed: SignedRecord[Record]) -> TypeGuard[SignedRecord[SnapshotRecord]]:
    """Whether it is a snapshot record."""
    return isinstance(signed.record, SnapshotRecord)
