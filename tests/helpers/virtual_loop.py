"""An event loop whose clock jumps to the next timer when nothing else is to do: waits of hours take no time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at 0. Only for code that neither waits for sockets nor for threads."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0
        self.turns = 0

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False  # type: ignore[attr-defined]
        if not self._ready and scheduled:  # type: ignore[attr-defined]
            self._virtual_s = max(self._virtual_s, scheduled[0].when())
        self.turns += 1
        super()._run_once()  # type: ignore[misc]


def run_virtually(scenario: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a virtual clock; a task that the scenario leaves behind is an error."""

    async def checked() -> T:
        result = await scenario
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"
        return result

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(checked())
