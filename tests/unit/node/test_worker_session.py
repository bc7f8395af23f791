"""A worker's session without its process: the plain loop to the bit, folds, snapshots, refusals, divergence."""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from tests.helpers.worker_bench import (
    BOOK,
    DENSE,
    GENESIS,
    PUBLIC,
    SPARSE,
    manifest,
    open_bench,
    tiny,
    worker_config,
)
from tscale.kernels.digest import state_digest
from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerConfig, InnerTrainer, lr_scale
from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.node.data.corpus import ByteCorpus
from tscale.node.worker import messages as m
from tscale.node.worker.gate import StepGate
from tscale.node.worker.resume import open_session
from tscale.protocol.errors import BadInput, DiskFull, RefuseFrame, SkipRound
from tscale.protocol.spec import SwarmSpec


def plain_loop(spec: SwarmSpec, rounds: int, before: int, after: int) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Training alone with an outer step, written from the definition of a round and from nothing of the worker.

    `before` inner steps up to the close, `after` more until the outer step is applied. Returns anchor, local, losses.
    """
    model, inner, outer = ModelConfig(**vars(spec.model)), InnerConfig(**vars(spec.inner)), spec.outer
    corpus = ByteCorpus(BOOK, spec.data.heldout_per_mille)
    anchor = init_state(model, spec.seed)
    momentum = np.zeros_like(anchor)
    local, start = anchor.copy(), anchor.copy()
    trainer = InnerTrainer(model, inner, local, corpus.counts)
    gain = np.float64(spec.codec.rungs[DENSE].gain)
    eta, mu = np.float32(outer.eta), np.float32(outer.mu)
    losses, base, done, total_tokens = [], GENESIS, 0, 0

    def train(count: int) -> None:
        nonlocal done
        for _ in range(count):
            head = b"tscale/1/batch"
            pieces = (head, spec.seed.to_bytes(8, "little"), base, PUBLIC)
            key = blake3(b"".join(len(piece).to_bytes(8, "little") + piece for piece in pieces)).digest()
            batch = corpus.batch(key, done, inner.batch, inner.context)
            losses.append(trainer.step(batch, lr_scale(inner, total_tokens)))
            done += 1

    for r in range(rounds):
        train(before)
        delta, end = start - local, local.copy()
        train(after)
        g = (gain * delta.astype(np.float64)).astype(np.float32)
        momentum = mu * momentum + g
        anchor = anchor - eta * (g + mu * momentum)
        local[:] = anchor + (local - end)
        start = anchor.copy()
        base, done, total_tokens = manifest(r), 0, total_tokens + before * inner.batch * inner.context
    return anchor, local, losses


@pytest.mark.parametrize(("after", "mu"), [(0, 0.0), (0, 0.6), (3, 0.0), (3, 0.6)])
def test_a_swarm_of_one_is_the_plain_loop_to_the_bit(tmp_path: Path, after: int, mu: float) -> None:
    spec = tiny(mu)
    bench, losses, base, tokens = open_bench(tmp_path, spec), [], GENESIS, 0
    for r in range(6):
        losses += bench.steps(7)
        closed = bench.close(r, base, DENSE)
        tokens += 7 * spec.inner.batch * spec.inner.context
        losses += bench.steps(after)
        bench.fold(r, base, (closed.path, spec.codec.rungs[DENSE].gain), tokens=tokens)
        base = manifest(r)
    anchor, local, expected = plain_loop(spec, 6, 7, after)
    assert losses == expected
    assert bench.session.replica.anchor.tobytes() == anchor.tobytes()
    assert bench.session.replica.local.tobytes() == local.tobytes()
    assert not np.array_equal(anchor, init_state(ModelConfig(**vars(spec.model)), spec.seed))


def test_training_reports_what_it_did(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    losses = bench.steps(5)
    closed = bench.close(0, GENESIS)
    assert closed.tokens == 5 * 4 * 32 and closed.steps == 5
    assert closed.loss == sum(losses) / 5 and 2.5 < closed.loss < 3.5
    assert closed.size_bytes == Path(closed.path).stat().st_size
    assert closed.base_state == bench.ready.state_digest
    bench.session.report()
    assert (bench.events[-1].tokens, bench.events[-1].steps, bench.events[-1].loss) == (640, 5, None)


def test_genesis_is_the_same_for_all(tmp_path: Path) -> None:
    one, two = open_bench(tmp_path / "1"), open_bench(tmp_path / "2", public=b"o" * 32)
    assert one.ready == two.ready
    assert (one.ready.manifest, one.ready.round, one.ready.resumed, one.ready.note) == (GENESIS, -1, False, "")
    model = ModelConfig(**vars(tiny().model))
    layout = model_layout(model).with_small_numel(tiny().codec.small_numel)
    assert one.ready.state_digest == state_digest(layout, init_state(model, tiny().seed), None)
    assert one.ready.parameters == layout.numel and one.ready.state_bytes == 4 * layout.numel
    assert one.steps(1) != two.steps(1), "two peers must not train on the same batches"


def test_two_peers_end_a_round_with_the_same_state(tmp_path: Path) -> None:
    peers = [open_bench(tmp_path / str(i), tiny(0.6), public=bytes([i]) * 32) for i in range(2)]
    base = GENESIS
    for r in range(3):
        for i, peer in enumerate(peers):
            peer.steps(2 + i)
        parts = [(peer.close(r, base).path, 1.0 / (1 + i)) for i, peer in enumerate(peers)]
        peers[0].steps(2)
        folded = {peer.fold(r, base, *parts).state_digest for peer in peers}
        assert len(folded) == 1
        base = manifest(r)


def test_verify_tells_a_good_contribution_from_a_bad_one(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    bench.steps(2)
    path = bench.close(0, GENESIS).path
    verify = lambda path, rung: bench.session.handle(m.Verify(str(path), rung))  # noqa: E731
    assert verify(path, SPARSE) == m.Verified(True, "")
    assert not verify(path, SPARSE + 1).ok and not verify(path, DENSE).ok and not verify(path, 99).ok
    damaged = tmp_path / "damaged"
    damaged.write_bytes(Path(path).read_bytes()[:-5])
    assert not verify(damaged, SPARSE).ok
    with pytest.raises(SkipRound, match="can't be read"):  # no fault of its author
        verify(tmp_path / "none", SPARSE)
    with damaged.open("wb") as file:
        file.truncate(tiny().caps.max_blob_bytes + 1)
    assert "over the cap" in verify(damaged, SPARSE).reason


def test_a_bad_manifest_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    bench.steps(2)
    closed = bench.close(0, GENESIS)
    before = bench.digests()
    (tmp_path / "bad").write_bytes(b"tscale")
    nan, inf = float("nan"), float("inf")
    wrong = [(nan, 1.0), (-1.0, 1.0), (0.0, 1.0), (inf, 1.0), (1.0, nan), (1.0, -1.0), (1.0, inf)]
    for parts in [((str(tmp_path / "bad"), 1.0, 1.0),), *(((closed.path, *numbers),) for numbers in wrong)]:
        with pytest.raises(RefuseFrame):
            bench.session.handle(m.Fold(manifest(0), GENESIS, parts, 1, 0))
    with pytest.raises(SkipRound, match="load a snapshot"):
        bench.fold(5, manifest(4), (closed.path, 1.0))
    assert bench.digests() == before and bench.session.head.manifest == GENESIS


def test_a_fork_of_one_round_is_settled_from_the_parent(tmp_path: Path) -> None:
    bench, other = open_bench(tmp_path / "1"), open_bench(tmp_path / "2", public=b"o" * 32)
    paths = []
    for peer in (bench, other):
        peer.steps(2)
        paths.append(peer.close(0, GENESIS).path)
    bench.fold(0, GENESIS, (paths[0], 2.0))
    bench.steps(1)
    both = [(path, 1.0) for path in paths]
    again = bench.fold(1, GENESIS, *both)
    assert again.state_digest == other.fold(1, GENESIS, *both).state_digest
    snapshot = tmp_path / "parent.bin"
    written = bench.session.handle(m.WriteSnapshot(GENESIS, str(snapshot)))
    assert written.state_digest == bench.ready.state_digest
    with pytest.raises(SkipRound):
        bench.session.handle(m.WriteSnapshot(manifest(0), str(snapshot)))


def test_a_snapshot_brings_a_joiner_to_the_same_state(tmp_path: Path) -> None:
    spec = tiny(0.6)
    old, new = open_bench(tmp_path / "1", spec), open_bench(tmp_path / "2", spec, public=b"n" * 32)
    old.steps(3)
    path = old.close(0, GENESIS).path
    folded = old.fold(0, GENESIS, (path, 2.0), tokens=999)
    snapshot = tmp_path / "snapshot"
    written = old.session.handle(m.WriteSnapshot(manifest(0), str(snapshot)))
    assert written == m.SnapshotWritten(old.ready.state_bytes, folded.state_digest)
    new.steps(4)
    new.close(0, GENESIS)
    new.steps(1)
    load = m.Load(manifest(0), str(snapshot), 999, 0, folded.state_digest)
    assert new.session.handle(load) == m.Loaded(manifest(0), folded.state_digest)
    assert new.session.replica.local.tobytes() == old.session.replica.anchor.tobytes()
    assert not new.session.replica.residual.any() and new.session.tally.steps == 0
    parts = [(path, 1.0)]
    assert old.fold(1, manifest(0), *parts).state_digest == new.fold(1, manifest(0), *parts).state_digest


def test_a_wrong_snapshot_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    bench.steps(2)
    good = tmp_path / "good"
    digest = bench.session.handle(m.WriteSnapshot(GENESIS, str(good))).state_digest
    before, data = bench.digests(), good.read_bytes()
    flipped = bytes([data[0] ^ 1]) + data[1:]
    not_finite = np.float32(np.inf).tobytes() + data[4:]
    for wrong in (data[:-4], data + bytes(4), b"", flipped, not_finite):
        good.write_bytes(wrong)
        with pytest.raises(RefuseFrame):
            bench.session.handle(m.Load(manifest(3), str(good), 9, 3, digest))
    with pytest.raises(RefuseFrame):
        bench.session.handle(m.Load(manifest(3), str(tmp_path / "none"), 9, 3, digest))
    assert bench.digests() == before and bench.session.head.manifest == GENESIS


@pytest.mark.parametrize(("r", "forgets"), [(1, False), (2, True)])
def test_a_long_gap_resets_the_inner_momentum(tmp_path: Path, r: int, forgets: bool) -> None:
    bench = open_bench(tmp_path)
    fresh = {name: array.copy() for name, array in bench.session.trainer.state_arrays().items()}
    bench.steps(2)
    snapshot = str(tmp_path / "s")
    bench.session.handle(m.WriteSnapshot(GENESIS, snapshot))
    bench.session.handle(m.Load(manifest(r), snapshot, 9, r))
    now = bench.session.trainer.state_arrays()
    assert all(np.array_equal(now[name], fresh[name]) for name in fresh) == forgets


def test_progress_over_the_norm_bound_is_not_sent(tmp_path: Path) -> None:
    spec = tiny()
    bench = open_bench(tmp_path, replace(spec, caps=replace(spec.caps, max_rms=1e-6)))
    bench.steps(2)
    with pytest.raises(SkipRound, match="too large"):
        bench.close(0, GENESIS)
    assert not list((tmp_path).glob("scratch/*"))


def test_a_close_without_progress_or_at_no_rung_skips_and_loses_nothing(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    with pytest.raises(SkipRound, match="no step"):
        bench.close(0, GENESIS)
    bench.steps(2)
    before = bench.digests()
    with pytest.raises(SkipRound, match="no rung"):
        bench.close(0, GENESIS, 99)
    assert bench.digests() == before
    assert bench.close(0, GENESIS).steps == 2


def test_evaluation_and_generation_do_not_disturb_training(tmp_path: Path) -> None:
    quiet, busy = open_bench(tmp_path / "1"), open_bench(tmp_path / "2", evaluate_fraction=1e9, evaluate_windows=20)
    expected = quiet.steps(6)
    losses = []
    for _ in range(6):
        losses += busy.steps(1)
        busy.session.evaluate_a_little()
        busy.session.handle(m.Generate("Call me", 3, seed=1))
        busy.session.handle(m.Evaluate(9))
    assert losses == expected
    assert quiet.digests() == busy.digests()
    (evaluated,) = [event for event in busy.events if isinstance(event, m.Evaluated)]
    assert (evaluated.manifest, evaluated.round) == (GENESIS, -1)
    assert evaluated.loss == pytest.approx(busy.session.handle(m.Evaluate(20)).loss)
    assert 2.5 < evaluated.loss < 3.5


def test_generation_is_a_function_of_seed_and_anchor(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    text = bench.session.handle(m.Generate("Call me Ishmael. ", 20, seed=3)).text
    bench.steps(2)
    assert bench.session.handle(m.Generate("Call me Ishmael. ", 20, seed=3)).text == text
    assert bench.session.handle(m.Generate("Call me Ishmael. ", 20, seed=4)).text != text
    assert bench.session.handle(m.Generate("", 5, seed=3)).text


def test_evaluation_stays_within_its_share_of_the_time(tmp_path: Path) -> None:
    ticks = iter(range(10**6))
    bench = open_bench(tmp_path, evaluate_windows=64)
    evaluator = bench.session._evaluator
    evaluator._clock = lambda: float(next(ticks))  # every look at the clock is a second later: a piece takes one
    done_at = [s for s in range(1, 2000) if evaluator.advance(float(s)) is not None]
    assert done_at == [400], "eight pieces of a second each are 2 % of 400"


def test_pausing_stops_steps_and_nothing_else(tmp_path: Path) -> None:
    bench = open_bench(tmp_path, paused=True)
    assert not bench.session.may_step()
    bench.session.handle(m.SetPaused(False))
    assert bench.session.may_step()
    bench.steps(1)
    bench.session.handle(m.SetPaused(True))
    assert bench.close(0, GENESIS).steps == 1 and not bench.session.may_step()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spec": b"nonsense"}, "spec can't be used"),
        ({"data": ()}, "1 shards, 0 files"),
        ({"data": ("/nowhere/book",)}, "can't be read"),
        ({"data": (__file__,)}, "bytes, the swarm's shard has 60000"),
    ],
)
def test_a_config_that_can_not_work_is_bad_input(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        open_session(replace(worker_config(tmp_path), **change), lambda work: work(), lambda event: None)


def test_training_goes_on_while_the_job_thread_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold that takes as long as it likes: training steps meanwhile, and stops only to move the weights."""
    bench = open_bench(tmp_path)
    gate, entered, finish = StepGate(), threading.Event(), threading.Event()
    bench.session._between = gate.run
    bench.steps(1)
    bench.session.replica.cut()
    real_fold: Callable[..., Any] = bench.session.replica.fold

    def slow_fold(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        assert finish.wait(60)
        return real_fold(*args, **kwargs)

    monkeypatch.setattr(bench.session.replica, "fold", slow_fold)
    job = threading.Thread(target=lambda: bench.fold(0, GENESIS))
    job.start()
    assert entered.wait(60)
    for _ in range(5):
        gate.serve()
        bench.steps(1)
    assert bench.session.head.manifest == GENESIS
    finish.set()
    while job.is_alive():
        gate.serve()
        job.join(0.001)
    assert bench.session.head.manifest == manifest(0) and bench.session.base_steps == 0


def test_a_full_disk_at_a_close_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = open_bench(tmp_path)
    bench.steps(2)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(DiskFull, match="no space left"):
        patch.setattr(os, "replace", full)
        bench.close(0, GENESIS)
    assert not list((tmp_path / "scratch").iterdir())
    bench.steps(1)
    assert Path(bench.close(1, GENESIS).path).exists()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
