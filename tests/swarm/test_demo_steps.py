"""The demo's steps with fake nodes: processes that only pretend to train, so that every way to fail can be shown."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tscale.node.demo import DemoFailed, DemoOptions, run_demo
from tscale.protocol.errors import PortInUse

pytestmark = pytest.mark.process

FAKES = DemoOptions(nodes=2, tokens=60_000, seed_value=3, limit_s=120.0, node_module="tests.helpers.fake_node")


@pytest.fixture(autouse=True)
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_kills_one_joins_one_and_judges(own_temp: Path) -> None:
    said: list[str] = []
    report = run_demo(FAKES, said.append)
    # the fakes' "final model" is no better; everything else is as it should be
    assert len(report.failures) == 2
    assert report.failures[0].startswith("the held-out loss fell from")
    assert report.failures[1].startswith("logs are in ")
    assert report.digests_equal
    assert (report.killed, report.joiner) == ("node-2", "node-3")
    assert report.tokens >= 60_000
    assert report.bits_per_parameter == pytest.approx(8 * 1000 / 16_000)
    steps = [line.split(":")[0] for line in said if not line.startswith("round")]
    assert steps[1:] == ["dashboard", "node-2 was killed with SIGKILL", "node-3 joins"]
    assert said[1].startswith("dashboard: http://127.0.0.1:")
    assert tokens_before(said, "SIGKILL") >= 20_000
    assert tokens_before(said, "joins") >= 30_000


def tokens_before(said: list[str], what: str) -> int:
    """The tokens in the last line of progress before the line with `what`."""
    line = said[next(index for index, line in enumerate(said) if what in line) - 1]
    return int(line.split(" contributions, ")[1].split(" ")[0].replace(",", ""))


def test_a_node_that_drifts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULT", "node-3:drift")
    report = run_demo(FAKES, lambda line: None)
    assert not report.digests_equal
    assert "have different states after the same manifest" in report.failures[0]


def test_a_node_that_crashes_ends_the_demo_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULT", "node-1:crash")
    with pytest.raises(DemoFailed, match=r"node-1 ended early with exit code 1: the fake crashed \(logs are in"):
        run_demo(FAKES, lambda line: None)


def test_a_process_left_behind_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULT", "node-1:linger")
    monkeypatch.setattr("tscale.node.demo_processes.GONE_TIMEOUT_S", 0.5)
    report = run_demo(FAKES, lambda line: None)
    (left,) = [failure for failure in report.failures if failure.endswith("is still there")]
    psutil.Process(int(left.split()[1])).kill()


def test_the_safety_limit_is_a_failure() -> None:
    options = DemoOptions(nodes=1, tokens=10**9, limit_s=4.0, node_module="tests.helpers.fake_node")
    with pytest.raises(DemoFailed, match="safety limit of 4 s"):
        run_demo(options, lambda line: None)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_ending_the_demo_ends_all_its_processes(number: signal.Signals, code: int, own_temp: Path) -> None:
    script = (
        "import sys; from tscale.node import demo; from tscale.node.cli.app import run_command\n"
        "real = demo.DemoOptions\n"
        "import tscale.node.cli.demo as command\n"
        "command.DemoOptions = lambda *args: real(*args[:2], node_module='tests.helpers.fake_node')\n"
        "sys.exit(run_command(['demo', '--tokens', '1000000000', '--json']))"
    )
    env = {**os.environ, "TMPDIR": str(own_temp)}
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any(line.startswith("round") for line in lines)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 5
    process.send_signal(number)
    assert process.wait(30) == code
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    process.stderr.close()
    if number is not signal.SIGKILL:
        assert [path for path in own_temp.iterdir() if path.name.startswith("tscale-demo-")] == []


def test_a_busy_port_is_told_before_anything_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 is in use"):
            run_demo(replace(FAKES, dashboard_port=port), lambda line: None)
