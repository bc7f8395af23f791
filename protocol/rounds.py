"""The life of a round: close the box, announce, and seal a manifest when it is this peer's turn.

Sealing needs no vote. Candidates are ordered by `candidate_order`; the first seals as soon as it holds what it expects,
at the latest at close + grace, and each later one a step after the one before, counting only those it believes alive.
"""

from __future__ import annotations

from collections import deque

from tscale.protocol.chain import Link, candidate_order
from tscale.protocol.effects import MakeContribution
from tscale.protocol.events import ContributionMade
from tscale.protocol.hashing import digest
from tscale.protocol.ladder import choose_rung
from tscale.protocol.records import Announcement, Manifest, SignedRecord, seal_record
from tscale.protocol.spread import Spread
from tscale.protocol.sync import Sync
from tscale.protocol.view import View, clamp

MAX_RANK = 6
GRACE_SLACK = 1.5
PATIENCE = 0.75  # of a round: how long a manifest may wait for its blobs before another one is sealed in its place


class Rounds:
    """Closing and sealing. `closed` is the last round this peer closed."""

    def __init__(self, view: View, spread: Spread, sync: Sync) -> None:
        self.view = view
        self.spread = spread
        self.sync = sync
        self.closed: int | None = None
        self.waiting = False
        self.sealed: set[tuple[bytes, int]] = set()
        self.lateness_s: deque[float] = deque(maxlen=12)
        self.training = False
        self.reason = ""

    def grace_s(self) -> float:
        """How long after the close the first candidate waits: what earlier rounds needed, within the spec."""
        spec = self.view.spec.rounds
        seen = max(self.lateness_s, default=spec.grace_max_s)
        return clamp(GRACE_SLACK * seen + self.view.pace.gossip_s, spec.grace_min_s, spec.grace_max_s)

    def step_s(self) -> float:
        """The wait between two candidates."""
        spec = self.view.spec.rounds
        return clamp(self.grace_s() / 2.0, spec.step_min_s, spec.step_max_s)

    def others(self) -> set[bytes]:
        """Living trainers besides this peer."""
        return self.view.members.alive_trainers(self.view.swarm_now)

    # -- close --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ask for this round's contribution when its box has closed."""
        view, head = self.view, self.sync.head
        round_ = view.times.round_at(view.swarm_now) - 1
        if self.closed is None:
            self.closed = round_  # the box that was open at the start was not trained from its beginning
            return
        if round_ <= self.closed or round_ < 0:
            return
        if not self.training or head is None or self.waiting or self.sync.drifted:
            return
        self.closed = round_
        self.waiting = True
        rung = choose_rung(view.spec, view.config.parameters, 1 + len(self.others()), view.config.upload_bps)
        view.emit(MakeContribution(round_, head.digest, rung))

    def on_contribution(self, event: ContributionMade) -> SignedRecord[Announcement] | None:
        """Announce a finished contribution. None when it is of no use any more."""
        view = self.view
        self.waiting = False
        state = self.sync.states.get(event.base)
        view.kinds[event.blob.root] = "contribution"
        view.transfers.add_complete(event.blob, event.hashes)
        if state is None or event.tokens <= 0 or self.sync.drifted:
            return None
        tokens = min(event.tokens, view.spec.caps.max_contribution_tokens)
        record = Announcement(
            swarm=view.spec.swarm_id,
            round=event.round,
            base=event.base,
            base_state=state,
            blob=event.blob,
            tokens=tokens,
            steps=event.steps,
            loss=event.loss,
            rung=event.rung,
        )
        signed = seal_record(view.config.identity, record)
        if not view.pool.add(signed):
            return None
        view.pool.verified.add(event.blob.root)
        self.spread.add_own(signed)
        return signed

    # -- seal ---------------------------------------------------------------------------------------------------

    def note_arrival(self, signed: SignedRecord[Announcement]) -> None:
        """Another peer's contribution is here and good: how late after the close?"""
        late_s = self.view.swarm_now - self.view.times.closes_unix_s(signed.record.round)
        if 0.0 <= late_s <= self.view.spec.rounds.length_s:
            self.lateness_s.append(late_s)

    def seal(self) -> SignedRecord[Manifest] | None:
        """Seal the last closed round if it is this peer's turn."""
        view, parent = self.view, self.sync.head
        round_ = view.times.round_at(view.swarm_now) - 1
        if parent is None or not view.trains or self.sync.busy is not None or self.sync.drifted:
            return None
        if parent.round >= round_ or (parent.digest, round_) in self.sealed or not self.sync.joined():
            return None
        if not view.chain.admits(view.own):
            return None
        late_s = view.swarm_now - view.times.closes_unix_s(round_)
        if self._is_sealed(parent, round_, late_s) or late_s < self._delay_s(parent, round_):
            return None
        taken = self._eligible(parent, round_)
        return self._publish(parent, round_, taken) if taken else None

    def _is_sealed(self, parent: Link, round_: int, late_s: float) -> bool:
        """Whether someone sealed the round already. A manifest whose blobs stay away is passed over after a while."""
        patience_s = PATIENCE * self.view.spec.rounds.length_s
        for child in parent.children:
            if not child.invalid and child.round == round_ and (self.sync.usable(child) or late_s < patience_s):
                return True
        return False

    def _eligible(self, parent: Link, round_: int) -> list[SignedRecord[Announcement]]:
        view = self.view
        found = [*view.pool.of_round(round_).values(), *view.pool.of_round(round_ - 1).values()]
        good = [
            s
            for s in found
            if s.record.blob.root in view.pool.verified
            and not view.chain.find_contribution_fault(s, parent, round_)
            and self._counts(s, parent)
        ]
        if len(good) > 1:
            shared = [s for s in good if not view.spec.codec.rungs[s.record.rung].lone_only]
            good = shared or [s for s in good if s.public == view.own][:1] or good[:1]
        return self._by_turns(good, parent)

    def _counts(self, signed: SignedRecord[Announcement], parent: Link) -> bool:
        return view_factor(self.view, signed, parent) > 0.0

    def _by_turns(self, good: list[SignedRecord[Announcement]], parent: Link) -> list[SignedRecord[Announcement]]:
        """At most the spec's cap: those whose author was not taken for longest first, then by hash."""
        cap = self.view.spec.rounds.max_contributions
        if len(good) > cap:
            last: dict[bytes, int] = {}
            here: Link | None = parent
            while here is not None and here.signed is not None and parent.depth - here.depth < 64:
                for author in here.authors:
                    last.setdefault(author, here.round)
                here = here.parent
            good = sorted(good, key=lambda s: (last.get(s.public, -1), digest("turn", parent.digest, s.digest)))[:cap]
        return sorted(good, key=lambda s: (s.public, s.record.round))

    def _delay_s(self, parent: Link, round_: int) -> float:
        """How long after the close this peer seals; 0 when everybody it expects is there and it is the first."""
        view = self.view
        others = self.others()
        announced = view.pool.of_round(round_)
        living = {a for a in announced if a in others or a == view.own}
        mine = candidate_order(parent, round_, view.own)
        if view.own in living:
            rank = sum(candidate_order(parent, round_, a) < mine for a in living if a != view.own)
        else:
            rank = len(living)
        if rank == 0:
            regulars = parent.authors if parent.signed is not None else frozenset(others)
            expected = (regulars & (others | {view.own})) | living
            good = view.pool.verified
            if all(a in announced and announced[a].record.blob.root in good for a in expected):
                return 0.0
        return self.grace_s() + min(rank, MAX_RANK) * self.step_s()

    def _publish(
        self, parent: Link, round_: int, taken: list[SignedRecord[Announcement]]
    ) -> SignedRecord[Manifest] | None:
        view = self.view
        state = self.sync.states.get(parent.digest)
        if state is None:
            return None
        record = Manifest(
            swarm=view.spec.swarm_id,
            round=round_,
            parent=parent.digest,
            parent_state=state,
            total_tokens=parent.total + sum(s.record.tokens for s in taken),
            contributions=tuple(s.bytes for s in taken),
        )
        signed = seal_record(view.config.identity, record)
        self.sealed.add((parent.digest, round_))
        why = self.sync.insert(signed)
        if why != "added":
            view.notice("seal_refused", round=round_, reason=why)
            self.sync.check_head()
            return None
        self.spread.add_own(signed)
        return signed

    def sweep(self) -> None:
        """Forget which old rounds were sealed here."""
        if len(self.sealed) > 64:
            self.sealed = set(sorted(self.sealed, key=lambda key: key[1])[-32:])


def view_factor(view: View, signed: SignedRecord[Announcement], parent: Link) -> float:
    """The weight factor of a contribution by the age of its base."""
    return 1.0 if signed.record.base == parent.digest else view.spec.outer.age_factor
