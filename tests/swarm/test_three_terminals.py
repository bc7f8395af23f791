"""What the README says of three terminals: create, join, join; the creator dies; the same command brings it back."""

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
from tscale.node.specs import demo_spec, shipped_book_path

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

WAIT_S = 90.0


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildGroup]:
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    (tmp_path / "logs").mkdir()
    (tmp_path / "book.txt").write_bytes(shipped_book_path().read_bytes()[:300_000])
    with ChildGroup(tmp_path / "logs") as made:
        yield made


def wait_for(what: Callable[[], object], said: str, *children: Child) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        for child in children:
            assert child.running, f"{child.name} ended: {child.last_words()}"
        assert time.monotonic() < deadline, f"{said} did not happen within {WAIT_S:.0f} s"
        time.sleep(0.1)


def create(group: ChildGroup, tmp_path: Path, name: str) -> Child:
    data = str(tmp_path / "book.txt")
    args = ["create", "--name", "ours", "--data", data, "--preset", "nano", "--host", "127.0.0.1", "--json"]
    return group.start(name, "tscale.node.cli", args)


def link_of(child: Child) -> str | None:
    return next((str(event["link"]) for event in child.events() if event.get("event") == "ready"), None)


def peers_of(folder: Path) -> int:
    status = read_status(folder)
    return 0 if status is None else count_alive(status)


def last_round(folder: Path) -> int:
    return max(read_rounds(folder / "rounds.jsonl"), default=-1)


def test_creator_is_killed_the_others_go_on_and_it_comes_back(group: ChildGroup, tmp_path: Path) -> None:
    creator = create(group, tmp_path, "creator")
    wait_for(lambda: link_of(creator), "the link", creator)
    link = link_of(creator)
    assert link is not None
    joiners = [
        group.start(name, "tscale.node.cli", ["join", "--swarm", link, "--host", "127.0.0.1", "--json"])
        for name in ("second", "third")
    ]
    swarm_id = link.removeprefix("tscale://").partition("?")[0]
    base = tmp_path / "XDG_DATA_HOME" / "tscale"
    folders = [base / swarm_id, base / f"{swarm_id}-2", base / f"{swarm_id}-3"]
    wait_for(lambda: all(last_round(folder) >= 0 for folder in folders), "folds of all three", creator, *joiners)

    group.kill(creator)
    died_at = last_round(folders[0])
    own = {pid for pid, _ in creator.tree}
    wait_for(lambda: not own & set(group.wait_until_gone(0.0)), "the end of the creator's processes", *joiners)
    wait_for(lambda: min(map(last_round, folders[1:])) > died_at + 3, "rounds without the creator", *joiners)

    back = create(group, tmp_path, "back")
    wait_for(lambda: last_round(folders[0]) > died_at + 3, "the creator's catching up", back, *joiners)
    assert group.stop_all() == []
    assert group.wait_until_gone() == []
    # the last rounds of nodes that stop together may be cut off anywhere
    rounds = {folder.name: settled(settled(read_rounds(folder / "rounds.jsonl"))) for folder in folders}
    compared, differences = compare_rounds(rounds)
    assert differences == []
    assert compared >= 4


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
    began_s = time.monotonic()
    for child in (first, second):
        child.process.send_signal(signal.SIGINT)
    assert [child.process.wait(30) for child in (first, second)] == [0, 0]
    assert time.monotonic() - began_s < 10.0
    assert group.wait_until_gone() == []
    for folder in folders:
        checkpoint = load_checkpoint(folder / "checkpoint")
        assert checkpoint is not None
        assert checkpoint.note is None
        assert checkpoint.meta["head"]["round"] > met_at
    _, differences = compare_rounds({f.name: settled(settled(read_rounds(f / "rounds.jsonl"))) for f in folders})
    assert differences == []
    assert (first.err_path.read_text(), second.err_path.read_text().count("\n")) == ("", 1)
