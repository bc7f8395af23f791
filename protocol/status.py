"""The status snapshot: the one read-only view of a node that the CLI, the dashboard, metrics and tests read.

It holds no address of another peer, and nothing that lets a reader change the node.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tscale.protocol.errors import RefuseFrame
from tscale.protocol.fields import is_peer_name
from tscale.protocol.schema import JSON, from_plain, to_plain

STATUS_SCHEMA = 2
MAX_STATUS_BYTES = 4 << 20
MAX_HISTORY = 2000
MAX_STATUS_PEERS = 4096
ACTIVITIES = ("starting", "joining", "training", "alone", "paused", "serving", "stopping", "stopped")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The node itself. `addrs` are its own addresses, `state_dir` the folder it writes to."""

    peer_id: str
    role: str
    version: str
    pid: int
    started_unix_s: float
    addrs: tuple[str, ...]
    state_dir: str


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """The running round, and the last one that was folded: `head` is its manifest, `state_digest` the state after it
    (both hex, empty before the first fold), `contributors` how many took part in it."""

    number: int
    ends_unix_s: float
    length_s: float
    folded_round: int
    head: str
    state_digest: str
    contributors: int


@dataclass(frozen=True, slots=True)
class LossPoint:
    """One folded round on the loss curve, in nats per token."""

    round: int
    tokens_total: int
    loss_train: float | None
    loss_heldout: float | None


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """Local progress. `tokens_total` is the swarm's, `utilisation` the share of time spent in training steps; `device`
    and `precision` say where and in what number format it trains, and are empty before it does."""

    tokens_local: int
    tokens_total: int
    tokens_per_s: float
    steps: int
    loss_train: float | None
    loss_heldout: float | None
    utilisation: float | None
    device: str
    precision: str
    history: tuple[LossPoint, ...]


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """One peer as this node sees it. `last_seen_s` is an age; `tokens` were accepted into manifests."""

    peer_id: str
    name: str
    role: str
    alive: bool
    last_seen_s: float
    version: str
    tokens: int
    this_node: bool


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """Traffic since the start, the current rates, and what the last contribution cost."""

    up_bytes: int
    down_bytes: int
    up_bps: float
    down_bps: float
    contribution_bytes: int
    bits_per_parameter: float
    rung: str


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The model that is trained."""

    kind: str
    parameters: int


@dataclass(frozen=True, slots=True)
class CreditStatus:
    """What this node gave, and why its last contribution was missed (empty when it was taken)."""

    tokens_accepted: int
    contributions_accepted: int
    contributions_missed: int
    last_reason: str


@dataclass(frozen=True, slots=True)
class ScreenStatus:
    """Contributions, of whom ever, that this node's folds left out or made smaller since it started."""

    left_out: int
    shrunk: int


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """Everything a reader may know about a node at one moment. `reason` says why it does what it does."""

    schema: int
    updated_unix_s: float
    swarm_id: str
    swarm_name: str
    node: NodeStatus
    activity: str
    reason: str
    round: RoundStatus
    training: TrainingStatus
    peers: tuple[PeerStatus, ...]
    transfer: TransferStatus
    model: ModelStatus
    credit: CreditStatus
    screen: ScreenStatus
    warnings: tuple[str, ...]

    def to_json(self) -> str:
        """One line of JSON. Raises ValueError when a number is not finite."""
        return json.dumps(to_plain(self, JSON), ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> StatusSnapshot:
        """Parse strictly. Raises RefuseFrame for anything that is not a snapshot of this schema."""
        if len(text) > MAX_STATUS_BYTES:
            raise RefuseFrame(f"the status is longer than {MAX_STATUS_BYTES} bytes")
        try:
            plain = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise RefuseFrame(f"the status is not JSON: {type(error).__name__}") from error
        if type(plain) is dict and plain.get("schema") != STATUS_SCHEMA:
            what = f"another schema than {STATUS_SCHEMA}: start the node again in this program's version"
            raise RefuseFrame(f"the status has {what}")
        snapshot = from_plain(cls, plain, JSON)
        _check_limits(snapshot)
        return snapshot


def _refuse_constant(name: str) -> Any:
    raise RefuseFrame("the status has a number that is not finite")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise RefuseFrame("the status has the same key twice")
    return plain


def _check_limits(snapshot: StatusSnapshot) -> None:
    if snapshot.activity not in ACTIVITIES:
        raise RefuseFrame("the status has an unknown activity")
    if len(snapshot.training.history) > MAX_HISTORY or len(snapshot.peers) > MAX_STATUS_PEERS:
        raise RefuseFrame("the status has more history or peers than its schema allows")
    if not all(is_peer_name(peer.name) for peer in snapshot.peers):
        raise RefuseFrame("the status has a peer name that can't be shown")
