"""A token bucket for bytes that keeps every second of a transfer near the rate."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

PIECE_BYTES = 16 * 1024
"""Transfers ask for at most this much at a time."""

SMALL_BYTES = 16 * 1024
"""Frames up to this size pass ahead of longer ones: gossip, questions and records must not wait for blobs."""

_BURST_S = 0.1


@dataclass
class TokenBucket:
    """Pure arithmetic of the limit; time in seconds of any monotonic clock comes in as an argument.

    The bucket holds a tenth of a second's worth, so a window of one second carries at most 1.1 times the rate and
    one piece. Debt is allowed: a piece larger than the bucket waits for its own full time before the next one.
    `rate_bps` is in bytes per second; None is no limit.
    """

    rate_bps: float | None
    _level_bytes: float = 0.0
    _filled_at_s: float | None = None

    def take(self, size_bytes: int, now_s: float) -> float:
        """Take `size_bytes` and return how many seconds to wait before sending them."""
        if self.rate_bps is None:
            return 0.0
        self._fill(self.rate_bps, now_s)
        self._level_bytes -= size_bytes
        return max(0.0, -self._level_bytes / self.rate_bps)

    def set_rate(self, rate_bps: float | None, now_s: float) -> None:
        """Change the limit; what was taken under the old one is forgotten."""
        if rate_bps is not None and rate_bps <= 0:
            raise ValueError("a rate is positive, or None for no limit")
        self.rate_bps = rate_bps
        self._level_bytes = 0.0
        self._filled_at_s = now_s

    def piece_bytes(self) -> int:
        """How much to ask for at a time, so that no piece is longer than a tenth of a second."""
        if self.rate_bps is None:
            return PIECE_BYTES
        return max(1, min(PIECE_BYTES, int(self.rate_bps * _BURST_S)))

    def _fill(self, rate_bps: float, now_s: float) -> None:
        if self._filled_at_s is not None:
            passed_s = max(0.0, now_s - self._filled_at_s)
            self._level_bytes = min(rate_bps * _BURST_S, self._level_bytes + passed_s * rate_bps)
        self._filled_at_s = now_s


@dataclass
class RateLimiter:
    """The bucket with a clock and a way to wait; one per direction, shared by all transfers of the node."""

    bucket: TokenBucket = field(default_factory=lambda: TokenBucket(None))
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _busy: bool = False
    _small: deque[asyncio.Future[None]] = field(default_factory=deque)
    _bulk: deque[asyncio.Future[None]] = field(default_factory=deque)

    @property
    def limited(self) -> bool:
        """Whether there is a limit now."""
        return self.bucket.rate_bps is not None

    def set_rate(self, rate_bps: float | None) -> None:
        """Change the limit of running transfers too. Bytes per second; None is no limit."""
        self.bucket.set_rate(rate_bps, self.now_s())

    async def spend(self, size_bytes: int, bulk: bool = False) -> None:
        """Wait until `size_bytes` may pass: first come, first served, and `bulk` after everything that is none."""
        if not self.limited:
            return
        await self._take_turn(self._bulk if bulk else self._small)
        try:
            wait_s = self.bucket.take(size_bytes, self.now_s())
            if wait_s > 0:
                await self.sleep(wait_s)
        finally:
            self._pass_on()

    async def _take_turn(self, queue: deque[asyncio.Future[None]]) -> None:
        if not self._busy:
            self._busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had the turn already
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to who waits next, those that gave up left out."""
        for queue in (self._small, self._bulk):
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._busy = False
