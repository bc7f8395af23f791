"""Precision is a local matter: workers that train in different formats fold to the same bits."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.worker_bench import GENESIS, SPARSE, Bench, manifest, open_bench
from tscale.node.worker import messages as m
from tscale.node.worker.kernel_config import training_machine
from tscale.protocol.errors import BadInput


def test_the_worker_says_what_it_trains_in(tmp_path: Path) -> None:
    ready = open_bench(tmp_path / "a").ready
    assert (ready.precision.split(":")[0], ready.precision_warning) == ("fp32", "")
    ready = open_bench(tmp_path / "b", precision="fp8").ready
    assert ready.precision == "fp8-block (emulation): fp8 was asked for"
    assert training_machine().device == "cpu"


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="precision must be one of auto, fp32, bf16, fp8, int8"):
        open_bench(tmp_path, precision="fp4")


@pytest.mark.parametrize("precision", ["fp8", "bf16", "int8"])
def test_peers_in_different_precisions_train_differently_and_fold_to_the_same_digest(
    tmp_path: Path, precision: str
) -> None:
    plain, short = open_bench(tmp_path / "fp32"), open_bench(tmp_path / precision, precision=precision)
    base = GENESIS
    for r in range(2):
        closed: list[m.Closed] = []
        losses: list[list[float]] = []
        for bench in (plain, short):
            losses.append(bench.steps(4))
            closed.append(bench.close(r, base, SPARSE))
            bench.steps(1)
        assert losses[0] != losses[1] and np.allclose(losses[0], losses[1], atol=0.05)
        assert closed[0].base_state == closed[1].base_state
        assert Path(closed[0].path).read_bytes() != Path(closed[1].path).read_bytes()
        parts = tuple((part.path, 1.0) for part in closed)
        states = [bench.fold(r, base, *parts).state_digest for bench in (plain, short)]
        assert states[0] == states[1]
        base = manifest(r)
    assert anchor(plain) == anchor(short)
    assert short.session.replica.local.dtype == short.session.replica.residual.dtype == np.float32


def anchor(bench: Bench) -> bytes:
    return bench.session.replica.anchor.tobytes()


def test_a_worker_resumes_in_another_precision(tmp_path: Path) -> None:
    first = open_bench(tmp_path, precision="fp8")
    first.steps(3)
    first.session.handle(m.Save())
    again = open_bench(tmp_path, precision="fp32")
    assert again.ready.resumed
    assert again.session.replica.local.tobytes() == first.session.replica.local.tobytes()
