"""The requests and replies between peers: a small header in canonical msgpack, then at most one chunk of raw bytes.

Frame: header length (4 bytes, little-endian), header, bulk. The transport authenticates who sent it. Every reply
carries the answering peer's raw clock, from which the asking peer estimates its offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tscale.protocol.canonical import pack_trusted, unpack
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.hashing import CHUNK_BYTES, HASH_BYTES
from tscale.protocol.records import MANIFEST_MAX_BYTES
from tscale.protocol.spec import MAX_SPEC_BYTES
from tscale.protocol.versions import WIRE_VERSION

MAX_HEADER_BYTES = 1 << 20
MAX_FRAME_BYTES = 4 + MAX_HEADER_BYTES + CHUNK_BYTES
ID_BYTES = 8  # short ids name a record or blob in a digest of what a peer knows
MAX_IDS = 8192
MAX_RECORDS = 512
MAX_LOCATOR = 64
MAX_ROOTS = 64
MAX_CHUNK_HASHES = 16384
MAX_REASON_CHARS = 200
RECORDS_BUDGET_BYTES = 600 * 1024  # of records in one message; the rest waits for the next exchange
MAX_UNIX_S = 1e11  # as in records
MAX_SWARM_CHARS = 80


@dataclass(frozen=True)
class Gossip:
    """What the sender knows: short ids of its live records, and of the blobs it can serve."""

    known: bytes
    have: bytes


@dataclass(frozen=True)
class GossipReply:
    """Records that the asker lacks, short ids of those the answerer lacks, and what it can serve."""

    want: bytes
    have: bytes
    records: tuple[bytes, ...]


@dataclass(frozen=True)
class Push:
    """New records, sent without being asked for."""

    records: tuple[bytes, ...]


@dataclass(frozen=True)
class GetChunk:
    """Ask for chunk `index` of a blob."""

    root: bytes
    index: int


@dataclass(frozen=True)
class ChunkReply:
    """One chunk; the bytes follow the header."""

    root: bytes
    index: int


@dataclass(frozen=True)
class GetHashes:
    """Ask for the chunk hashes of a blob."""

    root: bytes


@dataclass(frozen=True)
class HashesReply:
    """All chunk hashes of a blob, concatenated."""

    root: bytes
    hashes: bytes


@dataclass(frozen=True)
class GetBlobs:
    """Ask for several blobs of one chunk each: their roots, concatenated."""

    roots: bytes


@dataclass(frozen=True)
class BlobsReply:
    """Those of the asked blobs that are here; their bytes follow the header in the order of `roots`."""

    roots: bytes


@dataclass(frozen=True)
class PutChunk:
    """Push a chunk of the sender's own contribution; `record` is the announcement, `hashes` all chunk hashes."""

    record: bytes
    hashes: bytes
    index: int


@dataclass(frozen=True)
class GetChain:
    """Ask for manifests after the last one of `locator` that the answerer knows (newest first, thinning out)."""

    locator: tuple[bytes, ...]


@dataclass(frozen=True)
class ChainReply:
    """Signed manifests, oldest first. `floor` when they start at the oldest one the answerer keeps."""

    manifests: tuple[bytes, ...]
    floor: bool


@dataclass(frozen=True)
class GetSpec:
    """Ask for the swarm's spec; the asker checks it against the swarm id."""


@dataclass(frozen=True)
class SpecReply:
    """The spec's canonical bytes."""

    spec: bytes


@dataclass(frozen=True)
class Ack:
    """Taken (or already there)."""


@dataclass(frozen=True)
class Refused:
    """Not served, and why."""

    reason: str


Message = (
    Gossip
    | GossipReply
    | Push
    | GetChunk
    | ChunkReply
    | GetHashes
    | HashesReply
    | PutChunk
    | GetChain
    | ChainReply
    | GetSpec
    | SpecReply
    | Ack
    | Refused
    | GetBlobs
    | BlobsReply
)


@dataclass(frozen=True)
class Envelope:
    """A parsed frame: the sender's wire version, the swarm it speaks of, its raw clock, the message, and bulk bytes."""

    version: int
    swarm: str
    sent_unix_s: float
    message: Message
    bulk: bytes


_KINDS: dict[int, type[Any]] = {
    1: Gossip,
    2: GossipReply,
    3: Push,
    4: GetChunk,
    5: ChunkReply,
    6: GetHashes,
    7: HashesReply,
    8: PutChunk,
    9: GetChain,
    10: ChainReply,
    11: GetSpec,
    12: SpecReply,
    13: Ack,
    14: Refused,
    15: GetBlobs,
    16: BlobsReply,
}
_CODES = {cls: code for code, cls in _KINDS.items()}

_UNIT_BYTES = {"known": ID_BYTES, "have": ID_BYTES, "want": ID_BYTES, "hashes": HASH_BYTES, "roots": HASH_BYTES}
# field name -> (type, cap): bytes and text by length, tuples of bytes by (count, bytes each), ints by value
_CAPS: dict[str, tuple[type[Any], Any]] = {
    "known": (bytes, MAX_IDS * ID_BYTES),
    "have": (bytes, MAX_IDS * ID_BYTES),
    "want": (bytes, MAX_IDS * ID_BYTES),
    "records": (tuple, (MAX_RECORDS, MANIFEST_MAX_BYTES)),
    "manifests": (tuple, (MAX_RECORDS, MANIFEST_MAX_BYTES)),
    "locator": (tuple, (MAX_LOCATOR, HASH_BYTES)),
    "root": (bytes, HASH_BYTES),
    "roots": (bytes, MAX_ROOTS * HASH_BYTES),
    "hashes": (bytes, MAX_CHUNK_HASHES * HASH_BYTES),
    "record": (bytes, MANIFEST_MAX_BYTES),
    "index": (int, MAX_CHUNK_HASHES - 1),
    "floor": (bool, None),
    "spec": (bytes, MAX_SPEC_BYTES),
    "reason": (str, MAX_REASON_CHARS),
}


def encode(swarm: str, message: Message, sent_unix_s: float) -> bytes:
    """A frame without bulk bytes; `with_bulk` appends a chunk."""
    fields = tuple(getattr(message, name) for name in message.__dataclass_fields__)
    header = pack_trusted((WIRE_VERSION, swarm, _CODES[type(message)], float(sent_unix_s), fields))
    return len(header).to_bytes(4, "little") + header


def with_bulk(frame: bytes, chunk: bytes) -> bytes:
    """The frame with a chunk behind its header."""
    return frame + chunk


def decode(frame: bytes) -> Envelope:
    """Parse a frame. Raises RefuseFrame; no length in it is believed before it is checked against its cap."""
    if len(frame) < 4 or len(frame) > MAX_FRAME_BYTES:
        raise RefuseFrame(f"a frame of {len(frame)} bytes")
    header_bytes = int.from_bytes(frame[:4], "little")
    if header_bytes > MAX_HEADER_BYTES or header_bytes > len(frame) - 4:
        raise RefuseFrame("a frame's header is longer than the frame")
    head = unpack(bytes(frame[4 : 4 + header_bytes]), MAX_HEADER_BYTES)
    if not isinstance(head, tuple) or not head or type(head[0]) is not int:
        raise RefuseFrame("a frame's header starts with its wire version")
    if head[0] != WIRE_VERSION:
        raise RefuseFrame(f"wire version {head[0]} is not spoken here, only {WIRE_VERSION}")
    if len(head) != 5:
        raise RefuseFrame("a frame's header has five fields")
    version, swarm, code, sent_unix_s, fields = head
    if type(swarm) is not str or type(code) is not int or type(sent_unix_s) is not float:
        raise RefuseFrame("a frame's header has fields of the wrong type")
    if len(swarm) > MAX_SWARM_CHARS or not 0.0 <= sent_unix_s <= MAX_UNIX_S:
        raise RefuseFrame("a frame's header has a swarm or a time out of range")
    bulk = bytes(frame[4 + header_bytes :])
    return Envelope(version, swarm, sent_unix_s, _parse(code, fields, bulk), bulk)


def _parse(code: int, fields: Any, bulk: bytes) -> Message:
    cls = _KINDS.get(code)
    if cls is None:
        raise RefuseFrame(f"unknown message {code}")
    names = tuple(cls.__dataclass_fields__)
    if not isinstance(fields, tuple) or len(fields) != len(names):
        raise RefuseFrame(f"{cls.__name__} has {len(names)} fields")
    for name, value in zip(names, fields, strict=True):
        _check(name, value)
    if bulk and cls not in (ChunkReply, PutChunk, BlobsReply):
        raise RefuseFrame(f"{cls.__name__} carries no bulk bytes")
    if len(bulk) > CHUNK_BYTES:
        raise RefuseFrame("a chunk is larger than 1 MiB")
    message: Message = cls(*fields)
    return message


def _check(name: str, value: Any) -> None:
    kind, cap = _CAPS[name]
    if type(value) is not kind:
        raise RefuseFrame(f"{name} has the wrong type")
    if kind is int and not 0 <= value <= cap:
        raise RefuseFrame(f"{name} is out of range")
    if kind in (bytes, str) and len(value) > cap:
        raise RefuseFrame(f"{name} is too long")
    if name in _UNIT_BYTES and len(value) % _UNIT_BYTES[name]:
        raise RefuseFrame(f"{name} does not divide into items of {_UNIT_BYTES[name]} bytes")
    if name == "root" and len(value) != HASH_BYTES:
        raise RefuseFrame("a root has 32 bytes")
    if kind is tuple:
        count, each_bytes = cap
        if len(value) > count or any(type(item) is not bytes or len(item) > each_bytes for item in value):
            raise RefuseFrame(f"{name} has too many or too long items")


def split_ids(ids: bytes) -> set[bytes]:
    """The short ids in a concatenation. Raises RefuseFrame when it doesn't divide."""
    if len(ids) % ID_BYTES:
        raise RefuseFrame("short ids have 8 bytes each")
    return {ids[i : i + ID_BYTES] for i in range(0, len(ids), ID_BYTES)}


def split_hashes(hashes: bytes) -> tuple[bytes, ...]:
    """The chunk hashes in a concatenation. Raises RefuseFrame when it doesn't divide."""
    if len(hashes) % HASH_BYTES:
        raise RefuseFrame("chunk hashes have 32 bytes each")
    return tuple(hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES))
