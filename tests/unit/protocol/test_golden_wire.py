"""The wire does not change by accident: fixed keys give the committed bytes, and the committed bytes open."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.message_samples import sample_messages
from tests.helpers.wire_vectors import GOLDEN, plain, vectors
from tscale.protocol.hashing import BlobRef, blob_root
from tscale.protocol.identity import parse_key_file, peer_id
from tscale.protocol.links import parse_link
from tscale.protocol.messages import decode
from tscale.protocol.records import Announcement, Manifest, PeerRecord, SnapshotRecord, open_record
from tscale.protocol.schema import JSON, from_plain
from tscale.protocol.spec import SwarmSpec

RECORDS: dict[str, type[Any]] = {
    "peer": PeerRecord,
    "announcement": Announcement,
    "manifest": Manifest,
    "snapshot": SnapshotRecord,
}
DOC = Path(__file__).parents[3] / "docs" / "protocol.md"


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(vectors()))
def test_the_code_writes_the_committed_bytes(name: str) -> None:
    assert vectors()[name] == golden(name)


@pytest.mark.parametrize("kind", sorted(RECORDS))
def test_a_committed_record_opens_to_the_committed_fields(kind: str) -> None:
    vector = golden(f"record_{kind}_v1")
    signed = open_record(bytes.fromhex(vector["hex"]), (RECORDS[kind],))
    assert signed.record == from_plain(RECORDS[kind], vector["fields"], JSON)
    assert (signed.kind, signed.public.hex(), signed.digest.hex()) == (kind, vector["public"], vector["digest"])


def test_the_committed_spec_has_its_id_and_its_link() -> None:
    vector = golden("spec_v1")
    spec = SwarmSpec.from_bytes(bytes.fromhex(vector["hex"]))
    assert (spec.digest.hex(), spec.swarm_id) == (vector["digest"], vector["swarm_id"])
    assert parse_link(vector["link"]).swarm_id == spec.swarm_id


def test_committed_keys_have_their_peer_ids() -> None:
    for vector in golden("peer_id_v1").values():
        assert peer_id(bytes.fromhex(vector["public"])) == vector["peer_id"]
        assert parse_key_file(bytes.fromhex(vector["key_file"])).peer_id == vector["peer_id"]


def test_committed_blobs_have_their_roots() -> None:
    for vector in golden("blob_root_v1").values():
        hashes = tuple(bytes.fromhex(item) for item in vector["chunk_hashes"])
        assert blob_root(vector["size_bytes"], hashes).hex() == vector["root"]
        assert BlobRef(b"", vector["size_bytes"]).chunks == len(hashes)


@pytest.mark.parametrize("name", sorted(sample_messages()))
def test_a_committed_message_opens_to_the_committed_fields(name: str) -> None:
    vector = golden(f"message_{name}_v1")
    envelope = decode(bytes.fromhex(vector["hex"]))
    assert type(envelope.message).__name__ == vector["kind"]
    assert {field: plain(getattr(envelope.message, field)) for field in vector["fields"]} == vector["fields"]
    assert (envelope.swarm, envelope.sent_unix_s) == (vector["swarm"], vector["sent_unix_s"])
    assert (envelope.version, envelope.bulk.hex()) == (1, vector["bulk"])


def test_the_hex_in_the_documentation_is_the_committed_hex() -> None:
    """Every block marked `hex <file> <path.to.field>` holds that field of the golden file."""
    blocks = re.findall(r"```hex (\w+) ([\w.]+)\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    seen = set()
    for name, path, text in blocks:
        value = golden(name)
        for key in path.split("."):
            value = value[key]
        assert "".join(text.split()) == value, f"{name} {path}"
        seen.add(name)
    assert seen == {path.stem for path in GOLDEN.glob("*.json")}
