"""What a peer's state machine asks for: the effects the driver executes, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tscale.protocol.hashing import BlobRef


class Claim(NamedTuple):
    """What an announcement says of its blob, and what is checked as one: the size, and the rung it is coded at."""

    blob: BlobRef
    rung: int


@dataclass(frozen=True)
class ChunkSource:
    """A chunk of a stored blob that the driver appends to a frame."""

    root: bytes
    index: int


@dataclass(frozen=True)
class Request:
    """Send a frame and report `Replied` or `RequestFailed` with the token."""

    token: int
    peer: bytes
    payload: bytes
    timeout_s: float
    chunk: ChunkSource | None = None


@dataclass(frozen=True)
class Answer:
    """The reply to a peer's request; the driver appends the bytes of `chunks`, in this order."""

    payload: bytes
    chunks: tuple[ChunkSource, ...] = ()


@dataclass(frozen=True)
class StoreChunk:
    """Keep a verified chunk of a blob."""

    blob: BlobRef
    index: int
    data: bytes


@dataclass(frozen=True)
class CopyChunk:
    """Take a chunk of a blob from another one in the store: their hashes are equal."""

    blob: BlobRef
    index: int
    source: ChunkSource


@dataclass(frozen=True)
class DropBlob:
    """Forget a blob."""

    root: bytes


@dataclass(frozen=True)
class MakeContribution:
    """Close the round in the worker: compress its progress since the last close."""

    round: int
    base: bytes
    rung: int


@dataclass(frozen=True)
class VerifyBlob:
    """Decode a contribution and check it against the spec."""

    claim: Claim


@dataclass(frozen=True)
class Fold:
    """Apply a manifest to the state after `parent`. Parts are (blob root, share, gain) in the order of the authors'
    keys: see `chain.Part`."""

    manifest: bytes
    parent: bytes
    round: int
    total_tokens: int
    parts: tuple[tuple[bytes, float, float], ...]


@dataclass(frozen=True)
class WriteSnapshot:
    """Write the state after a manifest (the worker's head) to the store."""

    manifest: bytes
    round: int


@dataclass(frozen=True)
class LoadSnapshot:
    """Replace the worker's state by a downloaded one."""

    manifest: bytes
    root: bytes
    round: int
    total_tokens: int
    state: bytes


@dataclass(frozen=True)
class RestartFromGenesis:
    """The worker's state belongs to no known manifest: start it anew from the initial model."""

    reason: str


@dataclass(frozen=True)
class DatasetReady:
    """All shards of the dataset lie in the store: the worker can start."""


@dataclass(frozen=True)
class SetTraining:
    """Train, or hold still, and why."""

    on: bool
    reason: str


@dataclass(frozen=True)
class KeepRecord:
    """Remember a signed record (a manifest, an own snapshot record) over restarts."""

    digest: bytes
    record: bytes


@dataclass(frozen=True)
class LearnAddrs:
    """Where a peer says it can be dialled."""

    peer: bytes
    addrs: tuple[str, ...]


@dataclass(frozen=True)
class Publish:
    """Put this node's signed peer record into the DHT."""

    record: bytes
    expires_unix_s: float


@dataclass(frozen=True)
class Notice:
    """Something worth a log line: an event name and its fields. A decision carries its reason."""

    event: str
    fields: tuple[tuple[str, str | int | float], ...]


Effect = (
    Request
    | StoreChunk
    | CopyChunk
    | DropBlob
    | MakeContribution
    | VerifyBlob
    | Fold
    | WriteSnapshot
    | LoadSnapshot
    | SetTraining
    | KeepRecord
    | RestartFromGenesis
    | DatasetReady
    | LearnAddrs
    | Publish
    | Notice
)
