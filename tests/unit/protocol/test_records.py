"""Signed records: what is sealed opens again, and every rule of the schema refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.protocol_samples import (
    ALICE,
    BOB,
    sample_announcement,
    sample_manifest,
    sample_peer,
    sample_snapshot,
)
from tscale.protocol.canonical import pack, unpack
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.hashing import BlobRef, digest
from tscale.protocol.records import (
    ANNOUNCEMENT_MAX_BYTES,
    MANIFEST_MAX_BYTES,
    PEER_RECORD_MAX_BYTES,
    Announcement,
    Manifest,
    PeerRecord,
    SignedRecord,
    SnapshotRecord,
    open_record,
    seal_record,
)

PEER, ANNOUNCEMENT, MANIFEST, SNAPSHOT = (
    sample_peer(),
    sample_announcement(ALICE),
    sample_manifest(),
    sample_snapshot(),
)
ALL: tuple[SignedRecord[Any], ...] = (PEER, ANNOUNCEMENT, MANIFEST, SNAPSHOT)
CLASSES: tuple[type[Any], ...] = (PeerRecord, Announcement, Manifest, SnapshotRecord)


@pytest.mark.parametrize("signed", ALL, ids=lambda signed: signed.kind)
def test_a_sealed_record_opens_to_itself(signed: SignedRecord[Any]) -> None:
    opened = open_record(signed.bytes, (type(signed.record),))
    assert opened == signed
    assert opened.public == ALICE.public
    kind, body, public, _ = unpack(signed.bytes, MANIFEST_MAX_BYTES)
    assert opened.digest == digest("record", kind.encode(), body, public)


@pytest.mark.parametrize("signed", ALL, ids=lambda signed: signed.kind)
def test_only_the_expected_kinds_open(signed: SignedRecord[Any]) -> None:
    assert open_record(signed.bytes, CLASSES).kind == signed.kind
    others = tuple(kind for kind in CLASSES if kind is not type(signed.record))
    with pytest.raises(RefuseFrame):
        open_record(signed.bytes, others)


def test_a_manifest_opens_its_announcements() -> None:
    parts = open_record(MANIFEST.bytes, (Manifest,)).contributions
    assert {part.public for part in parts} == {ALICE.public, BOB.public}
    assert [part.public for part in parts] == sorted(part.public for part in parts)
    assert sum(part.record.tokens for part in parts) == 8192 + 4096


def test_known_announcements_are_not_opened_again() -> None:
    calls: list[str] = []

    def verify(public: bytes, domain: str, body: bytes, signature: bytes) -> bool:
        calls.append(domain)
        return True

    held = {part.bytes: part for part in MANIFEST.contributions}
    assert open_record(MANIFEST.bytes, (Manifest,), verify=verify, known=held.get) == MANIFEST
    assert calls == ["record/manifest"]
    open_record(MANIFEST.bytes, (Manifest,), verify=verify)
    assert calls[1:] == ["record/manifest", "record/announcement", "record/announcement"]


def test_the_signature_is_checked_last_and_of_every_part() -> None:
    def refuse(public: bytes, domain: str, body: bytes, signature: bytes) -> bool:
        return domain != "record/announcement"

    with pytest.raises(RefuseFrame, match="announcement record's signature"):
        open_record(MANIFEST.bytes, (Manifest,), verify=refuse)
    kind, body, public, signature = unpack(ANNOUNCEMENT.bytes, ANNOUNCEMENT_MAX_BYTES)
    for forged in (pack((kind, body, BOB.public, signature)), pack((kind, body, public, bytes(64)))):
        with pytest.raises(RefuseFrame, match="signature is wrong"):
            open_record(forged, (Announcement,))


def test_the_cap_comes_first() -> None:
    assert open_record(PEER.bytes, (PeerRecord,), max_bytes=len(PEER.bytes)) == PEER
    with pytest.raises(RefuseFrame, match="more than the cap"):
        open_record(PEER.bytes, (PeerRecord,), max_bytes=len(PEER.bytes) - 1)
    with pytest.raises(RefuseFrame, match="more than the cap of 3072"):
        open_record(bytes(PEER_RECORD_MAX_BYTES + 1), (PeerRecord,))


def test_a_kind_keeps_its_cap_beside_a_larger_kind() -> None:
    padded = pack(("announcement", bytes(ANNOUNCEMENT_MAX_BYTES), ALICE.public, bytes(64)))
    with pytest.raises(RefuseFrame, match="more than the 512"):
        open_record(padded, (Announcement, Manifest))


def test_announcements_and_manifests_stay_small() -> None:
    assert len(ANNOUNCEMENT.bytes) == 270
    assert MANIFEST_MAX_BYTES < 1 << 20


@pytest.mark.parametrize(
    "change",
    [
        {"swarm": "demo"},
        {"swarm": "Ours-" + "a" * 26},
        {"round": -1},
        {"round": 1 << 40},
        {"round": True},
        {"round": 1.0},
        {"base": bytes(31)},
        {"base_state": "x" * 32},
        {"blob": BlobRef(bytes(32), 0)},
        {"blob": BlobRef(bytes(33), 1)},
        {"blob": BlobRef(bytes(32), (1 << 42) + 1)},
        {"tokens": 0},
        {"tokens": 1 << 53},
        {"steps": 0},
        {"loss": 2},
        {"loss": float("nan")},
        {"loss": 1e7},
        {"rung": 64},
        {"rung": None},
    ],
)
def test_announcement_ranges(change: dict[str, Any]) -> None:
    with pytest.raises(RefuseFrame):
        seal_record(ALICE, replace(ANNOUNCEMENT.record, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"role": "owner"},
        {"addrs": ("/ip4/1.2.3.4/udp/1",)},
        {"addrs": ("/ip4/1.2.3.4/tcp/1",) * 2},
        {"addrs": tuple(f"/ip4/1.2.3.4/tcp/{port}" for port in range(1, 10))},
        {"addrs": (f"/ip4/1.2.3.4/tcp/1/p2p/{BOB.peer_id}",)},
        {"name": "x" * 33},
        {"name": "a\nb"},
        {"name": "\u202egnp.exe"},
        {"name": "e\u0301"},
        {"name": " lead"},
        {"name": "two  spaces"},
        {"name": "zero\u200bwidth"},
        {"wire_min": 2, "wire_max": 1},
        {"issued_unix_s": 5},
        {"expires_unix_s": 0.0},
        {"expires_unix_s": PEER.record.issued_unix_s + 86_401.0},
        {"leaving": 0},
    ],
)
def test_peer_record_ranges(change: dict[str, Any]) -> None:
    with pytest.raises(RefuseFrame):
        seal_record(ALICE, replace(PEER.record, **change))


@pytest.mark.parametrize("name", ["", "Zoë", "日本語", "a b", "x" * 32])
def test_names_people_use_are_taken(name: str) -> None:
    assert seal_record(ALICE, replace(PEER.record, name=name)).record.name == name


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"contributions": ()}, "contributions"),
        ({"contributions": MANIFEST.record.contributions[::-1]}, "not sorted"),
        ({"contributions": MANIFEST.record.contributions[:1] * 2}, "not sorted"),
        ({"contributions": (MANIFEST.bytes,)}, "out of range"),
        ({"contributions": (SNAPSHOT.bytes,)}, "not a record of the kind"),
        ({"swarm": "other-" + "a" * 26}, "another swarm"),
        ({"round": 6}, "a later round"),
        ({"total_tokens": 8192 + 4096 - 1}, "total of tokens"),
    ],
)
def test_manifest_rules(change: dict[str, Any], why: str) -> None:
    with pytest.raises(RefuseFrame, match=why):
        seal_record(ALICE, replace(MANIFEST.record, **change))


def test_an_older_contribution_may_be_in_a_manifest() -> None:
    late = replace(MANIFEST.record, round=8)
    assert open_record(seal_record(BOB, late).bytes, (Manifest,)).record == late


@pytest.mark.parametrize(
    "envelope",
    [
        b"",
        pack(None),
        pack(()),
        pack(("peer", b"", ALICE.public)),
        pack((1, b"", ALICE.public, bytes(64))),
        pack(("audit", b"", ALICE.public, bytes(64))),
        pack(("announcement", "", ALICE.public, bytes(64))),
        pack(("announcement", b"", ALICE.public[:31], bytes(64))),
        pack(("announcement", b"", ALICE.public, bytes(65))),
        pack(("announcement", b"", None, bytes(64))),
        pack(("announcement", pack(()), ALICE.public, bytes(64))),
        pack(("announcement", pack({}), ALICE.public, bytes(64))),
        pack({"kind": "announcement"}),
    ],
)
def test_other_envelopes_are_refused(envelope: bytes) -> None:
    with pytest.raises(RefuseFrame):
        open_record(envelope, (Announcement, Manifest), verify=lambda *parts: True)


def test_a_signature_of_one_kind_is_none_of_another() -> None:
    """The kind is in the signed domain: a body can't be moved to another kind."""
    _, body, public, signature = unpack(ANNOUNCEMENT.bytes, ANNOUNCEMENT_MAX_BYTES)
    assert digest("record", b"announcement", body, public) != digest("record", b"snapshot", body, public)
    with pytest.raises(RefuseFrame):
        open_record(pack(("snapshot", body, public, signature)), (SnapshotRecord,))
