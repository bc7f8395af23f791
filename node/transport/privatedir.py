"""A private folder for the unix sockets of one p2pd, and removal of those that dead nodes left behind."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil

_NAME = re.compile(r"tscale-(\d+)-[0-9a-f]{8}")
# a unix socket's path has at most 104 bytes on macOS and 108 on Linux; the longest name inside is about 40
_MAX_FOLDER_CHARS = 60


_GUARD_WAIT_S = 2.0


class FolderGuard:
    """A small shell that waits at a pipe and removes the folder when this process is gone, however it went."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; rm -rf -- "$0"', str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end(self) -> None:
        """Remove the folder now; the shell ends."""
        remove_private_dir(self.path)
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        try:
            self._shell.wait(_GUARD_WAIT_S)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()


def make_private_dir(base: Path | None = None) -> Path:
    """A new folder of mode 0700 whose name carries this process's id; first removes those of dead processes."""
    folder = base or _short_temp()
    remove_stale(folder)
    path = folder / f"tscale-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    return path


def remove_stale(folder: Path) -> int:
    """Remove the private folders of processes that are gone and that belong to this user. Returns how many."""
    removed = 0
    for path in folder.glob("tscale-*-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or psutil.pid_exists(int(match[1])) or not _own_folder(path):
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed += 1
    return removed


def remove_private_dir(path: Path) -> None:
    """Remove a folder made by `make_private_dir`."""
    shutil.rmtree(path, ignore_errors=True)


def _own_folder(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.is_dir() and not path.is_symlink() and status.st_uid == os.getuid()


def _short_temp() -> Path:
    folder = Path(tempfile.gettempdir())
    text = str(folder)
    return folder if len(text) <= _MAX_FOLDER_CHARS and text.isascii() and " " not in text else Path("/tmp")
