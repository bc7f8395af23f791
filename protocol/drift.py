"""Whether this peer's state after a manifest is the one that the others vouch for, and what it does when it is not.

Votes are counted by author: tokens are claims. A peer that is outvoted folds its head once more, from the state before
it. A fold gives the same bits every time, so if the state comes out as it was, whoever says something else is wrong or
lies: they are not heard for a while, which doubles each time. Only the state before the head may be broken too. So when
they say it again after that while, or the head can't be folded again, the peer fetches a state of the others: once, and
then not for a while, which also doubles.
"""

from __future__ import annotations

from tscale.protocol.chain import Link
from tscale.protocol.records import Announcement, SignedRecord
from tscale.protocol.view import View

MAX_DOUBLINGS = 6
MAX_REMEMBERED = 4096  # keys that are not heard
MAX_PROVEN = 16  # manifests


class Drift:
    """Whether this peer believes that it has drifted, and whom it doesn't hear until when."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.drifted = False
        self.foreign = False  # the worker holds a state that nobody vouches for, not the one after the head
        self.loads = False  # the head was folded again in vain: a state of the others is waited for
        self._waited_since_s = 0.0
        self._unheard: dict[bytes, tuple[float, int]] = {}  # key -> until when, how often before
        self._proven: dict[bytes, bytes] = {}  # manifest -> the state that came out twice
        self._insisted = 0
        self._tried = 0  # how often a state of the others was waited for
        self._load_from_s = 0.0

    # -- what the others say ------------------------------------------------------------------------------------

    def hears(self, public: bytes) -> bool:
        """Whether what a key says about states counts."""
        return self._unheard.get(public, (0.0, 0))[0] <= self.view.now

    def find_majority(self, link: Link) -> bytes | None:
        """The state digest after `link` that most authors vouch for, or else the sealers of the manifests on it.

        Only authors that the chain has taken lately are heard, and only with a contribution that is here and good.
        This peer's own contribution counts like any other. None when nobody else says anything, or when only one peer
        does and its key is the higher one: then it gives way.
        """
        votes = self._list_votes(link)
        own = self.view.own
        others = [s for author, s in votes.items() if author != own]
        if len(others) == 1:
            return None if own < others[0].public else others[0].record.base_state
        counts: dict[bytes, int] = {}
        for signed in votes.values() if others else ():
            counts[signed.record.base_state] = counts.get(signed.record.base_state, 0) + 1
        for state, count in counts.items():
            if 2 * count > len(votes):
                return state
        heard = self._list_sealed(link)
        best = min(heard, key=lambda c: (-c.tokens, c.order)) if heard else None
        return best.signed.record.parent_state if best is not None and best.signed is not None else None

    def is_outvoted(self, link: Link, mine: bytes | None) -> bool:
        """Whether the others vouch for another state after `link` than `mine`."""
        return mine is not None and self.find_majority(link) not in (None, mine)

    def _list_contradicting(self, link: Link, mine: bytes) -> set[bytes]:
        """Who is heard and vouches for another state after `link` than `mine`."""
        sealed = [c.signed for c in self._list_sealed(link) if c.signed is not None]
        found = {signed.public for signed in sealed if signed.record.parent_state != mine}
        votes = self._list_votes(link)
        return found | {a for a, s in votes.items() if a != self.view.own and s.record.base_state != mine}

    def _list_votes(self, link: Link) -> dict[bytes, SignedRecord[Announcement]]:
        """Author -> its last good contribution from `link`."""
        view, regulars = self.view, _regulars(link)
        said = [s for s in view.pool.with_base(link.digest) if view.pool.is_good(s.record)]
        said.sort(key=lambda s: s.record.round)
        heard = [s for s in said if s.public == view.own or not regulars or s.public in regulars]
        return {s.public: s for s in heard if self.hears(s.public)}

    def _list_sealed(self, link: Link) -> list[Link]:
        regulars = _regulars(link)
        made = [c for c in link.children if c.signed is not None and not c.invalid and c.signed.public in regulars]
        return [c for c in made if c.signed is not None and self.hears(c.signed.public)]

    # -- drifting -----------------------------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """How long a state of the others is waited for: every peer offers one each `snapshot_every` rounds."""
        rounds = self.view.spec.rounds
        return (rounds.snapshot_every + 2.0) * rounds.length_s

    @property
    def has_waited(self) -> bool:
        """Whether nobody has offered a state for long."""
        return self.drifted and self.view.now - self._waited_since_s > self.patience_s

    def check(self, link: Link, mine: bytes | None) -> None:
        """Compare this peer's digest with the one most authors vouch for."""
        if mine is None:
            return
        majority = self.find_majority(link)
        if majority is None or majority == mine:
            return
        self.view.notice("drifted", round=link.round, mine=mine.hex()[:12], majority=majority.hex()[:12])
        if self._proven.get(link.digest) == mine and not self._may_load:
            self.insist(link, mine)
            return
        self.start()

    def start(self, foreign: bool = False) -> None:
        """This peer's state is not what it should be."""
        if not self.drifted:
            self._waited_since_s = self.view.now
        self.drifted, self.foreign, self.loads = True, foreign, foreign

    def reset(self) -> None:
        """A new worker starts from its checkpoint, or a state that the chain vouches for was taken over."""
        self.drifted = self.foreign = self.loads = False

    def note_progress(self, moved_s: float) -> None:
        """A chunk of a state of the others came at this local time."""
        self._waited_since_s = max(self._waited_since_s, moved_s)

    def look_again(self, link: Link, mine: bytes | None) -> None:
        """Nobody may vouch for another state any more, or most authors for this one."""
        if not self.drifted or self.foreign or mine is None:
            return
        if self._is_settled(link, mine):
            self.reset()
            self.view.notice("not_drifted", round=link.round)

    def _is_settled(self, link: Link, mine: bytes) -> bool:
        return self.find_majority(link) == mine or not self._list_contradicting(link, mine)

    @property
    def _may_load(self) -> bool:
        return self.view.now >= self._load_from_s

    def folded_again(self, link: Link, before: bytes | None, mine: bytes) -> None:
        """The head was folded once more: that may have repaired the state. If not, the others are wrong."""
        if self._is_settled(link, mine):
            self.reset()
            self.view.notice("repaired", round=link.round)
            return
        if mine == before:
            self._proven[link.digest] = mine
            if len(self._proven) > MAX_PROVEN:
                del self._proven[next(iter(self._proven))]
        if self._insisted and self._may_load:
            self._start_loading()
        else:
            self.insist(link, mine)

    def could_not_fold(self, link: Link, mine: bytes | None) -> None:
        """The head can't be folded again: what is left is a state of the others."""
        if self._may_load:
            self._start_loading()
        else:
            self.insist(link, mine)

    def _start_loading(self) -> None:
        self.loads = True
        self._waited_since_s = self.view.now
        self._load_from_s = self.view.now + 2.0 * self.patience_s * 2 ** min(self._tried, MAX_DOUBLINGS)
        self._tried += 1

    def insist(self, link: Link, mine: bytes | None) -> None:
        """Go on with what this peer has, and don't hear for a while who contradicts it."""
        self.reset()
        if not self._insisted:
            self._load_from_s = max(self._load_from_s, self.view.now + self.patience_s)
        self._insisted += 1
        liars = self._list_contradicting(link, mine) if mine is not None else set()
        for public in liars:
            times = self._unheard.pop(public, (0.0, 0))[1]
            pause_s = self.patience_s * 2 ** min(times, MAX_DOUBLINGS)
            self._unheard[public] = (self.view.now + pause_s, times + 1)
        while len(self._unheard) > MAX_REMEMBERED:
            del self._unheard[next(iter(self._unheard))]
        self.view.notice("goes_on_with_own_state", round=link.round, unheard=len(liars))


def _regulars(link: Link) -> frozenset[bytes]:
    return link.authors | (link.parent.authors if link.parent is not None else frozenset())
