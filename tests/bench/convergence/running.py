"""Running variants: one after the other in a process, and several processes side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from tests.bench.convergence.results import Point, Result, ResultStore, code_version, run_key
from tests.bench.convergence.swarm import DataParallel, Swarm, make_trainer, set_up
from tests.bench.convergence.variant import Variant
from tscale.kernels.init import init_state
from tscale.protocol.errors import StopNode

CURVE_POINTS = 16
CURVE_WINDOWS = 64
FINAL_WINDOWS = 512


def run(variant: Variant, code: str, final_windows: int = FINAL_WINDOWS) -> Result:
    """One run, in this process and one thread; the same numbers every time on one machine. `code` is the version of
    the code that this process has imported."""
    torch.set_num_threads(1)
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    setting = set_up(variant)
    context = setting.kernels.inner.context
    few_NT, many_NT = setting.corpus.heldout(CURVE_WINDOWS, context), setting.corpus.heldout(final_windows, context)
    anchor = init_state(setting.kernels.model, variant.seed)
    judge = make_trainer(setting, anchor.copy())
    swarm = DataParallel(setting) if variant.method == "data-parallel" else Swarm(setting)
    tally, curve, every = swarm.tally, [], max(1, variant.tokens // CURVE_POINTS)
    try:
        for anchor in swarm:
            if tally.tokens_folded >= len(curve) * every:
                loss = judge.evaluate(anchor, few_NT)
                curve.append(Point(tally.round, tally.tokens_folded, tally.bits_sent, loss))
        loss = judge.evaluate(anchor, many_NT)
    except ArithmeticError:
        loss = float("inf")
    curve.append(Point(tally.round, tally.tokens_folded, tally.bits_sent, loss))
    return Result(
        variant=variant.plain,
        run=run_key(variant),
        code=code,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - begin_s, 1),
        parameters=int(np.size(anchor)),
        rounds=tally.round,
        tokens_trained=tally.tokens_trained,
        tokens_folded=tally.tokens_folded,
        bits_per_parameter=tally.bits_sent / max(tally.round, 1) / np.size(anchor),
        missed=tally.missed,
        refused=tally.refused,
        left_out=tally.left_out,
        shrunk=tally.shrunk,
        sent_share=tally.sent_share,
        largest_rms=tally.largest_rms,
        loss=loss,
        curve=tuple(curve),
        cpu_s=round(time.process_time() - begin_cpu_s, 1),
    )


def run_all(variants: Sequence[Variant], store: ResultStore, jobs: int, say: Callable[[str], None]) -> int:
    """Run and keep variants, `jobs` at a time. Returns how many of them raised; the others are run all the same.

    What was finished before an interruption is kept, and no process outlives this one. Raises StopNode when a result
    can't be written, or a process of the lab was ended from outside.
    """
    code = code_version()  # now, not when a run ends: the processes have this code loaded
    failed, started = 0, {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        try:
            started = _submit(pool, variants, code, store.folder)
            for count, future in enumerate(as_completed(started), start=1):
                told, is_done = _outcome(future)
                say(f"{count}/{len(started)}  {started[future].name}, seed {started[future].seed}: {told}")
                failed += not is_done
        except BrokenProcessPool:
            left = f"{len(store.missing(variants, code))} runs are not done, the same command goes on with them"
            raise StopNode(f"a process of the lab was ended from outside (no memory left?): {left}") from None
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def _submit(
    pool: ProcessPoolExecutor, variants: Sequence[Variant], code: str, folder: Path
) -> dict[Future[str], Variant]:
    """The pool's processes begin here. They take no Ctrl-C: it is for this process, which ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {pool.submit(_run_and_keep, variant, code, folder): variant for variant in variants}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outcome(future: Future[str]) -> tuple[str, bool]:
    """What there is to say of a run that has ended, and whether it is done. Raises what ends the lab."""
    error = future.exception()
    if error is None:
        return future.result(), True
    if isinstance(error, BrokenProcessPool | StopNode):
        raise error
    return "".join(["failed\n", *traceback.format_exception(error)]).rstrip(), False


def _end_with_parent() -> None:
    """In a process of the pool, which would wait for work for ever: end when the lab does, however it does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _run_and_keep(variant: Variant, code: str, folder: Path) -> str:
    result = ResultStore(folder).keep(variant, code, lambda: run(variant, code))
    if result is None:
        return "left to another lab"
    size = f"{result.bits_per_parameter:.3f} bits/parameter"
    return f"{result.loss:.4f} nats/byte, {size}, {result.seconds:.0f} s ({result.cpu_s:.0f} s of work)"
