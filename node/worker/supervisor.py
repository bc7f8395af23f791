"""The node's handle on its worker process: start, call, watch, stop. No torch and no numpy here."""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tscale.node.worker.messages import (
    ANSWERS,
    EVENT,
    BadMessage,
    Command,
    Event,
    Failed,
    Ready,
    Stop,
    WorkerConfig,
    decode_body,
    encode_frame,
    frame_length,
)
from tscale.protocol.errors import BadInput, DamagedState, DiskFull, RefuseFrame, RestartWorker, SkipRound, TscaleError

logger = logging.getLogger(__name__)
R = TypeVar("R")
MAX_PENDING_CALLS = 32
KILL_WAIT_S = 2.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class WorkerDied(RestartWorker):
    """The process ended, or its pipe broke: every pending call raises this."""


FAILURES: typing.Final[typing.Mapping[str, type[TscaleError]]] = types.MappingProxyType(
    {
        "skip_round": SkipRound,
        "refused": RefuseFrame,
        "disk_full": DiskFull,
        "damaged": DamagedState,
        "bad_input": BadInput,
        "device": RestartWorker,
        "crash": RestartWorker,
    }
)


@dataclass(frozen=True)
class LaunchConfig:
    """How to start the process. `command` gets the node's process id as one more argument; `log` takes its stderr
    (None: the node's own)."""

    command: tuple[str, ...] = (sys.executable, "-P", "-m", "tscale.node.worker.process")
    log: Path | None = None
    start_timeout_s: float = 120.0


class WorkerHandle:
    """One life of one worker. A restart is a new handle; when to restart is the daemon's decision.

    `on_event` is called in the event loop for Progress, Evaluated, Saved and Failed events. The process is a child of
    the thread that runs the loop: on Linux the kernel kills it when that thread ends.
    """

    def __init__(self, on_event: Callable[[Event], None], launch: LaunchConfig | None = None) -> None:
        self._on_event = on_event
        self._launch = launch or LaunchConfig()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._pending: dict[int, tuple[asyncio.Future[Any], type[Any]]] = {}
        self._slots = asyncio.Semaphore(MAX_PENDING_CALLS)
        self._dead = asyncio.Event()
        self._reason = "the worker was not started"
        self._calls = EVENT

    @property
    def pid(self) -> int | None:
        """The process id, once started."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether calls can still be answered."""
        return self._process is not None and not self._dead.is_set()

    async def start(self, config: WorkerConfig) -> Ready:
        """Spawn the process and wait for its state.

        Raises:
            BadInput, DamagedState, DiskFull: the worker says that it can't start with this config.
            RestartWorker: it died, or was not ready within `start_timeout_s`.
        """
        if self._process is not None:
            raise RestartWorker("a worker handle starts once; make a new one")
        self._ready = asyncio.get_running_loop().create_future()
        try:
            self._process = await self._spawn(config)
        except OSError as error:
            raise RestartWorker(f"the worker can't be started: {error}") from error
        self._reader = asyncio.create_task(self._read(self._process), name="worker-reader")
        try:
            async with asyncio.timeout(self._launch.start_timeout_s):
                await self._send(EVENT, config)
                return await asyncio.shield(self._ready)
        except TimeoutError:
            await self.stop(0.0, save=False)
            raise RestartWorker(f"the worker was not ready after {self._launch.start_timeout_s:.0f} s") from None
        except BaseException:
            await self.stop(0.0, save=False)
            raise

    async def call(self, command: Command[R], timeout_s: float) -> R:
        """Send a command and wait for its answer.

        Raises:
            SkipRound, RefuseFrame, DiskFull, DamagedState: as the worker answered.
            WorkerDied: the worker ended before it answered.
            RestartWorker: no answer within `timeout_s`, or the worker failed inside.
        """
        try:
            async with asyncio.timeout(timeout_s), self._slots:
                return typing.cast(R, await self._exchange(command))
        except TimeoutError:
            raise RestartWorker(f"the worker did not answer {type(command).__name__} within {timeout_s:g} s") from None

    async def wait_dead(self) -> str:
        """Wait for the end of the process; returns why it ended."""
        await self._dead.wait()
        return self._reason

    async def stop(self, timeout_s: float, *, save: bool = True) -> str:
        """End the process: kindly within `timeout_s`, then by force. Returns what the worker said, or why it could not.

        Never raises on account of the worker, and is safe to call twice.
        """
        process = self._process
        if process is None:
            return self._reason
        note = self._reason
        if self.alive and timeout_s > 0:
            try:
                note = (await self.call(Stop(save), timeout_s)).note
                async with asyncio.timeout(KILL_WAIT_S):
                    await process.wait()
            except (TscaleError, TimeoutError) as error:
                note = str(error)
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_WAIT_S):
                await process.wait()
                await self._dead.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        return note

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _spawn(self, config: WorkerConfig) -> asyncio.subprocess.Process:
        environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(config.threads))}
        apart: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        command = (*self._launch.command, str(os.getpid()))
        with contextlib.ExitStack() as stack:
            log = None if self._launch.log is None else stack.enter_context(self._launch.log.open("ab"))
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                **apart,
            )

    async def _exchange(self, command: Command[Any]) -> Any:
        if not self.alive:
            raise WorkerDied(self._reason)
        self._calls += 1
        call_id = self._calls
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = (answer, ANSWERS[type(command)])
        try:
            await self._send(call_id, command)
            return await answer
        finally:
            self._pending.pop(call_id, None)

    async def _send(self, call_id: int, message: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(encode_frame(call_id, message))
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError):
            await self._dead.wait()
            raise WorkerDied(self._reason) from None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Task: deliver frames until the pipe ends, then fail everything that waits."""
        assert process.stdout is not None
        reason = "the worker closed its pipe"
        try:
            while True:
                length = frame_length(await process.stdout.readexactly(4))
                self._deliver(*decode_body(await process.stdout.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except BadMessage as error:
            reason = f"the worker sent garbage: {error}"
        except Exception:
            logger.exception("worker.event")
            reason = "an event of the worker could not be handled"
        finally:
            await self._bury(process, reason)

    async def _bury(self, process: asyncio.subprocess.Process, reason: str) -> None:
        try:
            async with asyncio.timeout(0.5):
                code = await process.wait()
            reason = f"the worker ended with exit code {code}" if code >= 0 else f"signal {-code} ended the worker"
        except TimeoutError:
            self.kill()
        finally:
            self._reason = reason
            self._dead.set()
            waiting = [future for future, _ in self._pending.values()] + ([self._ready] if self._ready else [])
            for future in waiting:
                if not future.done():
                    future.set_exception(WorkerDied(reason))
                    future.exception()  # somebody may have stopped waiting

    def _deliver(self, call_id: int, message: Any) -> None:
        if call_id != EVENT:
            future, kind = self._pending.get(call_id, (None, None))
            if future is not None and not future.done():
                self._answer(future, kind, message)
            return
        assert self._ready is not None
        if isinstance(message, Ready | Failed) and not self._ready.done():
            self._answer(self._ready, Ready, message)
            self._ready.exception()  # start() may have stopped waiting
        elif isinstance(message, Event):
            self._on_event(message)

    @staticmethod
    def _answer(future: asyncio.Future[Any], kind: type[Any] | None, message: Any) -> None:
        if isinstance(message, Failed):
            future.set_exception(FAILURES.get(message.kind, RestartWorker)(message.message))
        elif kind is not None and isinstance(message, kind):
            future.set_result(message)
        else:
            future.set_exception(RestartWorker(f"the worker answered with a {type(message).__name__}"))
