"""Held-out loss of an anchor, worked out in small pieces that fit between training steps."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Evaluate = Callable[[np.ndarray, np.ndarray], float]
PIECE_WINDOWS = 8


@dataclass
class Pending:
    """An anchor on its way: `done` windows so far, with the sum of their mean losses in `total`."""

    manifest: bytes
    round: int
    anchor: np.ndarray
    done: int = 0
    total: float = 0.0


@dataclass(frozen=True)
class HeldOut:
    """The mean loss, in nats per token, of one anchor."""

    manifest: bytes
    round: int
    loss: float


class Evaluator:
    """Evaluates one anchor at a time within a share of the training time; a newer anchor waits for the end of it.

    `evaluate(flat, tokens_NT)` must not change anything that training reads. Belongs to the training thread.
    """

    def __init__(self, evaluate: Evaluate, tokens_NT: np.ndarray, fraction: float, clock: Callable[[], float]) -> None:
        self._evaluate = evaluate
        self._tokens_NT = tokens_NT
        self._fraction = fraction
        self._clock = clock
        self._current: Pending | None = None
        self._next: Pending | None = None
        self._spent_s = 0.0
        self._piece_s = 0.0

    def request(self, manifest: bytes, round_number: int, anchor: np.ndarray) -> None:
        """Evaluate this anchor when there is time; it replaces one that was not begun yet."""
        self._next = Pending(manifest, round_number, anchor)

    def advance(self, training_s: float) -> HeldOut | None:
        """Do one piece if the share of `training_s`, the time spent in steps so far, allows it."""
        if self._current is None:
            self._current, self._next = self._next, None
        pending = self._current
        if pending is None or not len(self._tokens_NT) or self._spent_s + self._piece_s > self._fraction * training_s:
            return None
        begin_s = self._clock()
        piece_NT = self._tokens_NT[pending.done : pending.done + PIECE_WINDOWS]
        pending.total += self._evaluate(pending.anchor, piece_NT) * len(piece_NT)
        pending.done += len(piece_NT)
        self._piece_s = self._clock() - begin_s
        self._spent_s += self._piece_s
        if pending.done < len(self._tokens_NT):
            return None
        self._current = None
        return HeldOut(pending.manifest, pending.round, pending.total / pending.done)

    def now(self, anchor: np.ndarray, tokens_NT: np.ndarray) -> float:
        """The mean loss over all windows, at once."""
        pieces = [tokens_NT[i : i + PIECE_WINDOWS] for i in range(0, len(tokens_NT), PIECE_WINDOWS)]
        return sum(self._evaluate(anchor, piece) * len(piece) for piece in pieces) / len(tokens_NT)
