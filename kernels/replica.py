"""One peer's side of a round: cut, compress with error feedback, fold, rebase. Used by the worker and by the lab.

Legend: A anchor, e residual, w local parameters (trained in place), s the start that the next delta counts from.

    begin    s = w = A - rho*e                                   (local residual, rho 1/2)
    close    delta = s - w;  e = beta*e + delta;  blob = encode(e), e keeps the rest;  s = w
    fold     A' = A - eta*(g + mu*u) of the manifest's contributions that pass the screen
    rebase   target = A' - rho*e;  w = target + (w - s);  s = target

The last line is written so that a peer that has not moved since its close lands on the target to the bit.

Two threads may share a replica. `cut`, `apply_rebase` and `go_to_start` touch `local` and belong to the thread that
trains, between two steps; each of them costs about as much as copying the weights. Everything else belongs to one
other thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tscale.kernels.codec import Rung, encode
from tscale.kernels.feedback import accumulate
from tscale.kernels.fold import FoldOptions, NewVector, OuterRule, fold
from tscale.kernels.layout import Layout
from tscale.kernels.screen import Share, Verdict, screen

_BLOCK_VALUES = 1 << 16
"""256 KiB: the three operands of a rebase stay in the second-level cache."""


class Diverged(ArithmeticError):
    """The progress of a round is not finite. The replica is unusable until `restart` or `load`."""


@dataclass(frozen=True)
class OuterState:
    """What all peers agree on after a manifest: float32[P] each, never changed in place. No momentum when mu is 0."""

    anchor: np.ndarray
    momentum: np.ndarray | None


@dataclass(frozen=True)
class Vectors:
    """Who makes a replica's vectors: `local` the one that every step of training touches, `rounds` all others, which
    are touched once a round and may lie in files."""

    rounds: NewVector
    local: NewVector


def memory_vectors(layout: Layout) -> Vectors:
    """All of them in main memory."""

    def new_vector() -> np.ndarray:
        return np.empty(layout.numel, np.float32)

    return Vectors(new_vector, new_vector)


class Replica:
    """The outer state (head and its parent) and the local vectors of one peer, all float32[P]."""

    def __init__(
        self,
        layout: Layout,
        anchor: np.ndarray,
        rho: float,
        beta: float,
        rule: OuterRule,
        vectors: Vectors | None = None,
    ) -> None:
        """Start from a genesis `anchor` (kept, never changed in place) with an empty residual and zero momentum.

        `vectors` makes all other vectors (None: in main memory); what it raises comes out here and in `fold`.
        """
        self.layout = layout
        self.rho = np.float32(rho)
        self.beta = beta
        self.rule = rule
        self.vectors = vectors or memory_vectors(layout)
        self.head = OuterState(anchor, None if rule.mu == 0 else self._zeros())
        self.parent: OuterState | None = None
        self.residual = self._zeros()
        self.local = _filled(self.vectors.local(), anchor)
        self.start = _filled(self.vectors.rounds(), anchor)
        self._spare = self.vectors.rounds()

    @property
    def anchor(self) -> np.ndarray:
        """The head's parameters."""
        return self.head.anchor

    def cut(self) -> None:
        """Training thread: remember where the local parameters are now; `compress` counts up to here."""
        np.copyto(self._spare, self.local)

    def compress(self, rung: Rung) -> bytes:
        """The contribution of the progress between the last start and the last `cut`. The cut becomes the start.

        Raises:
            Diverged: that progress is not finite; call `restart`.
        """
        delta = np.subtract(self.start, self._spare, out=self.start)
        if not np.isfinite(np.dot(delta, delta)):
            raise Diverged("the progress of the round is not finite")
        accumulate(self.residual, delta, self.beta)
        self.start, self._spare = self._spare, self.start
        return encode(self.residual, self.layout, rung)

    def close(self, rung: Rung) -> bytes:
        """`cut` and `compress` in one thread."""
        self.cut()
        return self.compress(rung)

    def fold(self, shares: Sequence[Share], *, onto_parent: bool = False) -> tuple[Verdict, ...]:
        """Screen a manifest's contributions and apply them to the head, or, when a fork of one round is settled, to
        the head's parent. Returns what the screen found of each.

        The new state becomes the head and what it was built on becomes the parent. A fold onto the head lets the parent
        go before the new state is made, so that no more than two are held. On one of the errors below nothing has
        changed.

        Raises:
            ValueError: there is no parent to fold onto, or a share or a gain can't be one.
            CodecError: a blob is malformed.
            Exception: as `vectors` raises when there is no room for the new state; the parent is gone then.
        """
        base = self.parent if onto_parent else self.head
        if base is None:
            raise ValueError("the state before the head is not there any more")
        screened = screen(shares, self.layout)
        if not onto_parent:
            self.parent = None
        options = FoldOptions(new_vector=self.vectors.rounds)
        anchor, momentum = fold(base.anchor, base.momentum, screened.parts, self.layout, self.rule, options)
        self.head, self.parent = OuterState(anchor, momentum), base
        return screened.verdicts

    def prepare_rebase(self) -> None:
        """Work out where the local parameters have to go; follow with `apply_rebase` before the next `cut`."""
        target = np.multiply(self.residual, self.rho, out=self._spare)
        np.subtract(self.head.anchor, target, out=target)

    def apply_rebase(self) -> None:
        """Training thread: move the local parameters onto the prepared target, keeping the progress since the start."""
        target = self._spare
        for first in range(0, self.local.size, _BLOCK_VALUES):
            block = slice(first, first + _BLOCK_VALUES)
            w = self.local[block]
            np.subtract(w, self.start[block], out=w)
            np.add(target[block], w, out=w)
        self.start, self._spare = target, self.start

    def rebase(self) -> None:
        """`prepare_rebase` and `apply_rebase` in one thread."""
        self.prepare_rebase()
        self.apply_rebase()

    def restart(self) -> None:
        """Forget the residual and count from the anchor; follow with `go_to_start`."""
        self.residual.fill(0)
        np.copyto(self.start, self.head.anchor)

    def load(self, state: OuterState, parent: OuterState | None = None) -> None:
        """Adopt a downloaded state with an empty residual; follow with `go_to_start`."""
        self.head, self.parent = state, parent
        self.restart()

    def go_to_start(self) -> None:
        """Training thread: give up the local progress since the start."""
        np.copyto(self.local, self.start)

    def _zeros(self) -> np.ndarray:
        made = self.vectors.rounds()
        made.fill(0)
        return made


def _filled(vector: np.ndarray, values: np.ndarray) -> np.ndarray:
    np.copyto(vector, values)
    return vector
