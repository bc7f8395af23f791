"""What the folds' screen says of contributions, for a person: log lines, counts, a word when it is this node's own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from tscale.protocol.events import Folded
from tscale.protocol.identity import peer_id
from tscale.protocol.peer import PeerMachine
from tscale.protocol.status import ScreenStatus

_LOG = logging.getLogger("tscale.peer")
REMEMBERED = 64  # manifests: one may be folded again
SHOWN_ROUNDS = 64  # a warning is about the last ones, the head's among them
ID_CHARS = 8  # the last ones: all ids begin alike


class Screening:
    """Takes every fold. The person is told once; later cases are in the log and in the status."""

    def __init__(self, machine: PeerMachine, on_notice: Callable[[str], None]) -> None:
        self._machine = machine
        self._on_notice = on_notice
        self._seen: deque[bytes] = deque(maxlen=REMEMBERED)
        self._left_out = self._shrunk = 0
        self._own_rounds: list[int] = []  # of this node's contributions that were left out, the last ones

    def take(self, event: Folded) -> None:
        """A manifest was folded."""
        link = self._machine.view.chain.get(event.manifest)
        if link is None or event.manifest in self._seen or not (event.left_out or event.shrunk):
            return
        self._seen.append(event.manifest)
        self._left_out += len(event.left_out)
        self._shrunk += len(event.shrunk)
        announced = [part.announcement for part in self._machine.view.chain.parts(link)]
        for reason, places in (("against_the_others", event.left_out), ("too_large", event.shrunk)):
            for signed in (announced[place] for place in places if 0 <= place < len(announced)):
                author = peer_id(signed.public)[-ID_CHARS:]
                _LOG.warning("contribution_screened round=%d author=%s reason=%s", link.round, author, reason)
                if signed.public == self._machine.view.own and places is event.left_out:
                    self._tell(link.round)

    def _tell(self, round_: int) -> None:
        is_first = not self._own_rounds
        self._own_rounds = [*self._own_rounds, round_][-REMEMBERED:]
        if is_first:
            self._on_notice(f"{_own_words(round_)}; later cases are in the log and in the status")

    def status(self) -> ScreenStatus:
        """The counts."""
        return ScreenStatus(self._left_out, self._shrunk)

    def warning(self) -> str:
        """What to say of this node's own contributions while the last case is not long ago, or ''."""
        head = self._machine.head
        if not self._own_rounds or head is None or head.round - self._own_rounds[-1] >= SHOWN_ROUNDS:
            return ""
        count = sum(head.round - round_ < SHOWN_ROUNDS for round_ in self._own_rounds)
        return f"{_own_words(self._own_rounds[-1])}; {count} in the last {SHOWN_ROUNDS} rounds"


def _own_words(round_: int) -> str:
    return (
        f"round {round_}: this node's contribution went against those of the others and was left out: if that happens "
        "more than once, check this machine's memory, overclocking and temperature"
    )
