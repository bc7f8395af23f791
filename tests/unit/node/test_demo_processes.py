"""The demo's processes: their lines are read, a kill leaves nothing behind unnoticed, and all of them end."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from tscale.node.demo_processes import Child, ChildGroup

WAIT_S = 30.0


def sleeper(group: ChildGroup, name: str, before: str = "") -> Child:
    """A process that runs `before`, says it is up, and then does nothing for a minute."""
    code = f'import time\n{before}\nprint(\'{{"event": "ready"}}\', flush=True)\ntime.sleep(60)'
    return group.start(name, "timeit", ["-n", "1", "-r", "1", code])


def wait_for_ready(child: Child) -> None:
    deadline = time.monotonic() + WAIT_S
    while not child.events():
        assert time.monotonic() < deadline, child.last_words()
        time.sleep(0.01)


def test_everything_is_stopped_and_gone(tmp_path: Path) -> None:
    with ChildGroup(tmp_path) as group:
        child = sleeper(group, "one")
        wait_for_ready(child)
        assert group.wait_until_gone(0.0) == [child.process.pid]
        problems = group.stop_all()
        assert not child.running
        assert group.wait_until_gone() == []
    # a process that SIGTERM ends without a word did not end in order
    assert problems == ["one ended with exit code -15: "]


def test_grandchild_that_outlives_a_kill_is_seen(tmp_path: Path) -> None:
    spawn = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    with ChildGroup(tmp_path) as group:
        child = sleeper(group, "parent", spawn)
        wait_for_ready(child)
        group.kill(child)
        (left,) = group.wait_until_gone(0.2)
        assert left != child.process.pid
        assert group.stop_all() == []
        psutil.Process(left).kill()
        assert group.wait_until_gone() == []


def test_leaving_the_context_by_an_error_stops_all(tmp_path: Path) -> None:
    group = ChildGroup(tmp_path)
    try:
        with group:
            child = sleeper(group, "one")
            wait_for_ready(child)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not child.running


def test_lines_that_are_not_events_are_left_out(tmp_path: Path) -> None:
    out, err = tmp_path / "x.out", tmp_path / "x.err"
    with ChildGroup(tmp_path) as group:
        child = group.start("x", "this", [])
        assert child.process.wait(WAIT_S) == 0
        out.write_text('noise\n{"event": "ready", "addrs": ["a"]}\n[1]\n{"event": "rou')
        err.write_text("first\nlast words\n\n")
        assert child.events() == [{"event": "ready", "addrs": ["a"]}]
        assert child.last_words() == "last words"


def test_missing_module_is_a_problem_with_its_reason(tmp_path: Path) -> None:
    with ChildGroup(tmp_path) as group:
        child = group.start("x", "tscale.no_such_module", [])
        child.process.wait(WAIT_S)
        (problem,) = group.stop_all()
    assert problem.startswith("x ended with exit code 1: ")
    assert "no_such_module" in problem
