"""A worker's checkpoints: exact resume, damage, and somebody else's file."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.worker_bench import GENESIS, manifest, open_bench, run_rounds, tiny
from tscale.node.checkpoint import NewArray
from tscale.node.planning.storage import ROUND_VECTORS
from tscale.node.worker import messages as m
from tscale.node.worker import resume

A_CHECKPOINTS_COPY = 1


def newest_first(folder: Path) -> list[Path]:
    files = [path for path in (folder / "checkpoint").rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def test_a_resumed_worker_does_exactly_what_it_would_have_done(tmp_path: Path) -> None:
    spec = tiny(0.6)
    straight = open_bench(tmp_path / "straight", spec)
    expected, base = run_rounds(straight, 0, 3, GENESIS)
    expected += straight.steps(2)
    more, _ = run_rounds(straight, 3, 5, base)

    broken = open_bench(tmp_path / "broken", spec)
    run_rounds(broken, 0, 3, GENESIS)
    broken.steps(2)
    assert broken.session.handle(m.Save()).manifest == base
    broken.steps(4)  # lost by the kill
    resumed = open_bench(tmp_path / "broken", spec)
    assert resumed.ready.resumed and resumed.ready.note == ""
    assert (resumed.ready.manifest, resumed.ready.round, resumed.ready.total_tokens) == (base, 2, 3 * 384)
    assert resumed.ready.previous_manifest == manifest(1)
    assert resumed.session.tally == replace(resumed.session.tally, steps=4, tokens=4 * 128)
    again, _ = run_rounds(resumed, 3, 5, base)
    assert again == more
    assert resumed.digests() == straight.digests()


def test_a_damaged_checkpoint_falls_back_and_says_so(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    _, base = run_rounds(bench, 0, 1, GENESIS)
    bench.session.handle(m.Save())
    older = bench.digests()
    run_rounds(bench, 1, 2, base)
    bench.session.handle(m.Save())
    newest = max(newest_first(tmp_path), key=lambda path: (path.stat().st_mtime_ns, path.stat().st_size))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    fallen = open_bench(tmp_path)
    assert fallen.ready.resumed and fallen.ready.note
    assert (fallen.ready.manifest, fallen.digests()) == (base, older)
    for file in newest_first(tmp_path):
        file.write_bytes(b"nonsense")
    lost = open_bench(tmp_path)
    assert not lost.ready.resumed and lost.ready.note and lost.ready.manifest == GENESIS
    assert np.isfinite(lost.steps(1)).all()


def test_a_resume_takes_no_more_vectors_than_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts what training holds; a start that took more would fail on a machine that just trained."""
    bench = open_bench(tmp_path)
    run_rounds(bench, 0, 2, GENESIS)
    bench.session.handle(m.Save())
    made: list[int] = []

    def counting(*args: Any) -> NewArray:
        def new_array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
            made.append(math.prod(shape))
            return np.empty(shape, dtype)

        return new_array

    monkeypatch.setattr(resume, "make_arrays", counting)
    resumed = open_bench(tmp_path)
    assert resumed.ready.resumed and resumed.digests() == bench.digests()
    assert made.count(bench.session.replica.layout.numel) <= ROUND_VECTORS + A_CHECKPOINTS_COPY


@pytest.mark.parametrize("where", [-1, -2_000])
def test_vectors_that_a_damaged_checkpoint_was_read_into_begin_again(tmp_path: Path, where: int) -> None:
    bench = open_bench(tmp_path)
    run_rounds(bench, 0, 1, GENESIS)
    bench.session.handle(m.Save())
    for file in newest_first(tmp_path):
        data = bytearray(file.read_bytes())
        data[where] ^= 1
        file.write_bytes(data)
    lost, fresh = open_bench(tmp_path), open_bench(tmp_path / "fresh")
    assert not lost.ready.resumed and lost.ready.note and lost.ready.manifest == GENESIS
    assert run_rounds(lost, 0, 1, GENESIS)[0] == run_rounds(fresh, 0, 1, GENESIS)[0]
    for name in ("local", "residual", "start"):
        assert np.array_equal(*(getattr(one.session.replica, name) for one in (lost, fresh)))


def test_a_checkpoint_of_another_swarm_is_not_used(tmp_path: Path) -> None:
    bench = open_bench(tmp_path)
    run_rounds(bench, 0, 1, GENESIS)
    bench.session.handle(m.Save())
    other = open_bench(tmp_path, replace(tiny(), seed=2))
    assert not other.ready.resumed and "does not fit this swarm" in other.ready.note


def test_checkpoints_follow_the_folds_by_themselves(tmp_path: Path) -> None:
    bench = open_bench(tmp_path, checkpoint_every_folds=2)
    base, saves = GENESIS, []
    for r in range(4):
        _, base = run_rounds(bench, r, r + 1, base)
        bench.session.after_command()
        saves.append([event.manifest for event in bench.events if isinstance(event, m.Saved)])
    assert saves == [[], [manifest(1)], [manifest(1)], [manifest(1), manifest(3)]]
