"""What a worker holds and does: one replica, one inner trainer, one corpus, and the answers to the node's commands.

Two threads share a session. The training thread calls `may_step`, `step`, `evaluate_a_little` and `report`. The job
thread calls `handle`, `after_command` and `save`, and reaches everything that training touches through `between`,
which runs a callable on the training thread between two steps.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tscale.kernels.codec import CodecError, verify
from tscale.kernels.digest import state_digest
from tscale.kernels.inner import lr_scale
from tscale.kernels.replica import Diverged, OuterState, Replica
from tscale.kernels.screen import Share
from tscale.node.checkpoint import NewArray
from tscale.node.data.corpus import ByteCorpus
from tscale.node.worker import messages as m
from tscale.node.worker.evaluation import Evaluator
from tscale.node.worker.kernel_config import KernelConfig
from tscale.node.worker.progress import SKIPPED_STEPS_TO_STOP, Meter, SkippedSteps, Tally
from tscale.node.worker.statefile import read_blob, read_snapshot, state_bytes, write_snapshot, write_whole
from tscale.node.worker.trainers import Trainer
from tscale.protocol.errors import BadInput, RefuseFrame, RestartWorker, SkipRound
from tscale.protocol.hashing import digest
from tscale.protocol.spec import SwarmSpec

Between = Callable[[Callable[[], Any]], Any]
Emit = Callable[[m.Event], None]
RESYNC_GAP_ROUNDS = 2
"""After a longer gap the inner optimizer's momentum is about another landscape."""
MAX_EVALUATE_WINDOWS = 4096
MAX_GENERATE_TOKENS = 4096
MAX_PROMPT_BYTES = 1 << 16


@dataclass(frozen=True)
class Base:
    """A manifest whose state is held: `state` is its digest, `total_tokens` is cumulative over the chain."""

    manifest: bytes
    round: int
    total_tokens: int
    state: bytes


@dataclass(frozen=True)
class SessionParts:
    """Everything a session is composed of. `save` writes a checkpoint of the session it gets; `new_array`
    makes the arrays that are copied for it and read from it."""

    spec: SwarmSpec
    config: m.WorkerConfig
    kernels: KernelConfig
    replica: Replica
    trainer: Trainer
    corpus: ByteCorpus
    between: Between
    emit: Emit
    save: Callable[["Session"], str]
    new_array: NewArray = np.empty
    clock: Callable[[], float] = time.monotonic


def batch_key(seed: int, manifest: bytes, public: bytes) -> bytes:
    """The key of a peer's batches while its base is `manifest`: unpredictable before it, checkable by anyone after."""
    return digest("batch", seed.to_bytes(8, "little"), manifest, public)


class Session:
    """One swarm's training state. Its public attributes belong to the job thread unless the comment says otherwise."""

    def __init__(self, parts: SessionParts, head: Base) -> None:
        self.parts = parts
        self.replica = parts.replica
        self.trainer = parts.trainer  # training thread
        self.head = head
        self.parent: Base | None = None
        self.base_steps = 0  # training thread: steps since the base changed; counts the batches
        self.tally = Tally()  # training thread
        self.meter = Meter(parts.clock())  # training thread
        self.skipped = SkippedSteps()  # training thread
        self._between = parts.between
        self._paused = parts.config.paused  # training thread
        self._folds_unsaved = 0
        held_out_NT = self._held_out(parts.config.evaluate_windows)
        self._evaluator = Evaluator(
            parts.trainer.evaluate, held_out_NT, parts.config.evaluate_fraction, parts.clock
        )  # training thread
        self._key = b""
        self._lr_scale = 0.0
        self._follow(head)

    # ---- training thread

    def may_step(self) -> bool:
        """Whether to train: not paused, and the round is not spoilt by steps that were left out."""
        return not self._paused and not self.tally.spoilt

    def step(self) -> float:
        """One inner step on the next batch; returns the loss in nats per token.

        One that is not finite says that the step was left out: it is counted apart, and its tokens don't count.

        Raises:
            RestartWorker: starting over from the anchor did not help either.
        """
        inner, clock = self.parts.kernels.inner, self.parts.clock
        begin_s = clock()
        tokens_BT = self.parts.corpus.batch(self._key, self.base_steps, inner.batch, inner.context)
        loss = self.trainer.step(tokens_BT, self._lr_scale)
        self.base_steps += 1
        if math.isfinite(loss):
            self.tally.add(inner.batch * inner.context, loss)
            self.meter.add(inner.batch * inner.context, clock() - begin_s)
            self.skipped.succeeded()
        else:
            self.meter.skip(clock() - begin_s)
            self._left_out()
        return loss

    def _left_out(self) -> None:
        skipped, what = self.skipped, "a loss or a gradient that is not finite"
        too_many = skipped.add()
        if skipped.total == 1:
            self.parts.emit(m.Failed("skip_round", f"a step had {what}: such steps are left out and don't count"))
        if not too_many:
            return
        what = f"{SKIPPED_STEPS_TO_STOP} steps in a row had {what}"
        if skipped.again:
            raise RestartWorker(f"{what}, also after starting over from the swarm's model: the device may be faulty")
        skipped.again = self.tally.spoilt = True
        self.parts.emit(m.Failed("skip_round", f"{what}: nothing of this round is sent, training starts over after it"))

    def evaluate_a_little(self) -> None:
        """Give the held-out evaluation its share of the time."""
        done = self._evaluator.advance(self.meter.training_s)
        if done is not None:
            self.parts.emit(m.Evaluated(done.manifest, done.round, done.loss))

    def report(self) -> None:
        """Tell the progress when it is due."""
        progress = self.meter.report(self.parts.clock(), self.tally.loss)
        if progress is not None:
            self.parts.emit(progress)

    def _follow(self, base: Base) -> None:
        self._key = batch_key(self.parts.spec.seed, base.manifest, self.parts.config.public)
        self._lr_scale = lr_scale(self.parts.kernels.inner, base.total_tokens)
        self.base_steps = 0
        self._evaluator.request(base.manifest, base.round, self.replica.anchor)

    def take_over(self, head: Base, parent: Base | None, tally: Tally) -> None:
        """Go on where a checkpoint of the replica and the trainer left off (before the threads run)."""
        self.head, self.parent = head, parent
        self._follow(head)
        self.tally = tally

    def _cut(self) -> Tally:
        tally = self.tally
        if tally.steps or tally.spoilt:
            self.replica.cut()
            self.tally = Tally()
        return tally

    def _start_over(self) -> None:
        self.replica.go_to_start()
        self.trainer.reset_momentum()
        self.tally = Tally()

    def _rebase(self, base: Base) -> None:
        if self.tally.spoilt:
            self.replica.restart()
            self._start_over()
        else:
            self.replica.apply_rebase()
        self._follow(base)

    # ---- job thread

    def handle(self, command: Any) -> Any:
        """The answer to one command.

        Raises:
            SkipRound, RefuseFrame, DiskFull: the command can't be done; the session is as it should be.
        """
        answer = _HANDLERS.get(type(command))
        if answer is None:
            raise RefuseFrame(f"a worker does not do {type(command).__name__}")
        return answer(self, command)

    def after_command(self) -> None:
        """Save when enough folds went by. Raises DiskFull."""
        every = self.parts.config.checkpoint_every_folds
        if every and self._folds_unsaved >= every:
            self.parts.emit(self.save())

    def save(self) -> m.Saved:
        """Write a checkpoint. Raises DiskFull; the one before is intact."""
        self._folds_unsaved = 0  # also when it fails: try again after as many folds, not after each
        return m.Saved(self.head.manifest, self.parts.save(self))

    def on_training_thread(self, work: Callable[[], Any]) -> Any:
        """Run `work` between two steps."""
        return self._between(work)

    def _close(self, command: m.Close) -> m.Closed:
        rungs = self.parts.kernels.rungs
        if not 0 <= command.rung < len(rungs):
            raise SkipRound(f"the spec has no rung {command.rung}")
        tally: Tally = self._between(self._cut)
        if not tally.spoilt and not tally.steps:
            raise SkipRound("no step was done since the last close")
        blob = None if tally.spoilt else self._compress(rungs[command.rung])
        if blob is None:
            self.replica.restart()
            self._between(self._start_over)
            raise SkipRound("the round diverged (loss or progress not finite, or too large): starting from the anchor")
        path = Path(self.parts.config.scratch_dir) / f"contribution-{command.round}.bin"
        size_bytes = write_whole(path, [blob])
        tokens = min(tally.tokens, self.parts.spec.caps.max_contribution_tokens)
        loss = tally.loss_sum / tally.steps
        base, state = self.head.manifest, self.head.state
        return m.Closed(str(path), size_bytes, tokens, tally.steps, loss, command.round, base, state)

    def _compress(self, rung: Any) -> bytes | None:
        try:
            blob = self.replica.compress(rung)
            verify(blob, self.replica.layout, self.parts.spec.caps.max_rms)
        except (Diverged, CodecError):
            return None
        return blob

    def _verify(self, command: m.Verify) -> m.Verified:
        rungs = self.parts.kernels.rungs
        if not 0 <= command.rung < len(rungs):
            return m.Verified(False, f"rung {command.rung} is not one of the spec's")
        # a lone peer's dense contribution is checked too: whoever joins it replays it
        cap_bytes = max(self.parts.spec.caps.max_blob_bytes, 2 * self.state_bytes + (1 << 20))
        try:
            blob = read_blob(command.path, cap_bytes)
            verify(blob, self.replica.layout, self.parts.spec.caps.max_rms, rungs[command.rung])
        except (RefuseFrame, CodecError) as error:
            return m.Verified(False, str(error))
        return m.Verified(True, "")

    def _fold(self, command: m.Fold) -> m.Folded:
        begin_s = self.parts.clock()
        onto_parent = command.parent != self.head.manifest
        held = self.parent if self.replica.parent is not None else None
        if onto_parent and (held is None or command.parent != held.manifest):
            raise SkipRound(f"the state after {command.parent.hex()[:12]} is not here: load a snapshot")
        if not all(0 < share < math.inf and 0 <= gain < math.inf for _, share, gain in command.parts):
            raise RefuseFrame("a share is not a number above zero, or a gain is not a number of zero or more")
        cap_bytes = max(self.parts.spec.caps.max_blob_bytes, 2 * self.state_bytes + (1 << 20))
        try:
            shares = [Share(read_blob(path, cap_bytes), share, gain) for path, share, gain in command.parts]
            verdicts = self.replica.fold(shares, onto_parent=onto_parent)
        except CodecError as error:
            raise RefuseFrame(f"a contribution can't be folded: {error}") from error
        base = Base(command.manifest, command.round, command.total_tokens, b"")
        self.replica.prepare_rebase()
        self._between(lambda: self._rebase(base))
        if not onto_parent:
            self.parent = self.head
        self.head = replace(base, state=self._digest(self.replica.head))
        self._folds_unsaved += 1
        left_out = tuple(place for place, verdict in enumerate(verdicts) if verdict.is_left_out)
        shrunk = tuple(place for place, verdict in enumerate(verdicts) if verdict.is_shrunk)
        return m.Folded(command.manifest, self.head.state, self.parts.clock() - begin_s, left_out, shrunk)

    def _write_snapshot(self, command: m.WriteSnapshot) -> m.SnapshotWritten:
        state, base = self.replica.head, self.head
        if command.manifest != base.manifest:
            if self.parent is None or self.replica.parent is None or command.manifest != self.parent.manifest:
                raise SkipRound(f"the state after {command.manifest.hex()[:12]} is not here any more")
            state, base = self.replica.parent, self.parent
        return m.SnapshotWritten(write_snapshot(Path(command.path), state), base.state)

    def _load(self, command: m.Load) -> m.Loaded:
        has_momentum = self.replica.head.momentum is not None
        parameters, make = self.replica.layout.numel, self.replica.vectors.rounds
        state = read_snapshot(Path(command.path), parameters, has_momentum=has_momentum, new_vector=make)
        found = self._digest(state)
        if command.state_digest and found != command.state_digest:
            raise RefuseFrame(f"the snapshot's digest is {found.hex()[:12]}, not {command.state_digest.hex()[:12]}")
        self.replica.load(state)
        gap = abs(command.round - self.head.round)
        self.head, self.parent = Base(command.manifest, command.round, command.total_tokens, found), None

        def go_on() -> None:
            self.replica.go_to_start()
            self.tally = Tally()
            if gap > RESYNC_GAP_ROUNDS:
                self.trainer.reset_momentum()
            self._follow(self.head)

        self._between(go_on)
        self._folds_unsaved += 1
        return m.Loaded(command.manifest, found)

    def _save(self, _: m.Save) -> m.Saved:
        return self.save()

    def _evaluate(self, command: m.Evaluate) -> m.Evaluated:
        head, anchor = self.head, self.replica.anchor
        windows = max(1, min(command.windows, MAX_EVALUATE_WINDOWS))
        tokens_NT = self._held_out(windows)
        if not len(tokens_NT):
            raise SkipRound("the held-out part of the data is too short to evaluate on")
        loss = self._between(lambda: self._evaluator.now(anchor, tokens_NT))
        return m.Evaluated(head.manifest, head.round, loss)

    def _generate(self, command: m.Generate) -> m.Generated:
        anchor = self.replica.anchor
        prompt = command.prompt.encode()[-MAX_PROMPT_BYTES:] or b"\n"
        tokens = np.frombuffer(prompt, np.uint8).astype(np.int64)
        wanted = max(1, min(command.tokens, MAX_GENERATE_TOKENS))
        temperature = max(command.temperature, 0.0)
        made = self._between(lambda: self.trainer.generate(anchor, tokens, wanted, temperature, command.seed))
        return m.Generated(bytes(made.astype(np.uint8)).decode(errors="replace"))

    def _set_paused(self, command: m.SetPaused) -> m.Paused:
        def switch() -> None:
            self._paused = command.paused

        self._between(switch)
        return m.Paused(command.paused)

    # ---- both

    @property
    def state_bytes(self) -> int:
        """The size of a snapshot."""
        return state_bytes(self.replica.layout.numel, has_momentum=self.replica.head.momentum is not None)

    def _held_out(self, windows: int) -> np.ndarray:
        """int64 [N, T+1]; none when the text is too short to hold out a window."""
        context = self.parts.kernels.inner.context
        try:
            return self.parts.corpus.heldout(windows, context)
        except BadInput:
            return np.zeros((0, context + 1), np.int64)

    def _digest(self, state: OuterState) -> bytes:
        return state_digest(self.replica.layout, state.anchor, state.momentum)


_HANDLERS: dict[type[Any], Callable[[Session, Any], Any]] = {
    m.Close: Session._close,
    m.Verify: Session._verify,
    m.Fold: Session._fold,
    m.WriteSnapshot: Session._write_snapshot,
    m.Load: Session._load,
    m.Save: Session._save,
    m.Evaluate: Session._evaluate,
    m.Generate: Session._generate,
    m.SetPaused: Session._set_paused,
}
