"""The command line around the daemon: what it asks the daemon for, and how every error becomes one line and a code."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tscale.node.cli import app, logfile
from tscale.node.cli.app import find_known, run_command
from tscale.node.instances import find_folders
from tscale.node.specs import demo_spec, shipped_book_path
from tscale.protocol.errors import BadInput, DiskFull, PortInUse, RefuseFrame, SkipRound, StateInUse, StopNode
from tscale.protocol.identity import Identity
from tscale.protocol.links import SwarmLink, format_link

PEER = Identity.from_secret(b"\x05" * 32).peer_id
ADDR = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
LINK = format_link(SwarmLink("ours-" + "a" * 26, (ADDR,)))


class FakeDaemon:
    """Stands where tscale.node.daemon is; `act` is the node's whole life."""

    def __init__(self) -> None:
        self.options: Any = None
        self.act: Callable[[Any], int] = lambda events: 0

    def module(self) -> types.ModuleType:
        module = types.ModuleType("tscale.node.daemon")

        class NodeOptions(types.SimpleNamespace):
            pass

        async def run_node(options: Any, events: Any) -> int:
            self.options = options
            return self.act(events)

        module.NodeOptions = NodeOptions  # type: ignore[attr-defined]
        module.run_node = run_node  # type: ignore[attr-defined]
        return module


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    fake = FakeDaemon()
    monkeypatch.setitem(sys.modules, "tscale.node.daemon", fake.module())
    return fake


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of the user's folders are in the test's own; handlers of the log are taken away again."""
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))


@pytest.fixture(autouse=True)
def no_handlers() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in [item for item in root.handlers if item not in before]:
        root.removeHandler(handler)
        handler.close()


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night. " * 100)
    return path


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error output: exactly one line that starts with the command's name."""
    err = capsys.readouterr().err
    assert err.startswith("tscale-node: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


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


def test_join_demo_needs_nothing_else(daemon: FakeDaemon, tmp_path: Path) -> None:
    assert run_command(["join", "--swarm", "demo"]) == 0
    options = daemon.options
    spec = demo_spec()
    assert (options.swarm_id, options.role, options.seeds) == (spec.swarm_id, "trainer", ())
    assert options.spec == spec
    assert options.dataset_files == (shipped_book_path(),)
    assert options.swarm_dir == tmp_path / "XDG_DATA_HOME" / "tscale" / spec.swarm_id
    assert (options.host, options.port, options.name) == ("0.0.0.0", 0, "")


def test_options_win_over_the_config_file(daemon: FakeDaemon, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('name = "filed"\n[network]\nhost = "10.0.0.1"\nport = 7\n')
    assert run_command(["seed", "--swarm", LINK, "--config", str(path), "--port", "9", "--seed", ADDR]) == 0
    options = daemon.options
    assert (options.role, options.host, options.port, options.name) == ("seed", "10.0.0.1", 9, "filed")
    assert options.seeds == (ADDR,)
    assert options.spec is None
    assert options.config.network.port == 9


def test_second_node_of_a_swarm_takes_a_numbered_folder(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    folders: list[str] = []

    def start_another(events: Any) -> int:
        folders.append(daemon.options.swarm_dir.name)
        return run_inner() if len(folders) < 3 else 0

    def run_inner() -> int:
        # another terminal is another process; a thread of its own has its own event loop as well
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run_command, ["join", "--swarm", "demo"]).result()

    daemon.act = start_another
    assert run_command(["join", "--swarm", "demo"]) == 0
    first = demo_spec().swarm_id
    assert folders == [first, f"{first}-2", f"{first}-3"]
    assert "another node of this swarm runs here" in capsys.readouterr().err
    daemon.act = lambda events: 0
    assert run_command(["join", "--swarm", "demo"]) == 0
    assert daemon.options.swarm_dir.name == first


def test_chosen_state_dir_in_use_is_code_3(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["join", "--swarm", "demo", "--state-dir", str(tmp_path / "here")]
    codes: list[int] = []

    def again(events: Any) -> int:
        codes.append(run_command(argv))
        return 0

    daemon.act = again
    assert run_command(argv) == 0
    assert codes == [3]
    assert "another node" in one_line(capsys)


@pytest.mark.parametrize("error", [PortInUse("port 5 is taken"), DiskFull("no space"), StateInUse("locked")])
def test_what_stops_the_daemon_keeps_its_code(
    error: StopNode, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(events: Any) -> int:
        raise ExceptionGroup("tasks", [ValueError("noise"), error])

    daemon.act = stop
    assert run_command(["join", "--swarm", "demo"]) == error.exit_code
    assert one_line(capsys) == f"tscale-node: {error}\n"


def test_exit_code_of_the_daemon_is_the_commands(daemon: FakeDaemon) -> None:
    daemon.act = lambda events: 130
    assert run_command(["join", "--swarm", "demo"]) == 130


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


def test_ready_prints_the_link_on_its_own_line_and_announces_it_here(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    announced: list[str] = []

    def entries() -> list[Path]:
        return [path for path in (tmp_path / "XDG_RUNTIME_DIR").rglob("*") if path.is_file()]

    def ready(events: Any) -> int:
        events.on_ready(LINK, [ADDR])
        announced.extend(path.read_text() for path in entries())
        return 0

    daemon.act = ready
    assert run_command(["join", "--swarm", "demo"]) == 0
    assert LINK in capsys.readouterr().out.splitlines()
    assert announced == [ADDR]
    assert entries() == []


def test_create_resumes_the_same_swarm_and_new_makes_another(
    daemon: FakeDaemon, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["create", "--name", "ours", "--data", str(book)]
    assert run_command(argv) == 0
    first = daemon.options
    assert first.spec.name == "ours"
    assert first.dataset_files == (book,)
    assert first.spec.data.shards[0].size_bytes == book.stat().st_size
    assert run_command(argv) == 0
    assert daemon.options.spec == first.spec
    assert daemon.options.swarm_dir == first.swarm_dir
    out = capsys.readouterr().out
    assert f"created swarm {first.swarm_id}" in out
    assert f"resuming swarm {first.swarm_id}" in out
    assert run_command([*argv, "--new"]) == 0
    assert daemon.options.swarm_id != first.swarm_id
    assert run_command([*argv, "--round-seconds", "30"]) == 0
    assert daemon.options.spec.rounds.length_s == 30.0
    assert len(find_folders(tmp_path / "XDG_DATA_HOME" / "tscale", None)) == 3


def test_create_tells_why_a_name_gives_another_swarm_and_how_to_get_back(
    daemon: FakeDaemon, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["create", "--name", "ours", "--data", str(book)]
    assert run_command(argv) == 0
    first = daemon.options.swarm_id
    assert capsys.readouterr().err == ""
    before, text = first, book.read_text()
    book.write_text(text + "And one more line.")
    assert run_command(argv) == 0
    told = capsys.readouterr().err
    back = f"; to go on with the old one: tscale-node join --swarm {before}\n"
    assert told.startswith(f"another text makes another swarm: {book} (hash ") and told.endswith(back)
    assert told.count("\n") == 1 and daemon.options.swarm_id != first
    book.write_text(text)
    assert run_command(argv) == 0
    assert daemon.options.swarm_id == first and capsys.readouterr().err == ""
    assert run_command([*argv, "--round-seconds", "30"]) == 0
    assert capsys.readouterr().err.startswith("other settings than before make another swarm; ")
    (tmp_path / "more.txt").write_text(text[::-1])
    assert run_command([*argv, str(tmp_path / "more.txt")]) == 0
    assert capsys.readouterr().err.startswith("2 instead of 1 files make another swarm; ")
    assert run_command([*argv, "--new"]) == 0 and capsys.readouterr().err == ""
    assert run_command(["join", "--swarm", first]) == 0
    assert daemon.options.spec.data.shards[0].size_bytes == len(text)


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


def test_create_keeps_the_owners_key_private(daemon: FakeDaemon, book: Path) -> None:
    assert run_command(["create", "--name", "ours", "--data", str(book)]) == 0
    key = daemon.options.swarm_dir / "owner.key"
    assert key.stat().st_mode & 0o777 == 0o600


def test_create_no_run_prints_a_spec_file_that_join_takes(
    daemon: FakeDaemon, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("More text. " * 50)
    argv = ["create", "--name", "ours", "--data", str(book), str(other), "--preset", "nano", "--no-run", "--json"]
    assert run_command(argv) == 0
    made = json.loads(capsys.readouterr().out)
    assert daemon.options is None
    assert run_command(["join", "--swarm", made["spec_file"], "--data", str(book), "--data", str(other)]) == 0
    assert daemon.options.swarm_id == made["swarm_id"]
    assert daemon.options.dataset_files == (book, other)
    assert [shard.size_bytes for shard in daemon.options.spec.data.shards] == [
        book.stat().st_size,
        other.stat().st_size,
    ]


def test_stored_spec_of_another_swarm_is_refused(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "XDG_DATA_HOME" / "tscale" / ("ours-" + "a" * 26)
    folder.mkdir(parents=True)
    (folder / "spec.bin").write_bytes(demo_spec().to_bytes())
    assert run_command(["join", "--swarm", LINK]) == 2
    assert "is the spec of demo-" in one_line(capsys)


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
