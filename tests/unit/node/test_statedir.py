"""The state directory: lock, key file, atomic writes, odd names."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from tscale.node.statedir import (
    StateDir,
    atomic_write,
    default_state_dir,
    holder_pid,
    load_or_create_identity,
    lock,
    open_private,
    open_state_dir,
    read_identity,
    write_identity,
)
from tscale.protocol.errors import BadInput, DiskFull, StateInUse
from tscale.protocol.identity import Identity

_SWARM = "demo-abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return open_state_dir(tmp_path / "Jörg Müller 測試" / "a b", _SWARM)


def _one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_the_folder_is_private_and_names_the_swarm(state: StateDir) -> None:
    assert state.path.name == _SWARM
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    assert default_state_dir().name == "tscale"


@pytest.mark.parametrize("swarm_id", ["", "../up", "a/b", ".", "..", "x" * 200, "a\0b", "ü"])
def test_a_swarm_id_can_not_leave_the_folder(tmp_path: Path, swarm_id: str) -> None:
    with pytest.raises(BadInput, match="not a swarm id"):
        open_state_dir(tmp_path, swarm_id)


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for base in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(BadInput) as caught:
            open_state_dir(base, _SWARM)
        assert "--state-dir" in _one_line(caught.value)


def test_a_second_node_is_refused_with_the_first_ones_pid(state: StateDir) -> None:
    assert holder_pid(state) is None
    with lock(state):
        assert holder_pid(state) == os.getpid()
        with pytest.raises(StateInUse, match=f"process {os.getpid()}") as caught, lock(state):
            pass
        assert caught.value.exit_code == 3 and "--state-dir" in _one_line(caught.value)
    with lock(state):
        pass
    assert holder_pid(state) is None


_HOLD = """
import sys
from pathlib import Path
from tscale.node.statedir import StateDir, lock
with lock(StateDir(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_kill_9_releases_the_lock(state: StateDir) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(state.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(StateInUse, match=f"process {holder.pid}"), lock(state):
            pass
        assert holder_pid(state) == holder.pid
        holder.kill()
        holder.wait()
    with lock(state):
        pass


def test_an_identity_is_made_once_and_kept_private(state: StateDir) -> None:
    first = load_or_create_identity(state)
    assert stat.S_IMODE(state.identity_key.stat().st_mode) == 0o600
    assert load_or_create_identity(state).public == first.public
    assert read_identity(state.identity_key).key_file() == first.key_file()
    assert load_or_create_identity(StateDir(state.path / "..")).public != first.public
    with pytest.raises(BadInput, match="exists already"):
        write_identity(state.identity_key, Identity.from_secret(bytes(32)))
    assert read_identity(state.identity_key).public == first.public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_others_can_read_is_refused_with_the_cure(state: StateDir, mode: int) -> None:
    load_or_create_identity(state)
    state.identity_key.chmod(mode)
    with pytest.raises(BadInput) as caught:
        load_or_create_identity(state)
    assert f"mode {mode:04o}" in _one_line(caught.value)
    command = str(caught.value).split("run  ")[1]
    subprocess.run(command, shell=True, check=True)
    load_or_create_identity(state)


@pytest.mark.parametrize("data", [b"", b"hello\n", bytes(68), b"\x08\x01\x12\x40" + bytes(64), b"x" * 10_000_000])
def test_a_key_file_with_other_contents_is_refused_and_left_alone(state: StateDir, data: bytes) -> None:
    atomic_write(state.identity_key, data)
    with pytest.raises(BadInput) as caught:
        load_or_create_identity(state)
    assert str(state.identity_key) in _one_line(caught.value)
    assert state.identity_key.read_bytes() == data


def test_a_key_path_that_is_no_file(state: StateDir) -> None:
    with pytest.raises(BadInput, match="there is no key file"):
        read_identity(state.path / "missing.key")
    with pytest.raises(BadInput, match="is not a file"):
        read_identity(state.path)
    state.identity_key.symlink_to(state.path / "nowhere")
    with pytest.raises(BadInput, match="there is no key file"):
        load_or_create_identity(state)


def test_a_write_replaces_whole_or_not_at_all(state: StateDir) -> None:
    path = state.path / "file ü"
    atomic_write(path, b"one")
    atomic_write(path, b"two", durable=False)
    assert path.read_bytes() == b"two" and stat.S_IMODE(path.stat().st_mode) == 0o600

    class Full:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *unused: object) -> None:
            self._file.close()

        def write(self, data: bytes) -> int:
            self._file.write(data[:2])
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFull) as caught:
        atomic_write(path, b"three", opener=lambda where: Full(open_private(where)))  # type: ignore[arg-type,return-value]
    assert caught.value.exit_code == 5 and "no space left" in _one_line(caught.value)
    assert path.read_bytes() == b"two"
    assert [item.name for item in state.path.iterdir()] == ["file ü"]


def test_a_folder_that_is_gone_is_bad_input(state: StateDir) -> None:
    with pytest.raises(BadInput, match="can't write"):
        atomic_write(state.path / "gone" / "file", b"x")
