"""Where nodes of one person on one machine find each other: small files in a folder of that person only.

One file per process and address: `<pid>-<start time>-<number>`, one multiaddr as its text. Entries of processes that
are gone are removed by whoever reads. The folder belongs to the user alone, yet what it holds is parsed like any text
from outside.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import warnings
from pathlib import Path

import platformdirs
import psutil

from tscale.protocol.addrs import MAX_ADDR_CHARS, parse_multiaddr_peer
from tscale.protocol.errors import BadInput

MAX_ENTRIES = 256

_START_TOLERANCE_S = 3

_SWARM_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
_ENTRY = re.compile(r"(?P<pid>[1-9][0-9]{0,9})-(?P<start>[0-9]{1,20})-[0-9a-f]{8}")


def announce_local(swarm_id: str, addr: str, root: Path | None = None) -> bool:
    """Make `addr` (a multiaddr with its peer id) known to this user's other nodes of the swarm.

    Announcing an address again changes nothing. Returns False when no folder can be used: the node then works
    without this shortcut.
    """
    folder = _folder(swarm_id, root, create=True)
    if folder is None:
        return False
    tag = hashlib.blake2s(addr.encode(), digest_size=4).hexdigest()
    target = folder / f"{_own_prefix()}-{tag}"
    draft = folder / f".{target.name}"
    try:
        draft.write_text(addr, encoding="ascii")
        draft.replace(target)
    except (OSError, UnicodeError):
        return False
    return True


def find_local(swarm_id: str, root: Path | None = None) -> list[str]:
    """The addresses that this user's other live nodes of the swarm announced, without duplicates."""
    folder = _folder(swarm_id, root, create=False)
    if folder is None:
        return []
    found: dict[str, None] = {}
    own = _own_prefix()
    for path in sorted(folder.iterdir())[:MAX_ENTRIES]:
        match = _ENTRY.fullmatch(path.name)
        if match is None or path.name.startswith(own + "-"):
            continue
        if not _is_alive(int(match["pid"]), int(match["start"])):
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        addr = _read_addr(path)
        if addr is not None:
            found[addr] = None
    return list(found)


def withdraw_local(swarm_id: str, root: Path | None = None) -> None:
    """Remove everything that this process announced for the swarm."""
    folder = _folder(swarm_id, root, create=False)
    if folder is None:
        return
    for path in folder.glob(f"{_own_prefix()}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _folder(swarm_id: str, root: Path | None, create: bool) -> Path | None:
    if not _SWARM_ID.fullmatch(swarm_id):
        return None
    roots = [root] if root is not None else _default_roots()
    for base in roots:
        folder = base / swarm_id
        if folder.is_dir() and _is_private(base):
            return folder
        if create and _make_private(base) and _is_private(base):
            with contextlib.suppress(OSError):
                folder.mkdir(mode=0o700, exist_ok=True)
                return folder
    return None


def _default_roots() -> list[Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where no session made the folder; the check below handles that
        runtime = Path(platformdirs.user_runtime_dir("tscale"))
    cache = Path(platformdirs.user_cache_dir("tscale"))
    return [base / "peers" for base in (runtime, cache) if base == cache or _is_private(runtime.parent)]


def _make_private(base: Path) -> bool:
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return True


def _is_private(base: Path) -> bool:
    """Whether nobody else can write there: another user could otherwise point our nodes at his own."""
    try:
        info = base.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(info.st_mode):
        return False
    if not hasattr(os, "getuid"):
        return True
    return info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read_addr(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_ADDR_CHARS + 1)
        return parse_multiaddr_peer(raw.decode("ascii"))[0]
    except (OSError, UnicodeDecodeError, BadInput):
        return None


def _own_prefix() -> str:
    pid = os.getpid()
    return f"{pid}-{_start_time(pid)}"


def _is_alive(pid: int, start: int) -> bool:
    """Whether the process that announced still runs: its start tells a reused pid from the first owner's."""
    found = _start_time(pid)
    return found is not None and abs(found - start) <= _START_TOLERANCE_S


def _start_time(pid: int) -> int | None:
    """The start of a process in seconds. It moves a little when the system's clock is set."""
    try:
        return int(psutil.Process(pid).create_time())
    except (psutil.Error, OSError):
        return None
