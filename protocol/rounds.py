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
from tscale.protocol.pool import claim_of
from tscale.protocol.records import Announcement, Manifest, SignedRecord, seal_record
from tscale.protocol.spread import Spread
from tscale.protocol.sync import Sync
from tscale.protocol.view import View, clamp

MAX_RANK = 6
GRACE_SLACK = 1.5
PATIENCE = 0.5  # of a round: how long a manifest may wait for its blobs before another one is sealed in its place


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
        self._delay: tuple[object, float] | None = None
        self._awaited: tuple[tuple[bytes, int], bytes] | None = None
        self._retry_at_s = 0.0  # a manifest of this peer's was refused

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
            if self.training:
                self.closed = round_  # what lies before was not trained for
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
        view.mark(event.blob.root, "contribution")
        view.transfers.add_complete(event.blob, event.hashes)
        if state is None or event.tokens <= 0 or self.sync.drift.loads:
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
        view.pool.settle(claim_of(record))
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
        if parent is None or parent.round >= round_ or not view.trains or self.sync.busy is not None:
            return None
        if not self.training or self.sync.drifted or (parent.digest, round_) in self.sealed:
            return None
        if view.now < self._retry_at_s or not view.chain.admits(view.own):
            return None
        late_s = view.swarm_now - view.times.closes_unix_s(round_)
        if late_s < self.grace_s() and self._awaits(parent, round_):
            return None
        wait_s = self._wait_for_others_s(parent, round_, late_s)
        if wait_s is None or late_s < wait_s + self._delay_s(parent, round_):
            return None
        if self.sync.drift.is_outvoted(parent, self.sync.states.get(parent.digest)):
            self.sync.check_head()
            return None
        taken = self._eligible(parent, round_)
        return self._publish(parent, round_, taken) if taken else None

    def _wait_for_others_s(self, parent: Link, round_: int, late_s: float) -> float | None:
        """How long after the close manifests of others are given before one is sealed beside them.

        None when it is not for this peer to seal: the round is sealed, or the swarm has moved to where it can't follow
        yet. A better manifest whose blobs stay away is passed over after a while; the candidates' order applies then.
        """
        view, target = self.view, self.sync.target()
        ahead = [c for c in parent.children if not c.invalid and c.round == round_]
        if any(self.sync.usables(child) for child in ahead):
            return None
        if target is not parent and target not in ahead and not self._is_followed(parent, round_):
            return None
        if not ahead:
            return 0.0
        seen_s = max(view.now - child.seen_s for child in ahead)
        patience_s = PATIENCE * view.spec.rounds.length_s
        return max(0.0, late_s - seen_s + patience_s - self.grace_s())

    def _is_followed(self, parent: Link, round_: int) -> bool:
        """Whether most living authors of the round trained from `parent`, which is not the best manifest known."""
        living = self.others() | {self.view.own}
        votes = [s.record.base == parent.digest for a, s in self.view.pool.of_round(round_).items() if a in living]
        return 2 * sum(votes) > len(votes)

    def _eligible(self, parent: Link, round_: int) -> list[SignedRecord[Announcement]]:
        view = self.view
        found = [*view.pool.of_round(round_).values(), *view.pool.of_round(round_ - 1).values()]
        good = [
            s
            for s in found
            if view.pool.is_good(s.record)
            and not view.chain.find_contribution_fault(s, parent, round_)
            and self._counts(s, parent)
            and self._agrees(s)
        ]
        good = self._without_copies(good, parent)
        if len(good) > 1:
            shared = [s for s in good if not view.spec.codec.rungs[s.record.rung].lone_only]
            good = shared or [s for s in good if s.public == view.own][:1] or good[:1]
        return self._by_turns(good, parent)

    def _without_copies(self, good: list[SignedRecord[Announcement]], parent: Link) -> list[SignedRecord[Announcement]]:
        """Of several announcements of one blob the author's, as far as that can be told: its maker knew it first.

        Contributors of the manifest before go first, then living trainers, then the one that came here first.
        """
        known, living = parent.authors | {self.view.own}, self.others()
        ways = {s.digest for s in good}
        found = []
        for root in dict.fromkeys(s.record.blob.root for s in good):
            named = [s for s in self.view.pool.naming(root) if s.digest in ways]
            found.append(min(named, key=lambda s: (s.public not in known, s.public not in living)))
        return found

    def _counts(self, signed: SignedRecord[Announcement], parent: Link) -> bool:
        return view_factor(self.view, signed, parent) > 0.0

    def _agrees(self, signed: SignedRecord[Announcement]) -> bool:
        """Whether it says the same as this peer of the state that it was trained from, if this peer knows that."""
        return self.sync.states.get(signed.record.base, signed.record.base_state) == signed.record.base_state

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
        key = (parent.digest, round_, self.view.pool.version, self.view.members.version(self.view.swarm_now))
        if self._delay is None or self._delay[0] != key:
            self._delay = (key, self._compute_delay_s(parent, round_))
        return self._delay[1]

    def awaits(self, root: bytes) -> bool:
        """Whether this blob may be the last one that the seal of the round waits for."""
        if self._awaited is None:
            return True
        return any(signed.public == self._awaited[1] for signed in self.view.pool.naming(root))

    def _awaits(self, parent: Link, round_: int) -> bool:
        """Whether a contribution that this peer expects is not here yet. Remembers one, so that a no is cheap."""
        view = self.view
        announced = view.pool.of_round(round_)

        def misses(author: bytes) -> bool:
            return author not in announced or not view.pool.is_good(announced[author].record)

        if self._awaited is not None and self._awaited[0] == (parent.digest, round_) and misses(self._awaited[1]):
            return True
        others = self.others()
        regulars = parent.authors if parent.signed is not None else others
        expected = {a for a in regulars if a in others or a == view.own}
        expected.update(a for a in announced if a in others or a == view.own)
        late = max((a for a in expected if misses(a)), default=None)
        self._awaited = ((parent.digest, round_), late) if late is not None else None
        return late is not None

    def _compute_delay_s(self, parent: Link, round_: int) -> float:
        view = self.view
        others = self.others()
        announced = view.pool.of_round(round_)
        # those that trained from another manifest are not at `parent`, and can't seal on it
        beside = {a for a, s in announced.items() if s.record.base == parent.digest and (a in others or a == view.own)}
        mine = candidate_order(parent, round_, view.own)
        if view.own in beside:
            rank = sum(candidate_order(parent, round_, a) < mine for a in beside if a != view.own)
        else:
            rank = len(beside)
        if rank == 0 and not self._awaits(parent, round_):
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
        why = self.sync.insert(signed)
        if why != "added":
            view.notice("seal_refused", round=round_, reason=why)
            self._retry_at_s = view.now + self.step_s()
            return None
        self.sealed.add((parent.digest, round_))
        self.spread.add_own(signed)
        return signed

    def sweep(self) -> None:
        """Forget which old rounds were sealed here."""
        if len(self.sealed) > 64:
            self.sealed = set(sorted(self.sealed, key=lambda key: key[1])[-32:])


def view_factor(view: View, signed: SignedRecord[Announcement], parent: Link) -> float:
    """The weight factor of a contribution by the age of its base."""
    return 1.0 if signed.record.base == parent.digest else view.spec.outer.age_factor
