"""The status board: builds the one status snapshot of a node from its state machine, its worker and its transport."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from tscale.node.screening import Screening
from tscale.node.transport.base import Transport
from tscale.node.worker.messages import Evaluated, Progress, Ready
from tscale.protocol.chain import Link
from tscale.protocol.identity import peer_id
from tscale.protocol.peer import PeerMachine
from tscale.protocol.status import (
    MAX_HISTORY,
    STATUS_SCHEMA,
    CreditStatus,
    LossPoint,
    ModelStatus,
    NodeStatus,
    PeerStatus,
    RoundStatus,
    StatusSnapshot,
    TrainingStatus,
    TransferStatus,
)

MAX_SHOWN_PEERS = 512
MAX_SHOWN_STRANGERS = 8  # peers that this one was only told of: anybody can invent them
RATE_WINDOW_S = 10.0
SLOW_UPLINK = "the uplink is too slow to contribute: `tscale-node status` has the figures"


def own_version() -> str:
    """The installed version of this program."""
    try:
        return version("tscale-node")
    except PackageNotFoundError:
        return "unknown"


@dataclass
class Credits:
    """Tokens accepted into the followed chain, by author. Follows the head, also over a fork of some rounds."""

    tokens: dict[bytes, int] = field(default_factory=dict)
    counts: dict[bytes, int] = field(default_factory=dict)
    tail: deque[Link] = field(default_factory=lambda: deque(maxlen=256))

    def follow(self, head: Link) -> None:
        """Move the tally to a new head."""
        if self.tail and self.tail[-1] is head:
            return
        path: list[Link] = []
        known = {link.digest for link in self.tail}
        here: Link | None = head
        while here is not None and here.signed is not None and here.digest not in known:
            path.append(here)
            here = here.parent
        meet = here.digest if here is not None else b""
        while self.tail and self.tail[-1].digest != meet:
            self._add(self.tail.pop(), -1)
        for link in reversed(path):
            self._add(link, 1)
            self.tail.append(link)

    def _add(self, link: Link, sign: int) -> None:
        for part in link.signed.contributions if link.signed else ():
            self.tokens[part.public] = self.tokens.get(part.public, 0) + sign * part.record.tokens
            self.counts[part.public] = self.counts.get(part.public, 0) + sign


@dataclass(frozen=True)
class BoardConfig:
    """What never changes while a node runs."""

    role: str
    name: str
    state_dir: str
    parameters: int
    model_kind: str


class Board:
    """Collects what the parts say and renders it. Reading it changes nothing."""

    def __init__(self, config: BoardConfig, machine: PeerMachine, transport: Transport, screening: Screening) -> None:
        self.config = config
        self.screening = screening
        self.machine = machine
        self.transport = transport
        self.credits = Credits()
        self.progress: Progress | None = None
        self.heldout: dict[int, float] = {}
        self.history: deque[LossPoint] = deque(maxlen=MAX_HISTORY)
        self.warnings: tuple[str, ...] = ()
        self.phase = ""  # "stopping" and "stopped" win over everything else
        self.trouble = ""
        self.started_unix_s = time.time()
        self._rates: deque[tuple[float, int, int]] = deque()
        self._announced: dict[int, None] = {}
        self._missed = 0
        self._own_bytes = 0
        self._own_rung = ""
        self.device = self.precision = ""
        self._last_round = -1

    # -- news ---------------------------------------------------------------------------------------------------

    def on_ready(self, ready: Ready) -> None:
        """A worker has its state; the counters of the one before it are over."""
        self.progress = None
        self.trouble = ""
        self.device, self.precision = ready.device, ready.precision
        self.warnings = tuple(line for line in (ready.device_warning, ready.precision_warning) if line)

    def on_trouble(self, reason: str) -> None:
        """There is no worker at the moment, and why."""
        self.progress = None
        self.trouble = reason

    def on_progress(self, progress: Progress) -> None:
        """The worker's counters."""
        self.progress = progress

    def on_evaluated(self, event: Evaluated) -> None:
        """A held-out loss of the state after a round."""
        self.heldout[event.round] = event.loss
        while len(self.heldout) > MAX_HISTORY:
            del self.heldout[next(iter(self.heldout))]
        for i, point in enumerate(self.history):
            if point.round == event.round:
                self.history[i] = LossPoint(point.round, point.tokens_total, point.loss_train, event.loss)

    def _note_head(self, head: Link) -> None:
        """The head moved: extend the loss curve and the credit."""
        self.credits.follow(head)
        if head.signed is None or head.round <= self._last_round:
            return
        self._extend_history(head)
        self._last_round = head.round
        own = self.machine.view.own
        for round_, authors in self.machine.view.pool.by_round.items():
            if own in authors:
                self._announced.setdefault(round_)
                self._own_bytes = authors[own].record.blob.size_bytes
                self._own_rung = self.machine.view.spec.codec.rungs[authors[own].record.rung].name
        for round_ in [r for r in self._announced if r < head.round - 1]:
            del self._announced[round_]
            here: Link | None = head
            while here is not None and here.round >= round_ and (own, round_) not in here.taken:
                here = here.parent
            if here is None or here.round < round_:
                self._missed += 1

    def _extend_history(self, head: Link) -> None:
        """Points for all rounds since the last head: a joiner's curve begins where the chain it knows begins."""
        new: list[Link] = []
        here: Link | None = head
        while here is not None and here.signed is not None and here.round > self._last_round:
            new.append(here)
            here = here.parent
        for link in reversed(new):
            parts = link.signed.contributions if link.signed else ()
            tokens = sum(p.record.tokens for p in parts)
            loss = sum(p.record.loss * p.record.tokens for p in parts) / tokens if tokens else None
            self.history.append(LossPoint(link.round, link.total, loss, self.heldout.get(link.round)))

    # -- rendering ----------------------------------------------------------------------------------------------

    def snapshot(self, now_unix_s: float) -> StatusSnapshot:
        """The node at this moment."""
        view = self.machine.view
        head = self.machine.head
        if head is not None:
            self._note_head(head)
        activity, reason = self._activity()
        return StatusSnapshot(
            schema=STATUS_SCHEMA,
            updated_unix_s=now_unix_s,
            swarm_id=view.spec.swarm_id,
            swarm_name=view.spec.name,
            node=NodeStatus(
                peer_id=peer_id(view.own),
                role=self.config.role,
                version=own_version(),
                pid=os.getpid(),
                started_unix_s=self.started_unix_s,
                addrs=tuple(self.transport.own_addrs()),
                state_dir=self.config.state_dir,
            ),
            activity=activity,
            reason=reason,
            round=self._round(head, view.clock.swarm_unix_s(now_unix_s)),
            training=self._training(head),
            peers=self._peers(view.clock.swarm_unix_s(now_unix_s)),
            transfer=self._transfer(now_unix_s),
            model=ModelStatus(self.config.model_kind, self.config.parameters),
            credit=self._credit(),
            screen=self.screening.status(),
            warnings=self._all_warnings(),
        )

    def _activity(self) -> tuple[str, str]:
        rounds, view = self.machine.rounds, self.machine.view
        if self.phase:
            return self.phase, "saving a checkpoint" if self.phase == "stopping" and view.trains else ""
        head = self.machine.head
        # a worker that trains goes on with a dataset that is lost on the disk
        if any(not view.holds(shard.root) for shard in view.spec.data.shards) and not (view.trains and head):
            return "joining", "fetching the dataset"
        if not view.trains:
            return "serving", ""
        if head is None:
            return "starting", self.trouble or "the worker is starting"
        if not rounds.training:
            paused = not self.machine.allowed[0]
            return ("paused" if paused else "joining"), rounds.reason
        if rounds.others():
            late = self.machine.fetching.undelivered_bytes
            return "training", SLOW_UPLINK if late else ""
        return "alone", self._alone_reason()

    def _alone_reason(self) -> str:
        seeds = self.transport.seeds_status()
        down = sum(not seed.reachable for seed in seeds)
        if down:
            return f"no other peer is there; seeds unreachable ({down}/{len(seeds)})"
        return "no other peer is there yet"

    def _round(self, head: Link | None, swarm_now: float) -> RoundStatus:
        view = self.machine.view
        number = view.times.round_at(swarm_now)
        folded = head is not None and head.signed is not None
        state = self.machine.sync.states.get(head.digest, b"") if head is not None else b""
        return RoundStatus(
            number=number,
            ends_unix_s=view.times.closes_unix_s(number) - view.clock.offset_s,
            length_s=view.times.length_s,
            folded_round=head.round if head is not None and folded else -1,
            head=head.digest.hex() if head is not None and folded else "",
            state_digest=state.hex() if folded else "",
            contributors=len(head.authors) if head is not None else 0,
        )

    def _training(self, head: Link | None) -> TrainingStatus:
        progress = self.progress
        # of a folded state only: the initial model's loss beside the training loss would look like a fault
        heldout = next((p.loss_heldout for p in reversed(self.history) if p.loss_heldout is not None), None)
        return TrainingStatus(
            tokens_local=progress.tokens if progress else 0,
            tokens_total=head.total if head is not None else 0,
            tokens_per_s=progress.tokens_per_s if progress else 0.0,
            steps=progress.steps if progress else 0,
            loss_train=progress.loss if progress else None,
            loss_heldout=heldout,
            utilisation=min(1.0, progress.training_s / progress.wall_s) if progress and progress.wall_s > 0 else None,
            device=self.device,
            precision=self.precision,
            history=tuple(self.history),
        )

    def _peers(self, swarm_now: float) -> tuple[PeerStatus, ...]:
        view = self.machine.view
        tokens = self.credits.tokens
        me = PeerStatus(
            peer_id(view.own),
            view.config.name,
            view.config.role,
            True,
            0.0,
            own_version(),
            tokens.get(view.own, 0),
            True,
        )
        others: list[PeerStatus] = []
        strangers = 0
        for contact in view.members.contacts.values():
            record = contact.record
            if record is None:
                continue
            if view.members.is_stranger(contact.public, swarm_now) and contact.heard_unix_s == 0.0:
                strangers += 1
                if strangers > MAX_SHOWN_STRANGERS:
                    continue
            seen = max(contact.heard_unix_s, min(record.issued_unix_s, swarm_now))
            others.append(
                PeerStatus(
                    peer_id=peer_id(contact.public),
                    name=record.name,
                    role=record.role,
                    alive=view.members.is_alive(contact, swarm_now),
                    last_seen_s=max(0.0, swarm_now - seen),
                    version=f"wire {record.wire_max}",
                    tokens=tokens.get(contact.public, 0),
                    this_node=False,
                )
            )
        others.sort(key=lambda p: (not p.alive, p.last_seen_s if not p.alive else 0.0, p.peer_id))
        return (me, *others[: MAX_SHOWN_PEERS - 1])

    def _transfer(self, now_unix_s: float) -> TransferStatus:
        up, down = self.transport.up_bytes, self.transport.down_bytes
        self._rates.append((now_unix_s, up, down))
        while len(self._rates) > 2 and self._rates[0][0] < now_unix_s - RATE_WINDOW_S:
            self._rates.popleft()
        since, up0, down0 = self._rates[0]
        span_s = max(now_unix_s - since, 1e-3) if len(self._rates) > 1 else 1.0
        bits = 8.0 * self._own_bytes / self.config.parameters if self.config.parameters else 0.0
        return TransferStatus(
            up_bytes=up,
            down_bytes=down,
            up_bps=8.0 * (up - up0) / span_s,
            down_bps=8.0 * (down - down0) / span_s,
            contribution_bytes=self._own_bytes,
            bits_per_parameter=bits,
            rung=self._own_rung,
        )

    def _credit(self) -> CreditStatus:
        own = self.machine.view.own
        missed = "its last contribution missed both manifests it could have been in" if self._missed else ""
        return CreditStatus(
            tokens_accepted=self.credits.tokens.get(own, 0),
            contributions_accepted=self.credits.counts.get(own, 0),
            contributions_missed=self._missed,
            last_reason=missed,
        )

    def _all_warnings(self) -> tuple[str, ...]:
        found = (self._uplink_warning(), self.machine.view.clock.warning(), self.screening.warning())
        return (*self.warnings, *(line for line in found if line))

    def _uplink_warning(self) -> str | None:
        late_bytes, uplink = self.machine.fetching.undelivered_bytes, self.machine.spread.uplink
        if not late_bytes:
            return None
        had_s = min(uplink.timeout_s, self.machine.view.times.length_s)
        return (
            f"the uplink of {uplink.rate / 1000.0:.1f} kB/s is too slow for this swarm's rounds: a contribution of "
            f"{late_bytes / 1000.0:.1f} kB takes {uplink.bulk_s(late_bytes):.1f} s and has {had_s:.1f} s; this node "
            "follows the swarm, but what it trains does not count: raise network.upload_bytes_per_s if the link allows"
        )
