"""Running variants: one after the other in a process, and several processes side by side."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from tests.bench.convergence.results import Point, Result, ResultStore, code_version, run_key
from tests.bench.convergence.swarm import DataParallel, Swarm, make_trainer, set_up
from tests.bench.convergence.variant import Variant
from tscale.kernels.init import init_state

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


def run_all(variants: Sequence[Variant], store: ResultStore, jobs: int, say: Callable[[str], None]) -> None:
    """Run and keep variants, `jobs` at a time. What was finished before an interruption is kept."""
    code = code_version()  # now, not when a run ends: the processes have this code loaded
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = {pool.submit(_run_and_keep, variant, code, store.folder): variant for variant in variants}
        try:
            for count, future in enumerate(as_completed(started), start=1):
                say(f"{count}/{len(started)}  {started[future].name}, seed {started[future].seed}: {future.result()}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run_and_keep(variant: Variant, code: str, folder: Path) -> str:
    result = run(variant, code)
    ResultStore(folder).write(result)
    size = f"{result.bits_per_parameter:.3f} bits/parameter"
    return f"{result.loss:.4f} nats/byte, {size}, {result.seconds:.0f} s ({result.cpu_s:.0f} s of work)"
