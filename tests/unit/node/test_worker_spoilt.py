"""Steps, weights and progress that are not finite: left out, not counted, not sent, and healed by a fold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.worker_bench import (
    GENESIS,
    Bench,
    open_bench,
)
from tscale.node.worker import messages as m
from tscale.node.worker.process import failure
from tscale.protocol.errors import RestartWorker, SkipRound


class SomeStepsFail:
    """A trainer some of whose steps, by number, are left out."""

    def __init__(self, trainer: Any, failing: set[int]) -> None:
        self.trainer, self.failing, self.done = trainer, failing, 0

    def step(self, tokens: np.ndarray, lr_scale: float) -> float:
        self.done += 1
        return float("nan") if self.done in self.failing else self.trainer.step(tokens, lr_scale)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)


def failures(bench: Bench) -> list[str]:
    return [event.message for event in bench.events if isinstance(event, m.Failed)]


def test_steps_that_were_left_out_do_not_count_and_are_said_once(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    session, inner = bench.session, bench.session.parts.kernels.inner
    session.trainer = SomeStepsFail(session.trainer, {2, 3, 5, *range(7, 14)})
    losses = bench.steps(14)
    assert [i for i, loss in enumerate(losses, 1) if not np.isfinite(loss)] == [2, 3, 5, *range(7, 14)]
    # seven in a row are not yet too many, and no batch is trained on twice
    assert session.may_step() and session.base_steps == 14 and session.skipped.total == 10
    assert session.tally.tokens == session.meter.tokens == 4 * inner.batch * inner.context
    assert len(failures(bench)) == 1 and "not finite" in failures(bench)[0]
    closed = bench.close(0, GENESIS)
    assert closed.steps == 4 and closed.tokens == 4 * inner.batch * inner.context and np.isfinite(closed.loss)


def test_many_steps_left_out_in_a_row_skip_the_round_and_start_from_the_anchor(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    bench.steps(2)
    bench.close(0, GENESIS)
    bench.steps(1)
    bench.session.replica.local[:] = np.nan
    bench.steps(7)
    assert bench.session.may_step()
    bench.steps(1)
    assert not bench.session.may_step() and "8 steps in a row" in failures(bench)[-1]
    with pytest.raises(SkipRound, match="diverged"):
        bench.close(1, GENESIS)
    assert bench.session.replica.local.tobytes() == bench.session.replica.anchor.tobytes()
    assert not bench.session.replica.residual.any()
    assert bench.session.may_step() and np.isfinite(bench.steps(2)).all()
    assert bench.close(2, GENESIS).steps == 2


def test_a_machine_that_computes_nothing_finite_ends_its_worker_with_a_reason(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    bench.session.trainer = SomeStepsFail(bench.session.trainer, set(range(1, 9)) | set(range(12, 99)))
    bench.steps(8)
    with pytest.raises(SkipRound):
        bench.close(0, GENESIS)
    # three good steps: what stopped training is over, and the next time is a first time again
    bench.steps(3 + 8)
    assert not bench.session.may_step()
    with pytest.raises(SkipRound):
        bench.close(1, GENESIS)
    bench.steps(7)
    with pytest.raises(RestartWorker, match="also after starting over") as error:
        bench.steps(1)
    assert failure(error.value) == m.Failed("device", str(error.value))


def test_weights_that_are_not_finite_without_a_loss_to_show_it_are_not_sent(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    bench.steps(2)
    bench.session.replica.local[5] = np.inf
    with pytest.raises(SkipRound, match="diverged"):
        bench.close(0, GENESIS)
    assert np.isfinite(bench.steps(1)).all()


def test_a_fold_heals_a_spoilt_round_too(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    bench.steps(2)
    path = bench.close(0, GENESIS).path
    bench.session.replica.local[:] = np.nan
    bench.steps(8)
    assert not bench.session.may_step()
    bench.fold(0, GENESIS, (path, 1.0))
    assert bench.session.may_step()
    assert bench.session.replica.local.tobytes() == bench.session.replica.anchor.tobytes()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
