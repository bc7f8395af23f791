"""The node's side of training: keeps a worker running, turns effects into its commands and its answers into events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tscale.node.blobs import BlobStore
from tscale.node.worker.messages import (
    Close,
    Evaluated,
    Failed,
    Fold,
    Load,
    Progress,
    Ready,
    Save,
    Saved,
    SetPaused,
    Verify,
    WorkerConfig,
    WriteSnapshot,
)
from tscale.node.worker.messages import Event as WorkerEvent
from tscale.node.worker.supervisor import LaunchConfig, WorkerHandle
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.errors import DiskFull, RefuseFrame, RestartWorker, SkipRound, StopNode, TscaleError

_LOG = logging.getLogger("tscale.trainer")
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
_STEADY_S = 120.0
CALL_TIMEOUT_S = 900.0
PLAIN = "training on the processor in fp32"


@dataclass(frozen=True)
class TrainerHooks:
    """What the trainer tells the node: events for the state machine, news for the status, and what must stop it."""

    feed: Callable[[ev.Event], None]
    on_ready: Callable[[Ready], None]
    on_progress: Callable[[Progress], None]
    on_evaluated: Callable[[Evaluated], None]
    on_trouble: Callable[[str], None]
    on_notice: Callable[[str], None]
    on_fatal: Callable[[StopNode], None]


class Trainer:
    """One worker after another. `take` accepts the effects that concern training."""

    def __init__(self, config: WorkerConfig, store: BlobStore, hooks: TrainerHooks, log: Path | None = None) -> None:
        self._config = config
        self._store = store
        self._hooks = hooks
        self._log = log
        self._handle: WorkerHandle | None = None
        self._ready = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._paused = True
        self._stopping = False
        self._last_words = ""
        self._said_how = ""

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._handle.pid if self._handle is not None else None

    def start(self) -> None:
        """Start the worker and keep one running."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="trainer")

    async def stop(self, save_s: float) -> str:
        """End the worker, with a checkpoint if it takes at most `save_s`. Returns a note when that went wrong."""
        self._stopping = True
        note = ""
        if self._handle is not None:
            # one that is not ready yet has nothing new to save
            saves = self._ready and self._handle.alive and save_s > 0
            said = await self._handle.stop(save_s if saves else 0.0, save=saves)
            note = said if saves else ""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return f"the last minutes may not be saved: {note}" if note else ""

    def kill(self) -> None:
        """End the worker now, unsaved."""
        self._stopping = True
        if self._handle is not None:
            self._handle.kill()

    def _make_handle(self) -> WorkerHandle:
        return WorkerHandle(self._on_event, LaunchConfig(log=self._log))

    def take(self, effect: fx.Effect) -> None:
        """Do what an effect asks for; what comes of it is fed back as an event."""
        if isinstance(effect, fx.SetTraining):
            self._paused = not effect.on
            self._spawn(self._set_paused())
        elif isinstance(effect, fx.MakeContribution):
            self._spawn(self._close(effect))
        elif isinstance(effect, fx.VerifyBlob):
            self._spawn(self._verify(effect))
        elif isinstance(effect, fx.Fold):
            self._spawn(self._fold(effect))
        elif isinstance(effect, fx.WriteSnapshot):
            self._spawn(self._snapshot(effect))
        elif isinstance(effect, fx.LoadSnapshot):
            self._spawn(self._load(effect))
        elif isinstance(effect, fx.RestartFromGenesis):
            self._spawn(self._restart_from_genesis(effect.reason))

    # -- the worker's life --------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                reason = await self._one_life()
            except StopNode as error:
                self._hooks.on_fatal(error)
                return
            except RestartWorker as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 - the boundary of this task: without it there is no training
                _LOG.exception("trainer_failed")
                self._hooks.on_fatal(StopNode(f"an unexpected error ended the training ({type(error).__name__})"))
                return
            self._ready = False
            if self._stopping:
                return
            self._hooks.feed(ev.WorkerDied(reason))
            failures = 1 if loop.time() - began_s > _STEADY_S else failures + 1
            wait_s = _BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1]
            self._hooks.on_trouble(f"{reason}; the next start is number {failures + 1}")
            log = f" (why is in {self._log})" if self._log is not None and failures > 1 else ""
            self._hooks.on_notice(f"{reason}: a new one starts in {wait_s:g} s{log}")
            _LOG.warning("worker_ended reason=%s retry_s=%g", reason, wait_s)
            await asyncio.sleep(wait_s)

    async def _one_life(self) -> str:
        handle = self._handle = self._make_handle()
        self._last_words = ""
        ready = await handle.start(self._config)
        self._ready = True
        started = (ready.round, ready.resumed, handle.pid, ready.precision, ready.device)
        _LOG.info("worker_ready round=%d resumed=%s pid=%s precision=%s device=%s", *started)
        self._tell(ready)
        self._hooks.on_ready(ready)
        self._hooks.feed(ev.WorkerReady(ready.manifest, ready.state_digest, ready.previous_manifest))
        await self._set_paused()
        reason = await handle.wait_dead()
        return self._last_words or reason

    def _tell(self, ready: Ready) -> None:
        """What a person should know of a worker that starts; how it trains only when that is new and not PLAIN."""
        if ready.note:
            _LOG.warning("checkpoint_note reason=%s", ready.note)
            self._hooks.on_notice(ready.note)
        how = f"training on {ready.device} in {ready.precision.split(':')[0]}"
        if how not in (self._said_how, PLAIN) or ready.device_warning:
            self._hooks.on_notice(f"{how}; {ready.device_warning}" if ready.device_warning else how)
        self._said_how = how

    def _on_event(self, event: WorkerEvent) -> None:
        if isinstance(event, Progress):
            self._hooks.on_progress(event)
        elif isinstance(event, Evaluated):
            self._hooks.on_evaluated(event)
        elif isinstance(event, Saved):
            _LOG.debug("checkpoint_saved note=%s", event.note)
        elif isinstance(event, Failed):
            _LOG.warning("worker_failed kind=%s message=%s", event.kind, event.message)
            if event.kind == "skip_round":
                self._hooks.on_notice(event.message)
            if event.kind == "device":
                self._last_words = event.message
            if event.kind == "disk_full":
                self._hooks.on_fatal(DiskFull(event.message))

    async def _restart_from_genesis(self, reason: str) -> None:
        """Set the checkpoint aside and start the worker anew."""
        folder = Path(self._config.checkpoint_dir)
        self._hooks.on_notice(f"starting over from the initial model: {reason}")
        if self._handle is not None:
            await self._handle.stop(0.0, save=False)
        for n in range(100):
            aside = folder.with_name(f"{folder.name}.unknown-{n}")
            if not aside.exists():
                if folder.exists():
                    folder.rename(aside)
                break

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """The boundary of a call to the worker."""
        try:
            await coroutine
        except StopNode as error:
            self._hooks.on_fatal(error)
        except RestartWorker as error:
            # a worker that died tells by itself; one that hangs is ended here, and a new one starts
            _LOG.warning("worker_call_failed reason=%s", error)
            if self._handle is not None and self._handle.alive and "did not answer" in str(error):
                self._handle.kill()
        except TscaleError as error:
            _LOG.warning("training_call_failed reason=%s", error)
        except Exception:  # noqa: BLE001 - what was asked for is lost; a new worker asks for it again
            _LOG.exception("training_call_failed")
            if self._handle is not None:
                self._handle.kill()

    # -- commands -----------------------------------------------------------------------------------------------

    def _worker(self) -> WorkerHandle:
        if self._handle is None or not self._ready:
            raise RestartWorker("the worker is not running")
        return self._handle

    async def _set_paused(self) -> None:
        if self._ready:
            await self._worker().call(SetPaused(self._paused), CALL_TIMEOUT_S)

    async def _close(self, effect: fx.MakeContribution) -> None:
        try:
            closed = await self._worker().call(Close(effect.round, effect.base, effect.rung), CALL_TIMEOUT_S)
            ref = self._store.add_file(Path(closed.path))
        except (SkipRound, RefuseFrame) as error:
            self._hooks.feed(ev.ContributionFailed(effect.round, str(error)))
            return
        hashes = self._store.hashes(ref.root) or ()
        self._hooks.feed(
            ev.ContributionMade(
                round=effect.round,
                base=closed.base,
                blob=ref,
                hashes=hashes,
                tokens=closed.tokens,
                steps=closed.steps,
                loss=closed.loss,
                rung=effect.rung,
            )
        )

    def _find(self, root: bytes) -> Path | None:
        """The file of a blob. None when it is gone: then the machine is told, and fetches it again when it has to."""
        path = self._store.path(root)
        if path is not None and path.exists():
            return path
        self._store.drop(root)
        self._hooks.feed(ev.BlobMissing(root))
        return None

    async def _verify(self, effect: fx.VerifyBlob) -> None:
        root = effect.claim.blob.root
        path = self._find(root)
        if path is None:
            return
        try:
            answer = await self._worker().call(Verify(str(path), effect.claim.rung), CALL_TIMEOUT_S)
        except SkipRound as error:  # the file can't be read: that says nothing about its author
            _LOG.warning("blob_unreadable root=%s reason=%s", root.hex()[:12], error)
            self._store.drop(root)
            self._hooks.feed(ev.BlobMissing(root))
            return
        self._hooks.feed(ev.BlobVerified(effect.claim, answer.ok, answer.reason))

    async def _fold(self, effect: fx.Fold) -> None:
        paths = [self._find(root) for root, _, _ in effect.parts]
        if any(path is None for path in paths):
            self._hooks.feed(ev.FoldFailed(effect.manifest, "a blob is not in the store any more", False))
            return
        parts = [(str(path), share, gain) for path, (_, share, gain) in zip(paths, effect.parts, strict=True)]
        command = Fold(effect.manifest, effect.parent, tuple(parts), effect.total_tokens, effect.round)
        try:
            folded = await self._worker().call(command, CALL_TIMEOUT_S)
        except RefuseFrame as error:
            self._hooks.feed(ev.FoldFailed(effect.manifest, str(error), True))
        except SkipRound as error:
            self._hooks.feed(ev.FoldFailed(effect.manifest, str(error), False))
        else:
            _LOG.info("folded round=%d contributions=%d seconds=%.3f", effect.round, len(parts), folded.seconds)
            self._hooks.feed(ev.Folded(folded.manifest, folded.state_digest, folded.left_out, folded.shrunk))

    async def _snapshot(self, effect: fx.WriteSnapshot) -> None:
        path = Path(self._config.scratch_dir) / f"snapshot-{effect.round}.bin"
        try:
            written = await self._worker().call(WriteSnapshot(effect.manifest, str(path)), CALL_TIMEOUT_S)
            ref = self._store.add_file(path)
        except (SkipRound, RefuseFrame) as error:
            _LOG.info("no_snapshot round=%d reason=%s", effect.round, error)
            return
        hashes = self._store.hashes(ref.root) or ()
        self._hooks.feed(ev.SnapshotReady(effect.manifest, effect.round, written.state_digest, ref, hashes))

    async def _load(self, effect: fx.LoadSnapshot) -> None:
        path = self._find(effect.root)
        if path is None:
            self._hooks.feed(ev.SnapshotRefused(effect.manifest, b"", "it is not in the store any more"))
            return
        command = Load(effect.manifest, str(path), effect.total_tokens, effect.round, effect.state)
        try:
            loaded = await self._worker().call(command, CALL_TIMEOUT_S)
        except (RefuseFrame, SkipRound) as error:
            self._hooks.feed(ev.SnapshotRefused(effect.manifest, effect.root, str(error)))
            return
        self._hooks.feed(ev.SnapshotLoaded(loaded.manifest, loaded.state_digest))
        await self._worker().call(Save(), CALL_TIMEOUT_S)
