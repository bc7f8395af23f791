"""The signed records of a swarm: peer record, announcement, manifest, snapshot record.

On the wire a record is the canonical array `[kind, body, public, signature]`; `body` is the canonical array of the
record's fields in the order of the class. The author is always the record's public key, never a field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tscale.protocol import identity as identities
from tscale.protocol.canonical import pack, unpack
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.fields import (
    Check,
    addr_list,
    blob_ref,
    byte_list,
    digest32,
    finite,
    flag,
    integer,
    one_of,
    peer_name,
    swarm_text,
)
from tscale.protocol.hashing import BlobRef, digest

MAX_ROUND = (1 << 40) - 1
MAX_TOKENS = (1 << 53) - 1
MAX_CONTRIBUTIONS = 1024
MAX_PEER_RECORD_S = 86_400.0
PEER_RECORD_MAX_BYTES = 3072
ANNOUNCEMENT_MAX_BYTES = 512
SNAPSHOT_MAX_BYTES = 512
MANIFEST_MAX_BYTES = 1024 + MAX_CONTRIBUTIONS * (ANNOUNCEMENT_MAX_BYTES + 3)
ROLES = ("trainer", "seed")

Verify = Callable[[bytes, str, bytes, bytes], bool]
"""`verify(public, domain, body, signature)`, as `identity.verify`; a caller may cache it."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """How to reach a peer, and that it takes part until `expires_unix_s`."""

    swarm: str
    role: str
    addrs: tuple[str, ...]
    name: str
    wire_min: int
    wire_max: int
    issued_unix_s: float
    expires_unix_s: float
    leaving: bool


@dataclass(frozen=True, slots=True)
class Announcement:
    """One contribution: what its author trained from (`base`, with the state digest), and the blob."""

    swarm: str
    round: int
    base: bytes
    base_state: bytes
    blob: BlobRef
    tokens: int
    steps: int
    loss: float
    rung: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contributions of one outer step: the full signed announcements, by increasing author key and round.

    `parent` is the digest of the manifest before, `parent_state` the sealer's state digest after it, and
    `total_tokens` counts from the start of the swarm, this manifest included.
    """

    swarm: str
    round: int
    parent: bytes
    parent_state: bytes
    total_tokens: int
    contributions: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """Where the complete state after `manifest` can be fetched."""

    swarm: str
    manifest: bytes
    round: int
    state: bytes
    blob: BlobRef


Record = PeerRecord | Announcement | Manifest | SnapshotRecord
R = TypeVar("R", bound=Record)
R_co = TypeVar("R_co", bound=Record, covariant=True)


@dataclass(frozen=True, slots=True)
class SignedRecord(Generic[R_co]):
    """A record whose size, schema and signature were checked.

    `digest` identifies it: BLAKE3 of kind, body and public key, not of the signature. `contributions` are the opened
    announcements of a manifest, empty for other kinds.
    """

    record: R_co
    kind: str
    digest: bytes
    public: bytes
    bytes: bytes = field(repr=False)
    contributions: tuple[SignedRecord[Announcement], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    build: type[Any]
    max_bytes: int
    checks: tuple[tuple[str, Check], ...]

    @property
    def domain(self) -> str:
        return "record/" + self.name


_KINDS: dict[str, _Kind] = {
    "peer": _Kind(
        "peer",
        PeerRecord,
        PEER_RECORD_MAX_BYTES,
        (
            ("swarm", swarm_text),
            ("role", one_of(ROLES)),
            ("addrs", addr_list(8)),
            ("name", peer_name),
            ("wire_min", integer(0, 65535)),
            ("wire_max", integer(0, 65535)),
            ("issued_unix_s", finite(0.0, 1e11)),
            ("expires_unix_s", finite(0.0, 1e11)),
            ("leaving", flag),
        ),
    ),
    "announcement": _Kind(
        "announcement",
        Announcement,
        ANNOUNCEMENT_MAX_BYTES,
        (
            ("swarm", swarm_text),
            ("round", integer(0, MAX_ROUND)),
            ("base", digest32),
            ("base_state", digest32),
            ("blob", blob_ref),
            ("tokens", integer(1, MAX_TOKENS)),
            ("steps", integer(1, MAX_TOKENS)),
            ("loss", finite(-1e6, 1e6)),
            ("rung", integer(0, 63)),
        ),
    ),
    "manifest": _Kind(
        "manifest",
        Manifest,
        MANIFEST_MAX_BYTES,
        (
            ("swarm", swarm_text),
            ("round", integer(0, MAX_ROUND)),
            ("parent", digest32),
            ("parent_state", digest32),
            ("total_tokens", integer(1, MAX_TOKENS)),
            ("contributions", byte_list(1, MAX_CONTRIBUTIONS, ANNOUNCEMENT_MAX_BYTES)),
        ),
    ),
    "snapshot": _Kind(
        "snapshot",
        SnapshotRecord,
        SNAPSHOT_MAX_BYTES,
        (
            ("swarm", swarm_text),
            ("manifest", digest32),
            ("round", integer(0, MAX_ROUND)),
            ("state", digest32),
            ("blob", blob_ref),
        ),
    ),
}
_KIND_OF: dict[type[Any], _Kind] = {kind.build: kind for kind in _KINDS.values()}


def record_digest(kind: str, body: bytes, public: bytes) -> bytes:
    """What identifies a record. 32 bytes."""
    return digest("record", kind.encode("ascii"), body, public)


def seal_record(identity: identities.Identity, record: R) -> SignedRecord[R]:
    """Sign a record. Raises RefuseFrame when a field is out of range: nobody would take it."""
    kind = _KIND_OF[type(record)]
    body = pack(_to_fields(kind, record))
    if _from_fields(kind, unpack(body, kind.max_bytes)) != record:
        raise RefuseFrame(f"a field of this {kind.name} record has the wrong type")
    data = pack((kind.name, body, identity.public, identity.sign(kind.domain, body)))
    _check_size(kind, data)
    inner = _open_contributions(record, identities.verify, None) if isinstance(record, Manifest) else ()
    _check_author(record, identity.public)
    key = record_digest(kind.name, body, identity.public)
    return SignedRecord(record, kind.name, key, identity.public, data, inner)


def open_record(
    data: bytes,
    kinds: tuple[type[R], ...],
    max_bytes: int | None = None,
    verify: Verify = identities.verify,
    known: Callable[[bytes], SignedRecord[Announcement] | None] | None = None,
) -> SignedRecord[R]:
    """Check the size, the schema and the signature of a record of one of these kinds, in this order.

    `max_bytes` lowers the cap of the kinds. A manifest's announcements are opened too; `known(bytes)` may return one
    that was opened before. Raises RefuseFrame for anything else.
    """
    allowed = [_KIND_OF[build] for build in kinds]
    cap = max(kind.max_bytes for kind in allowed)
    outer = unpack(data, cap if max_bytes is None else min(cap, max_bytes), 4)
    if type(outer) is not tuple or len(outer) != 4:
        raise RefuseFrame("a signed record is an array of kind, body, public key and signature")
    name, body, public, signature = outer
    kind = _KINDS.get(name) if type(name) is str else None
    if kind is None or kind not in allowed:
        raise RefuseFrame("not a record of the kind that is expected here")
    _check_size(kind, data)
    if type(body) is not bytes or type(public) is not bytes or type(signature) is not bytes:
        raise RefuseFrame(f"the {kind.name} record's envelope has a field of the wrong type")
    if len(public) != identities.PUBLIC_BYTES or len(signature) != identities.SIGNATURE_BYTES:
        raise RefuseFrame(f"the {kind.name} record's key or signature has the wrong length")
    record = _from_fields(kind, unpack(body, kind.max_bytes))
    _check_author(record, public)
    if not verify(public, kind.domain, body, signature):
        raise RefuseFrame(f"the {kind.name} record's signature is wrong")
    inner = _open_contributions(record, verify, known) if kind.build is Manifest else ()
    return SignedRecord(record, kind.name, record_digest(kind.name, body, public), public, data, inner)


def _check_size(kind: _Kind, data: bytes) -> None:
    if len(data) > kind.max_bytes:
        raise RefuseFrame(f"{len(data)} bytes are more than the {kind.max_bytes} of a {kind.name} record")


def _to_fields(kind: _Kind, record: Any) -> tuple[Any, ...]:
    values = (getattr(record, name) for name, _ in kind.checks)
    return tuple((item.root, item.size_bytes) if isinstance(item, BlobRef) else item for item in values)


def _from_fields(kind: _Kind, values: Any) -> Any:
    if type(values) is not tuple or len(values) != len(kind.checks):
        raise RefuseFrame(f"a {kind.name} record has {len(kind.checks)} fields")
    items = []
    for (name, check), value in zip(kind.checks, values, strict=True):
        result = check(value)
        if result is None:
            raise RefuseFrame(f"the {kind.name} record's field {name} is out of range or of the wrong type")
        items.append(result)
    return kind.build(*items)


def _check_author(record: Any, public: bytes) -> None:
    """The rules between fields of one record."""
    if isinstance(record, PeerRecord):
        if record.wire_min > record.wire_max:
            raise RefuseFrame("the peer record's version range is empty")
        if not 0.0 < record.expires_unix_s - record.issued_unix_s <= MAX_PEER_RECORD_S:
            raise RefuseFrame("the peer record expires before it was issued, or more than a day later")
        own = "/p2p/" + identities.peer_id(public) if any("/p2p/" in addr for addr in record.addrs) else ""
        if any("/p2p/" in addr and not addr.endswith(own) for addr in record.addrs):
            raise RefuseFrame("the peer record has an address of another peer")


def _open_contributions(
    manifest: Manifest,
    verify: Verify,
    known: Callable[[bytes], SignedRecord[Announcement] | None] | None,
) -> tuple[SignedRecord[Announcement], ...]:
    inner: list[SignedRecord[Announcement]] = []
    last: tuple[bytes, int] = (b"", -1)
    tokens = 0
    for data in manifest.contributions:
        part = known(data) if known is not None else None
        if part is None:
            part = open_record(data, (Announcement,), verify=verify)
        key = (part.public, part.record.round)
        if key <= last:
            raise RefuseFrame("the manifest's contributions are not sorted by author and round, one of each")
        if part.record.swarm != manifest.swarm or part.record.round > manifest.round:
            raise RefuseFrame("the manifest has a contribution of another swarm or of a later round")
        last, tokens = key, tokens + part.record.tokens
        inner.append(part)
    if tokens > manifest.total_tokens:
        raise RefuseFrame("the manifest's total of tokens is less than its contributions")
    return tuple(inner)
