"""Where the job thread and the training thread of a worker meet: between two training steps, and nowhere else."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
MEETING_TIMEOUT_S = 600.0
"""Longer than any step; it only bounds the wait for a training thread that is stuck for good."""
MAX_WAITING = 16


class StepGate:
    """Runs short callables of the job thread on the training thread, between steps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False

    @property
    def stopping(self) -> bool:
        """Whether the training loop should end."""
        return self._stopping

    def run(self, work: Callable[[], T]) -> T:
        """Job thread: run `work` between two steps and return its result, or raise what it raised.

        Raises:
            TimeoutError: the training thread did not come by within MEETING_TIMEOUT_S.
        """
        done: Future[T] = Future()
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                raise TimeoutError("too many jobs wait for the training thread")
            self._waiting.append((work, done))
            self._changed.notify_all()
        return done.result(timeout=MEETING_TIMEOUT_S)

    def serve(self) -> None:
        """Training thread: run everything that waits."""
        while self._waiting:
            work, done = self._waiting.popleft()
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that asked
                done.set_exception(error)

    def sleep(self, timeout_s: float) -> None:
        """Training thread: wait for work or for the end, at most `timeout_s`, without using the processor."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._stopping, timeout_s)

    def stop(self) -> None:
        """Any thread: end the training loop after the step it is in."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
