"""`join --swarm demo` in two terminals: alone, then together, then Ctrl-C in both."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tscale.node.checkpoint import load_checkpoint
from tscale.node.demo import read_status
from tscale.node.demo_processes import Child, ChildGroup
from tscale.node.demo_report import compare_rounds, read_rounds, settled
from tscale.node.live import count_alive
from tscale.node.specs import demo_spec

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

WAIT_S = 150.0


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildGroup]:
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    (tmp_path / "logs").mkdir()
    with ChildGroup(tmp_path / "logs") as made:
        yield made


def wait_for(what: Callable[[], object], said: str, *children: Child) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        for child in children:
            assert child.running, f"{child.name} ended: {child.last_words()}"
        assert time.monotonic() < deadline, f"{said} did not happen within {WAIT_S:.0f} s"
        time.sleep(0.1)


def peers_of(folder: Path) -> int:
    status = read_status(folder)
    return 0 if status is None else count_alive(status)


def last_round(folder: Path) -> int:
    return max(read_rounds(folder / "rounds.jsonl"), default=-1)


def test_demo_nodes_train_alone_find_each_other_and_end_at_ctrl_c(group: ChildGroup, tmp_path: Path) -> None:
    args = ["join", "--swarm", "demo", "--host", "127.0.0.1"]
    base = tmp_path / "XDG_DATA_HOME" / "tscale"
    folders = [base / demo_spec().swarm_id, base / f"{demo_spec().swarm_id}-2"]
    first = group.start("first", "tscale.node.cli", args)
    wait_for(lambda: last_round(folders[0]) >= 0, "a fold alone", first)
    second = group.start("second", "tscale.node.cli", args)
    wait_for(lambda: min(map(peers_of, folders)) == 2, "each seeing the other", first, second)
    met_at = last_round(folders[0])
    wait_for(lambda: min(map(last_round, folders)) > met_at, "folds of both", first, second)
    group.watch()
    for child in (first, second):
        child.process.send_signal(signal.SIGINT)
    assert [child.process.wait(30) for child in (first, second)] == [0, 0]
    assert group.wait_until_gone() == []
    for folder in folders:
        checkpoint = load_checkpoint(folder / "checkpoint")
        assert checkpoint is not None
        assert checkpoint.note is None
        assert checkpoint.meta["head"]["round"] > met_at
    _, differences = compare_rounds({f.name: settled(settled(read_rounds(f / "rounds.jsonl"))) for f in folders})
    assert differences == []
    assert (first.err_path.read_text(), second.err_path.read_text().count("\n")) == ("", 1)
