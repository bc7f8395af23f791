"""Counting what a worker trained: the tally of one round, and the rate over the last seconds."""

import math
from collections import deque
from dataclasses import dataclass

from tscale.node.worker.messages import Progress

REPORT_EVERY_S = 1.0
RATE_WINDOW_S = 10.0
SKIPPED_STEPS_TO_STOP = 8
"""In a row: one may be chance, so many mean that the weights or the machine are bad."""


@dataclass
class Tally:
    """Steps since the last close. `spoilt`: too many in a row were left out, so nothing of it may be sent."""

    steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    spoilt: bool = False

    @property
    def loss(self) -> float | None:
        """Mean loss in nats per token; None before the first step."""
        return self.loss_sum / self.steps if self.steps else None

    def add(self, tokens: int, loss: float) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += tokens
        self.loss_sum += loss


@dataclass
class SkippedSteps:
    """Steps that were left out because a loss or a gradient was not finite. `again`: too many in a row had stopped
    training before, and no step has succeeded since."""

    total: int = 0
    in_a_row: int = 0
    again: bool = False

    def add(self) -> bool:
        """Count one; whether that makes too many in a row, which then are counted anew."""
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row < SKIPPED_STEPS_TO_STOP:
            return False
        self.in_a_row = 0
        return True

    def succeeded(self) -> None:
        """A step was done."""
        self.in_a_row = 0
        self.again = False


class Meter:
    """Totals over all runs, and the recent rate. All times are monotonic seconds given by the caller."""

    def __init__(self, now_mono_s: float) -> None:
        self.tokens = 0
        self.steps = 0
        self.training_s = 0.0
        self._begin_s = now_mono_s
        self._reported_s = -math.inf
        self._recent: deque[tuple[float, int]] = deque([(now_mono_s, 0)], maxlen=4096)

    def resume(self, tokens: int, steps: int) -> None:
        """Take over the totals of earlier runs; the rate starts anew."""
        self.tokens, self.steps = tokens, steps
        self._recent = deque([(self._begin_s, tokens)], maxlen=4096)

    def add(self, tokens: int, seconds: float) -> None:
        """Count one step that took `seconds`."""
        self.steps += 1
        self.tokens += tokens
        self.training_s += seconds

    def skip(self, seconds: float) -> None:
        """A step that took `seconds` and does not count."""
        self.training_s += seconds

    def report(self, now_mono_s: float, loss: float | None) -> Progress | None:
        """The progress to tell, when REPORT_EVERY_S has passed since the last one."""
        if now_mono_s - self._reported_s < REPORT_EVERY_S:
            return None
        self._reported_s = now_mono_s
        while len(self._recent) > 1 and now_mono_s - self._recent[0][0] > RATE_WINDOW_S:
            self._recent.popleft()
        then_s, then_tokens = self._recent[0]
        self._recent.append((now_mono_s, self.tokens))
        rate = (self.tokens - then_tokens) / (now_mono_s - then_s) if now_mono_s > then_s else 0.0
        return Progress(self.tokens, self.steps, loss, rate, self.training_s, now_mono_s - self._begin_s)
