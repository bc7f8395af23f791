"""Commands that work on the folders of nodes: status, leave, identity, and the numbering of folders."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tscale.node.cli.app import run_command
from tscale.node.cli.leave import LEAVE_REQUEST
from tscale.node.instances import claim_folder, find_folders, folder_of, is_running, swarm_of
from tscale.node.statedir import StateDir, load_or_create_identity, lock, open_state_dir
from tscale.protocol.errors import StateInUse
from tscale.protocol.identity import Identity
from tscale.protocol.status import (
    STATUS_SCHEMA,
    CreditStatus,
    ModelStatus,
    NodeStatus,
    RoundStatus,
    ScreenStatus,
    StatusSnapshot,
    TrainingStatus,
    TransferStatus,
)

SWARM = "ours-" + "c" * 26


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "state"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert run_command([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def snapshot(updated_unix_s: float, state: StateDir) -> StatusSnapshot:
    return StatusSnapshot(
        schema=STATUS_SCHEMA,
        updated_unix_s=updated_unix_s,
        swarm_id=SWARM,
        swarm_name="ours",
        node=NodeStatus("12D3KooWnode", "trainer", "0.1.0", 4711, 900.0, (), str(state.path)),
        activity="alone",
        reason="no other peer answers",
        round=RoundStatus(12, 1004.5, 8.0, 11, "ab" * 32, "cd" * 32, 1),
        training=TrainingStatus(5_000, 45_312, 8123.4, 40, 2.1129, 2.2, 0.97, "the processor", "fp32", ()),
        peers=(),
        transfer=TransferStatus(1, 2, 0.0, 0.0, 0, 0.0, ""),
        model=ModelStatus("tscale", 600_000),
        credit=CreditStatus(4_000, 3, 0, ""),
        screen=ScreenStatus(0, 0),
        warnings=("the clock is 2 s off",),
    )


def write_status(state: StateDir, updated_unix_s: float) -> None:
    state.status.write_text(snapshot(updated_unix_s, state).to_json())


def test_status_tells_running_from_not_running_by_the_lock(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    state = open_state_dir(base, SWARM)
    write_status(state, 998.0)
    (view,) = run(capsys, "status", "--state-dir", str(base))
    assert (view["running"], view["stale"], view["age_s"]) == (False, False, 2.0)
    assert view["status"]["activity"] == "alone"
    with lock(state):
        (view,) = run(capsys, "status", "--state-dir", str(base))
        assert (view["running"], view["stale"]) == (True, False)
        write_status(state, 900.0)
        (view,) = run(capsys, "status", "--state-dir", str(base))
        assert (view["running"], view["stale"], view["age_s"]) == (True, True, 100.0)


def test_status_for_people(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    state = open_state_dir(base, SWARM)
    write_status(state, 999.0)
    with lock(state):
        assert run_command(["status", "--state-dir", str(base)]) == 0
    out = capsys.readouterr().out
    assert f"{SWARM}: running, alone (no other peer answers)" in out
    assert "45,312 tokens by all, 4,000 accepted from here" in out
    assert "warning: the clock is 2 s off" in out
    assert run_command(["status", "--state-dir", str(base)]) == 0
    assert f"{SWARM}: not running, status from 1s ago" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}', "\x00" * 100])
def test_status_file_that_cannot_be_read_is_said_not_raised(
    base: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    state = open_state_dir(base, SWARM)
    state.status.write_text(content)
    (view,) = run(capsys, "status", "--state-dir", str(base))
    assert view["status"] is None
    assert "can't be read" in view["problem"]


def test_a_pipe_in_place_of_a_status_is_said_and_waits_for_nobody(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(open_state_dir(base, SWARM).status)
    (view,) = run(capsys, "status", "--state-dir", str(base))
    assert "can't be read" in view["problem"] and "not a regular file" in view["problem"]


@pytest.mark.parametrize(
    "argv",
    [
        ("status",),
        ("identity", "show"),
        ("leave", "--swarm", "demo"),
        ("plan", "--model", "nano"),
        ("create", "--name", "ours", "--data", __file__),
    ],
)
def test_a_place_that_may_not_be_looked_into_is_one_line(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert run_command([*argv, "--state-dir", str(base)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("tscale-node: can") and told.err.count("\n") == 1
    assert "Permission denied" in told.err


def test_status_without_nodes_is_empty(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "status", "--state-dir", str(base)) == []


def test_config_files_state_dir_is_used(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config" / "tscale").mkdir(parents=True)
    (tmp_path / "config" / "tscale" / "config.toml").write_text(f'[storage]\nstate_dir = "{base}"\n')
    open_state_dir(base, SWARM)
    assert [view["swarm_id"] for view in run(capsys, "status")] == [SWARM]


def test_leave_asks_the_node_and_waits_for_its_lock(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, idle = open_state_dir(base, SWARM), open_state_dir(base, f"{SWARM}-2")
    locked = threading.Event()

    def node() -> None:
        request = state.path / LEAVE_REQUEST
        with lock(state):
            locked.set()
            while not request.exists():
                threading.Event().wait(0.01)
            request.unlink()

    thread = threading.Thread(target=node, daemon=True)
    thread.start()
    assert locked.wait(10)
    left = run(capsys, "leave", "--swarm", SWARM, "--state-dir", str(base))
    assert left == {"left": [SWARM], "not_running": [f"{SWARM}-2"], "forgotten": []}
    thread.join(10)
    assert not is_running(state)
    assert not (idle.path / LEAVE_REQUEST).exists()


def test_leave_that_is_not_heard_is_an_error(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tscale.node.cli.leave.TIMEOUT_S", 0.2)
    state = open_state_dir(base, SWARM)
    with lock(state):
        assert run_command(["leave", "--swarm", SWARM, "--state-dir", str(base)]) == 1
    assert "did not end" in capsys.readouterr().err
    assert not (state.path / LEAVE_REQUEST).exists()


def test_forget_needs_a_yes_and_removes_one_folder_only(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, other = open_state_dir(base, SWARM), open_state_dir(base, f"{SWARM}-2")
    load_or_create_identity(state)
    argv = ["leave", "--swarm", f"{SWARM}-2", "--state-dir", str(base), "--forget"]
    assert run_command(argv) == 2
    assert "add --yes" in capsys.readouterr().err
    assert other.path.exists()
    gone = [f"{SWARM}-2"]
    assert run(capsys, *argv, "--yes") == {"left": [], "not_running": gone, "forgotten": gone}
    assert not other.path.exists()
    assert state.identity_key.exists()


def test_identity_goes_out_and_comes_back(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer_id = load_or_create_identity(open_state_dir(base, SWARM)).peer_id
    (shown,) = run(capsys, "identity", "show", "--state-dir", str(base))
    assert shown["peer_id"] == peer_id
    backup = tmp_path / "backup.key"
    run(capsys, "identity", "export", "--swarm", SWARM, "--state-dir", str(base), str(backup))
    assert backup.stat().st_mode & 0o777 == 0o600
    new_base = tmp_path / "new"
    run(capsys, "identity", "import", "--swarm", SWARM, "--state-dir", str(new_base), str(backup))
    assert load_or_create_identity(open_state_dir(new_base, SWARM)).peer_id == peer_id


def test_export_never_overwrites(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_or_create_identity(open_state_dir(base, SWARM))
    backup = tmp_path / "backup.key"
    backup.write_text("precious")
    assert run_command(["identity", "export", "--swarm", SWARM, "--state-dir", str(base), str(backup)]) == 2
    assert backup.read_text() == "precious"


def test_import_replaces_a_key_only_when_told_and_never_under_a_running_node(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = open_state_dir(base, SWARM)
    old = load_or_create_identity(state).peer_id
    new = Identity.from_secret(b"\x09" * 32)
    key = tmp_path / "new.key"
    key.touch(mode=0o600)
    key.write_bytes(new.key_file())
    argv = ["identity", "import", "--swarm", SWARM, "--state-dir", str(base), str(key)]
    assert run_command(argv) == 2
    told = capsys.readouterr().err
    assert old in told and f"tscale-node identity export --swarm {SWARM}-1 FILE , then add --replace" in told
    with lock(state):
        assert run_command([*argv, "--replace"]) == 3
    assert load_or_create_identity(state).peer_id == old
    assert run_command([*argv, "--replace"]) == 0
    assert load_or_create_identity(state).peer_id == new.peer_id


def test_import_asks_which_of_several_nodes_and_gives_no_key_twice(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (open_state_dir(base, name) for name in (SWARM, f"{SWARM}-2"))
    load_or_create_identity(first)
    backup = tmp_path / "backup.key"
    here = ("--state-dir", str(base), str(backup))
    run(capsys, "identity", "export", "--swarm", f"{SWARM}-1", *here)
    assert run_command(["identity", "import", "--swarm", SWARM, *here]) == 2
    assert f"give one of {SWARM}-1, {SWARM}-2 with --swarm" in capsys.readouterr().err
    assert run_command(["identity", "import", "--swarm", f"{SWARM}-2", *here]) == 2
    assert f"{SWARM}-1 has this key already" in capsys.readouterr().err
    assert not second.identity_key.exists()
    assert run_command(["identity", "import", "--swarm", f"{SWARM}-3", *here]) == 2
    assert not (base / f"{SWARM}-3").exists(), "a refused key leaves no folder that looks like a node's"
    assert run(capsys, "identity", "import", "--swarm", f"{SWARM}-1", *here)["file"] == str(first.identity_key)


def test_a_file_where_the_state_directory_should_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "file"
    place.touch()
    assert run_command(["status", "--state-dir", str(place)]) == 2
    assert "is a file, not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"not a key", b"\x08\x01\x12\x40" + b"\x01" * 64])
def test_key_file_with_wrong_contents_is_refused_and_changes_nothing(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    state = open_state_dir(base, SWARM)
    old = load_or_create_identity(state).peer_id
    key = tmp_path / "bad.key"
    key.touch(mode=0o600)
    key.write_bytes(content)
    assert run_command(["identity", "import", "--swarm", SWARM, "--state-dir", str(base), str(key), "--replace"]) == 2
    assert str(key) in capsys.readouterr().err
    assert load_or_create_identity(state).peer_id == old


def test_a_file_that_is_no_key_is_told_as_such_before_its_mode(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark and stormy night.")
    book.chmod(0o644)
    assert run_command(["identity", "import", "--swarm", SWARM, "--state-dir", str(base), str(book)]) == 2
    told = capsys.readouterr().err
    assert str(book) in told and "chmod" not in told


def test_key_file_that_others_can_read_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "open.key"
    key.write_bytes(Identity.from_secret(b"\x09" * 32).key_file())
    key.chmod(0o644)
    assert run_command(["identity", "import", "--swarm", SWARM, "--state-dir", str(base), str(key)]) == 2
    assert "chmod 600" in capsys.readouterr().err


def test_numbered_folders_are_claimed_in_order_and_a_free_one_again(base: Path) -> None:
    with ExitStack() as outer:
        assert claim_folder(outer, base, SWARM, numbered=True).state.path.name == SWARM
        with ExitStack() as inner:
            second = claim_folder(inner, base, SWARM, numbered=True)
            assert second.state.path.name == f"{SWARM}-2"
            assert second.notice is not None
            assert str(second.state.path) in second.notice
        with ExitStack() as other:
            assert claim_folder(other, base / "other", SWARM, numbered=True).notice is None
        with ExitStack() as again:
            assert claim_folder(again, base, SWARM, numbered=True).state.path.name == f"{SWARM}-2"
        with ExitStack() as exact, pytest.raises(StateInUse):
            claim_folder(exact, base, SWARM, numbered=False)
    with ExitStack() as alone:
        notice = claim_folder(alone, base, SWARM, numbered=True).notice
        assert notice is not None and notice.endswith(f"/{SWARM}"), "it may be another one than the person thinks"


def test_folders_are_told_from_other_folders(base: Path) -> None:
    for name in (SWARM, f"{SWARM}-2", f"{SWARM}-10", f"{SWARM}-1", f"{SWARM}-x", "other", "ours-" + "d" * 26):
        (base / name).mkdir(parents=True)
    (base / ("file-" + "e" * 26)).write_text("")
    assert [state.path.name for state in find_folders(base, SWARM)] == [SWARM, f"{SWARM}-10", f"{SWARM}-2"]
    assert len(find_folders(base, None)) == 4
    assert [state.path.name for state in find_folders(base, f"{SWARM}-2")] == [f"{SWARM}-2"]
    assert swarm_of(f"{SWARM}-64") == SWARM
    assert swarm_of("..") is None


def test_snapshot_of_the_test_is_valid() -> None:
    made = snapshot(1.0, StateDir(Path("/x")))
    assert StatusSnapshot.from_json(made.to_json()) == dataclasses.replace(made)


def test_the_first_folder_has_a_name_of_its_own(tmp_path: Path) -> None:
    for name in (SWARM, f"{SWARM}-2"):
        open_state_dir(tmp_path, name)
    assert folder_of(f"{SWARM}-1") == SWARM
    assert folder_of(f"{SWARM}-2") == f"{SWARM}-2"
    assert [state.path.name for state in find_folders(tmp_path, f"{SWARM}-1")] == [SWARM]
    assert [state.path.name for state in find_folders(tmp_path, SWARM)] == [SWARM, f"{SWARM}-2"]


@pytest.mark.parametrize(
    "argv", [["status"], ["leave", "--swarm", SWARM], ["identity", "show"], ["join", "--swarm", SWARM], ["doctor"]]
)
def test_the_folder_of_one_node_is_no_place_for_folders(
    argv: list[str], base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` prints this folder; pasted as --state-dir it would hide the node, and a join would make another key."""
    state = open_state_dir(base, SWARM)
    load_or_create_identity(state)
    state.lock_file.touch()
    before = sorted(base.rglob("*"))
    assert run_command([*argv, "--state-dir", str(state.path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{state.path} is the folder of one node: give the folder it is in, {base}" in said
    assert sorted(base.rglob("*")) == before
