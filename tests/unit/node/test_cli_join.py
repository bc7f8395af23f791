"""`join` and `seed` around the daemon: what they ask it for, the folder it gets, and what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_daemon import ADDR, LINK, FakeDaemon, one_line
from tscale.node.cli.app import run_command
from tscale.node.specs import demo_spec, shipped_book_path
from tscale.protocol.errors import BadInput

pytestmark = pytest.mark.usefixtures("own_places")


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


def test_exit_code_of_the_daemon_is_the_commands(daemon: FakeDaemon) -> None:
    daemon.act = lambda events: 130
    assert run_command(["join", "--swarm", "demo"]) == 130


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


def start(options: Any, logs: bool) -> None:
    """What a node writes before it has a spec."""
    for name in ("scratch", "blobs"):
        (options.swarm_dir / name).mkdir()
    (options.swarm_dir / "identity.key").write_bytes(b"key")
    if logs:
        (options.swarm_dir / "log" / "node.log").write_text("seed_given_up")


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("error", [BadInput("the seed is in another swarm"), KeyboardInterrupt(), None])
def test_a_join_that_came_to_nothing_leaves_nothing(
    error: BaseException | None, logs: bool, daemon: FakeDaemon, tmp_path: Path
) -> None:
    def stop(events: Any) -> int:
        start(daemon.options, logs)
        if error is not None:
            raise error
        return 0

    daemon.act = stop
    there = tmp_path / "there"
    there.mkdir()
    run_command(["join", "--swarm", LINK, "--state-dir", str(there / "made" / "too")])
    assert list(there.iterdir()) == [] and there.is_dir()


@pytest.mark.parametrize("kept", ["port", "chain.bin", "checkpoint/1", "blobs/x", "a note", "log/worker.log"])
def test_a_folder_with_anything_else_in_it_stays_whole(kept: str, daemon: FakeDaemon, tmp_path: Path) -> None:
    def stop(events: Any) -> int:
        start(daemon.options, logs=True)
        path = daemon.options.swarm_dir / kept
        path.parent.mkdir(exist_ok=True)
        path.touch()
        raise BadInput("stopped")

    daemon.act = stop
    assert run_command(["join", "--swarm", LINK, "--state-dir", str(tmp_path / "state")]) == 2
    assert (daemon.options.swarm_dir / kept).exists()
    assert (daemon.options.swarm_dir / "identity.key").read_bytes() == b"key"


def test_a_folder_that_was_there_before_is_left_as_it_is(daemon: FakeDaemon, tmp_path: Path) -> None:
    swarm_dir = tmp_path / ("ours-" + "a" * 26)
    swarm_dir.mkdir()
    (swarm_dir / "identity.key").write_bytes(b"an older key")

    def stop(events: Any) -> int:
        raise BadInput("the seed is in another swarm")

    daemon.act = stop
    assert run_command(["join", "--swarm", LINK, "--state-dir", str(tmp_path)]) == 2
    assert (swarm_dir / "identity.key").read_bytes() == b"an older key"
