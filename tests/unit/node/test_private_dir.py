"""The folder for p2pd's sockets: private, short, and those of dead processes go."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from tscale.node.transport.privatedir import make_private_dir, remove_private_dir, remove_stale


def _dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_folder_is_private_and_unique(tmp_path: Path) -> None:
    one, two = make_private_dir(tmp_path), make_private_dir(tmp_path)
    assert one != two and stat.S_IMODE(one.stat().st_mode) == 0o700
    remove_private_dir(one)
    assert not one.exists() and two.exists()
    # a unix socket's path has about a hundred bytes
    default = make_private_dir()
    assert len(str(default / "p2pclient-12345678901.sock")) < 104
    remove_private_dir(default)


def test_only_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    own = make_private_dir(tmp_path)
    stale = tmp_path / f"tscale-{_dead_pid()}-0123abcd"
    stale.mkdir()
    (stale / "p2pd.sock").touch()
    kept = [tmp_path / name for name in ("tscale-99-notours", "tscale-x-0123abcd", "other")]
    for path in kept:
        path.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / f"tscale-{_dead_pid()}-aaaaaaaa").symlink_to(outside)
    assert remove_stale(tmp_path) == 1
    assert not stale.exists() and own.exists() and outside.exists() and all(path.exists() for path in kept)
