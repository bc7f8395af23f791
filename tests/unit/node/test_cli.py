"""How every error becomes one line and an exit code."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_daemon import ADDR, LINK, PEER, FakeDaemon, one_line
from tscale.node.cli import app, logfile
from tscale.node.cli.app import find_known, run_command
from tscale.node.instances import find_folders
from tscale.node.specs import demo_spec, shipped_book_path
from tscale.protocol.errors import BadInput, DiskFull, PortInUse, RefuseFrame, SkipRound, StateInUse, StopNode

pytestmark = pytest.mark.usefixtures("own_places")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["join"], "Missing option '--swarm'"),
        (["jion"], "No such command"),
        (["join", "--swarm", "x", "--prot", "1"], "No such option"),
        (["join", "--swarm", "demo", "--port", "99999"], "65535"),
        (["join", "--swarm", "ours"], "is not a swarm id"),
        (["join", "--swarm", "https://example.org"], "a swarm link starts with tscale://"),
        (["join", "--swarm", LINK.replace(PEER, PEER[:-1])], "wrong peer id"),
        (["join", "--swarm", LINK + ADDR], "two addresses pasted as one"),
        (["join", "--swarm", LINK, "--seed", ADDR + ADDR], "two addresses pasted as one"),
        (["join", "--swarm", LINK, "--seed", "/ip4/127.0.0.1/tcp/4001"], "names no peer"),
        (["join", "--swarm", "./missing.bin"], "can't read missing.bin"),
        (["create", "--name", "ours", "--data", "missing.txt"], "missing.txt does not exist"),
        (["create", "--name", "ours", "--data", "."], "is a directory"),
        (["create", "--name", "Ours!", "--data", str(shipped_book_path())], "its name must be"),
        (["create", "--name", "ours", "--data", str(shipped_book_path()), "--preset", "huge"], "there is no preset"),
        (["create", "--name", "ours", "--data", str(shipped_book_path()), "--round-seconds", "0"], "rounds.length_s"),
        (["demo", "--nodes", "0"], "--nodes is 0"),
        (["demo", "--seed-value", str(1 << 63)], "--seed-value"),
        (["bench", "codec", "--density", "nan"], "--density is nan"),
        (["bench", "codec", "--density", "1e-9"], "--density is 1e-09, it must be from 1/4096"),
        (["bench", "fold", "--threads", "257"], "--threads"),
        (["create", "--name", "ours", "--data", "/dev/zero"], "/dev/zero is a device or a pipe"),
        (["join", "--swarm", "a" * 5000], "is not a swarm id"),
        (["join", "--swarm", "a" * 300 + "/b"], "can't read"),
        (["status", "--swarm", "ours-" + "b" * 26], "there is no node of"),
        (["leave", "--swarm", "demo"], "there is no node of demo"),
        (["identity", "export", "--swarm", "demo", "key"], "there is no node of demo"),
        (["identity", "import", "--swarm", "demo", "missing.key"], "there is no key file missing.key"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str], daemon: FakeDaemon
) -> None:
    assert run_command(argv) == 2
    assert says in one_line(capsys)
    assert daemon.options is None


@pytest.mark.parametrize(
    ("argv", "see"),
    [
        ([], "a command is missing. (see tscale-node --help)"),
        (["join", "--swarm", "x", "--prot", "1"], "(see tscale-node join --help)"),
        (["identity", "export", "--swarm"], "(see tscale-node identity export --help)"),
        (["--swarm"], "(see tscale-node --help)"),
    ],
)
def test_a_usage_error_names_the_help_of_the_command_that_was_typed(
    argv: list[str], see: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(argv) == 2
    assert one_line(capsys).endswith(f"{see}\n")


@pytest.mark.parametrize("content", [b"", bytes(range(256)) * 8])
def test_empty_and_binary_data_are_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], daemon: FakeDaemon
) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    assert run_command(["create", "--name", "ours", "--data", str(path)]) == 2
    assert str(path) in one_line(capsys)


def test_spec_file_with_other_contents_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], daemon: FakeDaemon
) -> None:
    path = tmp_path / "spec.bin"
    path.write_bytes(demo_spec().to_bytes()[:-1])
    assert run_command(["join", "--swarm", str(path)]) == 2
    assert "is not a swarm spec" in one_line(capsys)


def test_unknown_config_key_names_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], daemon: FakeDaemon
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[network]\nprot = 4001\n")
    assert run_command(["join", "--swarm", "demo", "--config", str(path)]) == 2
    assert 'did you mean "port"?' in one_line(capsys)


def test_stored_spec_of_another_swarm_is_refused(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "XDG_DATA_HOME" / "tscale" / ("ours-" + "a" * 26)
    folder.mkdir(parents=True)
    (folder / "spec.bin").write_bytes(demo_spec().to_bytes())
    assert run_command(["join", "--swarm", LINK]) == 2
    assert "is the spec of demo-" in one_line(capsys)


@pytest.mark.parametrize("argv", [["create", "--name", "ours"], ["join", "--swarm", "demo"]])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ('device = "cuda"', 'compute.device is "cuda", but torch finds no card'),
        ("ram_bytes = 1000000000", "can't train the swarm's model: main memory: "),
        ("offload_slots = 1", "compute.offload_slots is 0 or at least 2"),
    ],
)
def test_settings_that_a_worker_would_refuse_are_refused_before_there_is_a_link(
    argv: list[str],
    settings: str,
    says: str,
    daemon: FakeDaemon,
    book: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f"[compute]\n{settings}\n")
    given = ["--data", str(book)] if argv[0] == "create" else []
    assert run_command([*argv, *given, "--config", str(config)]) == 2
    assert says in one_line(capsys) and daemon.options is None
    if argv[0] == "create":
        assert not find_folders(tmp_path / "XDG_DATA_HOME" / "tscale", None)
    assert run_command(["seed", "--swarm", "demo"]) == 0


@pytest.mark.parametrize("error", [PortInUse("port 5 is taken"), DiskFull("no space"), StateInUse("locked")])
def test_what_stops_the_daemon_keeps_its_code(
    error: StopNode, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(events: Any) -> int:
        raise ExceptionGroup("tasks", [ValueError("noise"), error])

    daemon.act = stop
    assert run_command(["join", "--swarm", "demo"]) == error.exit_code
    assert one_line(capsys) == f"tscale-node: {error}\n"


def test_unexpected_error_is_one_line_and_its_traceback_is_in_the_log(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(events: Any) -> int:
        raise ZeroDivisionError("of two\nlines")

    daemon.act = fail
    assert run_command(["join", "--swarm", "demo"]) == 1
    line = one_line(capsys)
    assert "ZeroDivisionError: of two lines" in line
    log = daemon.options.swarm_dir / "log" / "node.log"
    assert str(log) in line
    assert "Traceback" in log.read_text()


def test_unexpected_error_without_a_node_goes_to_the_users_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("early")

    monkeypatch.setattr(app, "build_app", fail)
    assert run_command(["status"]) == 1
    assert str(tmp_path) in one_line(capsys)


@pytest.mark.parametrize("how", [KeyboardInterrupt, asyncio.CancelledError])
def test_interrupt_is_130_and_one_line(
    how: type[BaseException], daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(events: Any) -> int:
        raise how

    daemon.act = interrupt
    assert run_command(["join", "--swarm", "demo"]) == 130
    assert one_line(capsys) == "tscale-node: interrupted\n"


def test_known_errors_are_found_in_groups() -> None:
    group = ExceptionGroup("a", [SkipRound("skip"), ExceptionGroup("b", [BadInput("bad")])])
    assert str(find_known(group)) == "bad"
    assert str(find_known(ExceptionGroup("a", [RefuseFrame("frame")]))) == "frame"
    assert find_known(ExceptionGroup("a", [ValueError("x")])) is None


def test_repeated_warnings_are_counted() -> None:
    repeats = logfile.CountRepeats(window_s=60.0)

    def record(at_unix_s: float, value: int) -> logging.LogRecord:
        made = logging.LogRecord("net", logging.WARNING, "x.py", 1, "dial failed %d", (value,), None)
        made.created = at_unix_s
        return made

    passed = [item for at in range(200) if repeats.filter(item := record(float(at), at))]
    assert [item.getMessage() for item in passed] == [
        "dial failed 0",
        "dial failed 60 (and 59 more like it before)",
        "dial failed 120 (and 59 more like it before)",
        "dial failed 180 (and 59 more like it before)",
    ]
