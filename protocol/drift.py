"""Whether this peer's state after a manifest is the one that the others vouch for, and what it does when it is not.

A peer that has drifted trains no more and fetches the state of the majority. When nobody offers that state for some
rounds, the claims may be false: the peer folds its head once more, from the state before it, and goes on with what
comes out. It listens to such claims again after a while, which doubles each time, since a peer that has really drifted
is offered a snapshot every few rounds.
"""

from __future__ import annotations

from tscale.protocol.chain import Link, majority_state
from tscale.protocol.records import Announcement, SignedRecord
from tscale.protocol.view import View

MAX_DOUBLINGS = 6


def find_majority(view: View, link: Link) -> bytes | None:
    """The state digest after `link` that most tokens vouch for, or else the sealers of the manifests on it.

    Only authors that the chain has taken lately are heard, and only with a contribution that is here and good: a
    claim costs nothing. This peer's own contribution counts like any other. None when nobody else says anything, or
    when only one peer does and its key is the higher one: then it gives way.
    """
    votes = _list_votes(view, link)
    others = [s for s in votes if s.public != view.own]
    if len(others) == 1:
        return None if view.own < others[0].public else others[0].record.base_state
    majority = majority_state(tuple(votes), link.digest) if others else None
    if majority is None:
        heard = _list_sealed(view, link)
        best = min(heard, key=lambda c: (-c.tokens, c.order)) if heard else None
        return best.signed.record.parent_state if best is not None and best.signed is not None else None
    return majority


def is_contradicted(view: View, link: Link, mine: bytes) -> bool:
    """Whether anybody who is heard vouches for another state after `link` than `mine`."""
    sealed = {c.signed.record.parent_state for c in _list_sealed(view, link) if c.signed is not None}
    return any(state != mine for state in sealed | {s.record.base_state for s in _list_votes(view, link)})


def _regulars(link: Link) -> frozenset[bytes]:
    return link.authors | (link.parent.authors if link.parent is not None else frozenset())


def _list_votes(view: View, link: Link) -> list[SignedRecord[Announcement]]:
    regulars = _regulars(link)
    heard = [s for s in view.pool.with_base(link.digest) if view.pool.is_good(s.record)]
    return [s for s in heard if not regulars or s.public in regulars or s.public == view.own]


def _list_sealed(view: View, link: Link) -> list[Link]:
    regulars = _regulars(link)
    return [c for c in link.children if c.signed is not None and not c.invalid and c.signed.public in regulars]


class Drift:
    """Whether this peer believes that it has drifted, and until when it doesn't listen to such claims."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.drifted = False
        self.foreign = False  # the worker holds a state that nobody vouches for, not the one after the head
        self._waited_since_s = 0.0
        self._deaf_until_s = 0.0
        self._insisted = 0

    @property
    def patience_s(self) -> float:
        """How long the majority's state is waited for: every peer offers one each `snapshot_every` rounds."""
        rounds = self.view.spec.rounds
        return (rounds.snapshot_every + 2.0) * rounds.length_s

    def check(self, link: Link, mine: bytes | None) -> None:
        """Compare this peer's digest with the one most tokens vouch for."""
        if mine is None or self.view.now < self._deaf_until_s:
            return
        majority = find_majority(self.view, link)
        if majority is None or majority == mine:
            return
        self.start()
        self.view.notice("drifted", round=link.round, mine=mine.hex()[:12], majority=majority.hex()[:12])

    def start(self, foreign: bool = False) -> None:
        """This peer's state is not what it should be."""
        if not self.drifted:
            self._waited_since_s = self.view.now
        self.drifted, self.foreign = True, foreign

    def repaired(self) -> None:
        """A state that the chain vouches for was taken over."""
        self.drifted = self.foreign = False
        self._insisted = 0
        self._deaf_until_s = 0.0

    def reset(self) -> None:
        """A new worker starts from its checkpoint."""
        self.drifted = self.foreign = False

    def note_progress(self, moved_s: float) -> None:
        """A chunk of the majority's state came at this local time."""
        self._waited_since_s = max(self._waited_since_s, moved_s)

    @property
    def has_waited(self) -> bool:
        """Whether nobody has offered the majority's state for long."""
        return self.drifted and self.view.now - self._waited_since_s > self.patience_s

    def look_again(self, link: Link, mine: bytes | None) -> None:
        """Nobody may vouch for another state any more, or most tokens for this one."""
        if not self.drifted or self.foreign or mine is None:
            return
        if find_majority(self.view, link) == mine or not is_contradicted(self.view, link, mine):
            self.drifted = False
            self.view.notice("not_drifted", round=link.round)

    def folded_again(self, link: Link, mine: bytes) -> None:
        """The head was folded once more: that may have repaired the state. If not, go on with it all the same."""
        if find_majority(self.view, link) == mine or not is_contradicted(self.view, link, mine):
            self.repaired()
            self.view.notice("repaired", round=link.round)
        else:
            self.insist(link)

    def insist(self, link: Link) -> None:
        """The head was folded again, or can't be: go on with what this peer has, and don't listen for a while."""
        self.drifted = False
        pause_s = self.patience_s * 2 ** min(self._insisted, MAX_DOUBLINGS)
        self._insisted += 1
        self._deaf_until_s = self.view.now + pause_s
        self.view.notice("goes_on_with_own_state", round=link.round, reason="nobody offers the state others vouch for")
