"""What one peer knows: the state that the parts of its state machine share, and their way to ask for effects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tscale.protocol.chain import Chain
from tscale.protocol.clock import RoundTimes, SwarmClock
from tscale.protocol.dice import Dice
from tscale.protocol.effects import ChunkSource, Effect, Notice, Request
from tscale.protocol.hashing import BlobRef
from tscale.protocol.identity import Identity
from tscale.protocol.membership import Membership
from tscale.protocol.messages import Envelope, Message, encode
from tscale.protocol.pool import Pool
from tscale.protocol.records import SignedRecord, open_record
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.transfer import Transfers


def clamp(value: float, low: float, high: float) -> float:
    """`value` moved into [low, high]."""
    return max(low, min(high, value))


@dataclass(frozen=True)
class Pace:
    """Intervals and timeouts in seconds, all derived from the round's length: one knob, so that they nest."""

    gossip_s: float
    flush_s: float
    heartbeat_s: float
    timeout_s: float
    join_wait_s: float

    @classmethod
    def of(cls, length_s: float) -> Pace:
        """The pace of a swarm whose rounds take `length_s`."""
        gossip_s = clamp(length_s / 9.0, 0.15, 5.0)
        return cls(
            gossip_s=gossip_s,
            flush_s=gossip_s / 4.0,
            heartbeat_s=clamp(length_s * 0.75, 2.0, 30.0),
            timeout_s=clamp(length_s / 2.0, 2.0, 30.0),
            join_wait_s=clamp(length_s * 2.0, 5.0, 20.0),
        )


@dataclass(frozen=True)
class PeerConfig:
    """What a peer is started with. `parameters` is the model's size; `upload_bps` what its uplink may carry."""

    spec: SwarmSpec
    identity: Identity
    role: str
    seed: int
    name: str = ""
    parameters: int = 0
    upload_bps: float = 20e6
    open_record: Callable[..., SignedRecord[Any]] = open_record
    has_seeds: bool = False


@dataclass
class Pending:
    """A request on its way."""

    peer: bytes
    sent_unix_s: float
    done: Callable[[Envelope | None, str], None]


@dataclass
class View:
    """Shared by the parts of one peer's machine. `now` is local time, `swarm_now` the swarm's, set at every step."""

    config: PeerConfig
    pace: Pace
    clock: SwarmClock
    times: RoundTimes
    chain: Chain
    members: Membership
    pool: Pool
    transfers: Transfers
    dice: Dice
    now: float = 0.0
    swarm_now: float = 0.0
    effects: list[Effect] = field(default_factory=list)
    pending: dict[int, Pending] = field(default_factory=dict)
    dirty: bool = True  # something changed that may let a fold or a seal go ahead
    unchecked: bool = True  # a blob or a manifest came that may need verification
    fetch_due: bool = True  # a want, a holder or a free slot is new
    kinds: dict[bytes, str] = field(default_factory=dict)  # blob root -> contribution | snapshot | dataset
    _token: int = 0

    @classmethod
    def create(cls, config: PeerConfig) -> View:
        """The view of a peer that knows nothing yet."""
        rounds = config.spec.rounds
        pace = Pace.of(rounds.length_s)
        return cls(
            config=config,
            pace=pace,
            clock=SwarmClock(),
            times=RoundTimes(rounds.t0_unix_s, rounds.length_s),
            chain=Chain(config.spec),
            members=Membership(config.identity.public, pace.heartbeat_s),
            pool=Pool(),
            transfers=Transfers(patience_s=clamp(0.5 * pace.gossip_s, 0.3, 2.0), spin=config.identity.public[0]),
            dice=Dice(config.seed),
        )

    @property
    def spec(self) -> SwarmSpec:
        """The swarm's spec."""
        return self.config.spec

    @property
    def own(self) -> bytes:
        """This peer's public key."""
        return self.config.identity.public

    @property
    def trains(self) -> bool:
        """Whether this peer has a worker."""
        return self.config.role == "trainer"

    def set_now(self, now: float) -> None:
        """Take the driver's clock reading."""
        self.now = now
        self.swarm_now = self.clock.swarm_unix_s(now)

    def emit(self, effect: Effect) -> None:
        """Ask the driver for an effect."""
        self.effects.append(effect)

    def notice(self, event: str, **fields: str | int | float) -> None:
        """Ask for a log line."""
        self.effects.append(Notice(event, tuple(fields.items())))

    def frame(self, message: Message) -> bytes:
        """A message as bytes, with this peer's raw clock."""
        return encode(self.spec.swarm_id, message, self.now)

    def request(
        self,
        peer: bytes,
        message: Message,
        done: Callable[[Envelope | None, str], None],
        chunk: ChunkSource | None = None,
    ) -> None:
        """Send a request; `done(envelope, '')` or `done(None, reason)` is called in a later step."""
        self._token += 1
        self.pending[self._token] = Pending(peer, self.now, done)
        self.members.asked(peer, self.now)
        self.emit(Request(self._token, peer, self.frame(message), self.pace.timeout_s, chunk))

    def holds(self, root: bytes) -> bool:
        """Whether a blob lies whole in the store."""
        return root in self.transfers.complete

    def has(self, blob: BlobRef) -> bool:
        """Whether a blob lies whole in the store, and has this size."""
        found = self.transfers.complete.get(blob.root)
        return found is not None and found[0] == blob

    def mark(self, root: bytes, kind: str) -> None:
        """Say what a blob is. A shard of the dataset stays one, whoever else names it: it is not to be swept away."""
        if self.kinds.get(root) != "dataset":
            self.kinds[root] = kind

    def want(self, blob: BlobRef, kind: str, holder: bytes | None = None, is_new: bool = False) -> None:
        """Fetch a blob, unless it is here. Of one that is just announced, nobody can have said yet that it has it."""
        self.mark(blob.root, kind)
        known = blob in self.transfers.wants
        priority = {"snapshot": 0, "contribution": 1, "dataset": 2}[kind]
        want = self.transfers.want(blob, priority, self.now)
        if want is not None:
            if holder is not None and holder != self.own and holder not in want.holders:
                want.holders.add(holder)
                self.fetch_due = True
            if not known and not is_new:
                self.fetch_due = True
                short = blob.root[:8]
                want.holders.update(c.public for c in self.members.contacts.values() if short in c.have)
