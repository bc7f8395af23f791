"""The golden wire vectors. `python -m tests.helpers.wire_vectors` writes the files that don't exist yet.

A change to the wire bumps its version and adds vectors under a new name; old files stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.message_samples import SENT_UNIX_S, sample_frame, sample_messages
from tests.helpers.protocol_samples import (
    ALICE,
    BOB,
    sample_announcement,
    sample_link,
    sample_manifest,
    sample_peer,
    sample_snapshot,
    sample_spec,
)
from tests.helpers.state_vectors import state_files
from tscale.protocol.hashing import CHUNK_BYTES, blob_ref, chunk_hashes
from tscale.protocol.links import format_link
from tscale.protocol.records import SignedRecord
from tscale.protocol.schema import JSON, to_plain

GOLDEN = Path(__file__).parent.parent / "golden" / "wire"


def vectors() -> dict[str, dict[str, Any]]:
    """File name without extension -> what the code writes today for the fixed samples."""
    records = (sample_peer(), sample_announcement(ALICE), sample_manifest(), sample_snapshot())
    found = {f"record_{signed.kind}_v1": _record(signed) for signed in records}
    spec = sample_spec()
    found["spec_v1"] = {
        "hex": spec.to_bytes().hex(),
        "digest": spec.digest.hex(),
        "swarm_id": spec.swarm_id,
        "link": format_link(sample_link()),
    }
    found["peer_id_v1"] = {
        name: {
            "secret": identity.key_file()[4:36].hex(),
            "public": identity.public.hex(),
            "peer_id": identity.peer_id,
            "key_file": identity.key_file().hex(),
        }
        for name, identity in (("alice", ALICE), ("bob", BOB))
    }
    found["blob_root_v1"] = {
        name: {
            "pattern_byte": byte,
            "size_bytes": size_bytes,
            "chunk_hashes": [item.hex() for item in chunk_hashes(bytes([byte]) * size_bytes)],
            "root": blob_ref(bytes([byte]) * size_bytes).root.hex(),
        }
        for name, byte, size_bytes in (("empty", 0, 0), ("short", 97, 3), ("long", 120, CHUNK_BYTES + 1))
    }
    found |= {f"message_{name}_v1": _message(name) for name in sample_messages()}
    return found


def _message(name: str) -> dict[str, Any]:
    message, bulk = sample_messages()[name]
    frame = sample_frame(name)
    return {
        "swarm": sample_spec().swarm_id,
        "sent_unix_s": SENT_UNIX_S,
        "kind": type(message).__name__,
        "fields": {field: plain(getattr(message, field)) for field in message.__dataclass_fields__},
        "bulk": bulk.hex(),
        "start": frame[:64].hex(),
        "hex": frame.hex(),
    }


def plain(value: Any) -> Any:
    """Bytes as hex, tuples as lists."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def _record(signed: SignedRecord[Any]) -> dict[str, Any]:
    return {
        "kind": signed.kind,
        "public": signed.public.hex(),
        "digest": signed.digest.hex(),
        "hex": signed.bytes.hex(),
        "fields": json.loads(json.dumps(to_plain(signed.record, JSON))),
    }


def write_missing() -> list[str]:
    """Write the vectors that have no file yet; their names."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in {**vectors(), **state_files()}.items():
        path = GOLDEN / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            written.append(name)
    return written


if __name__ == "__main__":
    print("\n".join(write_missing()) or "every vector has its file")
