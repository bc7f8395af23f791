"""What happens to a peer: the events its state machine takes. The driver makes them; they hold bytes and numbers."""

from __future__ import annotations

from dataclasses import dataclass

from tscale.protocol.effects import Claim
from tscale.protocol.hashing import BlobRef


@dataclass(frozen=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True)
class Replied:
    """A request was answered."""

    token: int
    payload: bytes


@dataclass(frozen=True)
class RequestFailed:
    """A request got no answer: not reachable, timed out, or refused below the protocol."""

    token: int
    reason: str


@dataclass(frozen=True)
class ContributionMade:
    """The worker compressed its progress of a round; the blob lies in the store."""

    round: int
    base: bytes
    blob: BlobRef
    hashes: tuple[bytes, ...]
    tokens: int
    steps: int
    loss: float
    rung: int


@dataclass(frozen=True)
class ContributionFailed:
    """The worker had nothing to send for a round, and why."""

    round: int
    reason: str


@dataclass(frozen=True)
class BlobVerified:
    """A contribution's blob was decoded and checked against the spec."""

    claim: Claim
    ok: bool
    reason: str


@dataclass(frozen=True)
class BlobMissing:
    """A blob that should lie in the store does not (any more)."""

    root: bytes


@dataclass(frozen=True)
class Folded:
    """The worker folded a manifest; `state` is the digest of the result. Which of its parts the screen left out or made
    smaller, by their place, is for the person only."""

    manifest: bytes
    state: bytes
    left_out: tuple[int, ...] = ()
    shrunk: tuple[int, ...] = ()


@dataclass(frozen=True)
class FoldFailed:
    """A fold could not be done. `invalid` when the manifest itself is at fault."""

    manifest: bytes
    reason: str
    invalid: bool


@dataclass(frozen=True)
class SnapshotReady:
    """The state after a manifest was written to the store."""

    manifest: bytes
    round: int
    state: bytes
    blob: BlobRef
    hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class SnapshotLoaded:
    """The worker took over a downloaded state; `state` is the digest it computed."""

    manifest: bytes
    state: bytes


@dataclass(frozen=True)
class SnapshotRefused:
    """A downloaded state could not be used."""

    manifest: bytes
    root: bytes
    reason: str


@dataclass(frozen=True)
class WorkerReady:
    """The worker started, at the state after `manifest` (the genesis digest for a fresh one)."""

    manifest: bytes
    state: bytes
    previous: bytes | None


@dataclass(frozen=True)
class WorkerDied:
    """The worker is gone; its state comes back with the next WorkerReady."""

    reason: str


@dataclass(frozen=True)
class Discovered:
    """Signed peer records found in the DHT or in the cache of the last run. Untrusted."""

    records: tuple[bytes, ...]


@dataclass(frozen=True)
class AddrsChanged:
    """This node's own addresses, as other peers can dial them."""

    addrs: tuple[str, ...]


@dataclass(frozen=True)
class Contacts:
    """Peers named by the user or found on this machine: key and addresses."""

    peers: tuple[tuple[bytes, tuple[str, ...]], ...]


@dataclass(frozen=True)
class TrainingAllowed:
    """The person (or a limit) allows or forbids training."""

    allowed: bool
    reason: str


@dataclass(frozen=True)
class Leaving:
    """The node is about to stop: say goodbye."""


Event = (
    Tick
    | Replied
    | RequestFailed
    | ContributionMade
    | ContributionFailed
    | BlobVerified
    | BlobMissing
    | Folded
    | FoldFailed
    | SnapshotReady
    | SnapshotLoaded
    | SnapshotRefused
    | WorkerReady
    | WorkerDied
    | Discovered
    | AddrsChanged
    | Contacts
    | TrainingAllowed
    | Leaving
)
