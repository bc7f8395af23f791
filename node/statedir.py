"""A node's files: one folder per swarm with a lock, a key file that only its owner reads, and atomic writes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from platformdirs import user_data_path

from tscale.protocol.errors import BadInput, DiskFull, StateInUse, StopNode
from tscale.protocol.identity import MAX_KEY_FILE_BYTES, SECRET_BYTES, Identity, parse_key_file

_SWARM_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
_LOCK_TRIES = 4
_LOCK_WAIT_S = 0.05
_POSIX = os.name == "posix"

Opener = Callable[[Path], BinaryIO]
"""Opens a new file for writing. A test passes one that runs out of space."""


def default_state_dir() -> Path:
    """The platform's place for a program's data, `tscale` in it."""
    return user_data_path("tscale")


@dataclass(frozen=True)
class StateDir:
    """The paths of one node's files. Make it with `open_state_dir`."""

    path: Path

    @property
    def identity_key(self) -> Path:
        """The Ed25519 key, in the form p2pd reads."""
        return self.path / "identity.key"

    @property
    def lock_file(self) -> Path:
        """Held while a node runs; holds its process id."""
        return self.path / "lock"

    @property
    def spec(self) -> Path:
        """The SwarmSpec, as its canonical bytes."""
        return self.path / "spec.bin"

    @property
    def status(self) -> Path:
        """The status snapshot, rewritten about every second."""
        return self.path / "status.json"

    @property
    def rounds(self) -> Path:
        """One JSON line per fold."""
        return self.path / "rounds.jsonl"

    @property
    def blobs(self) -> Path:
        """The blob store's folder."""
        return self.path / "blobs"

    @property
    def checkpoint(self) -> Path:
        """The worker's checkpoints."""
        return self.path / "checkpoint"

    @property
    def chain(self) -> Path:
        """The manifests kept over restarts."""
        return self.path / "chain.bin"

    @property
    def peers(self) -> Path:
        """The last good peers."""
        return self.path / "peers.bin"

    @property
    def port(self) -> Path:
        """The TCP port of the last run."""
        return self.path / "port"

    @property
    def log(self) -> Path:
        """The log folder."""
        return self.path / "log"


def nearest_folder(path: Path) -> Path:
    """`path`, or of the folders above it the first that is there: on its disk the path would be made.

    Raises BadInput for one that can't be looked into.
    """
    path = path.expanduser().absolute()
    try:
        return next(place for place in (path, *path.parents) if place.is_dir())
    except OSError as error:
        raise read_error(path, error) from error


def open_state_dir(base: Path, swarm_id: str) -> StateDir:
    """Create the folder of one swarm under `base`, readable by its owner only. Raises BadInput, DiskFull."""
    if _SWARM_ID.fullmatch(swarm_id) is None:
        raise BadInput(f"{swarm_id[:80]!r} is not a swarm id: copy the id or the link again")
    path = base.expanduser() / swarm_id
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next((place for place in (path, *path.parents) if place.is_file()), path)
        raise BadInput(f"{file} is a file, not a folder: choose another --state-dir") from error
    except OSError as error:
        raise write_error(path, error) from error
    return StateDir(path)


@contextlib.contextmanager
def lock(state: StateDir) -> Iterator[None]:
    """Hold the folder for this process. The system releases it when the process dies, however it dies.

    Raises StateInUse with the holder's process id.
    """
    try:
        descriptor = os.open(state.lock_file, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise write_error(state.lock_file, error) from error
    try:
        # `holder_pid` of another command may hold it for an instant
        for _ in range(_LOCK_TRIES):
            locked = _try_lock(descriptor)
            if locked:
                break
            time.sleep(_LOCK_WAIT_S)
        if not locked:
            holder = os.pread(descriptor, 32, 0) if _POSIX else b""
            who = f" (process {int(holder)})" if holder.strip().isdigit() else ""
            raise StateInUse(f"another node{who} uses {state.path}: stop it, or give this one another --state-dir")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def holder_pid(state: StateDir) -> int | None:
    """The process id of the node that holds the lock now, or None when none does."""
    try:
        descriptor = os.open(state.lock_file, os.O_RDWR)
    except OSError:
        return None
    try:
        if _try_lock(descriptor):
            return None
        text = os.read(descriptor, 32)
        return int(text) if text.strip().isdigit() else None
    finally:
        os.close(descriptor)


def load_or_create_identity(state: StateDir) -> Identity:
    """The identity in the key file; a new one when there is no file yet."""
    if not state.identity_key.exists() and not state.identity_key.is_symlink():
        identity = Identity.from_secret(secrets.token_bytes(SECRET_BYTES))
        write_identity(state.identity_key, identity)
    return read_identity(state.identity_key)


def read_identity(path: Path) -> Identity:
    """The identity in a key file. Raises BadInput for wrong contents and for a mode that lets others read it."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadInput(f"{path} is not a file: an identity is the identity.key of a node")
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise BadInput(f"there is no key file {path}: check the path") from error
    except IsADirectoryError as error:
        raise BadInput(f"{path} is not a file: an identity is the identity.key of a node") from error
    except OSError as error:
        raise BadInput(f"can't read the key file {path} ({error.strerror}): check its owner and mode") from error
    try:
        identity = parse_key_file(data)
    except BadInput as error:
        raise BadInput(f"{path}: {error}; moving the file away makes a new identity") from error
    if _POSIX and status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise BadInput(f"others can read the key file (mode {mode:04o}): run  chmod 600 {_shell_quoted(path)}")
    return identity


def read_regular(path: Path, most_bytes: int) -> bytes:
    """At most `most_bytes` of a file, without waiting for anybody. Raises OSError, also for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(most_bytes)


def write_identity(path: Path, identity: Identity) -> None:
    """Write a key file with mode 0600; never replaces one. Raises BadInput when the file exists."""
    if path.exists():
        raise BadInput(f"{path} exists already: move it away first, it may be the only copy of an identity")
    atomic_write(path, identity.key_file())


def atomic_write(path: Path, data: bytes, durable: bool = True, opener: Opener | None = None) -> None:
    """Replace a file by `data` or leave it as it was. Mode 0600.

    `durable` also waits for the disk, so that the file survives a power cut; leave it out for what is rewritten
    every second. Raises DiskFull when it does not fit, BadInput when the place can't be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with (opener or open_private)(temporary) as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_error(path, error) from error


def open_private(path: Path) -> BinaryIO:
    """A new or emptied file of mode 0600 for writing."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def sync_folder(path: Path) -> None:
    """Make renames in a folder survive a power cut, where the system can."""
    if not _POSIX:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_error(path: Path, error: OSError) -> BadInput:
    """What a file or folder that can't be read means for the person."""
    return BadInput(f"can't read {path} ({error.strerror or error}): check the path, its owner and its mode")


def write_error(path: Path, error: OSError, setting: str = "--state-dir") -> StopNode:
    """What a failed write means for the node: DiskFull, or BadInput for a place that can't be written or is gone.

    `setting` is where the person chose the place.
    """
    if error.errno in _FULL_ERRNOS:
        return DiskFull(f"no space left for {path}: free some, or choose another {setting}")
    if error.errno == errno.ENOENT:
        gone = [folder for folder in path.parents if not folder.exists()]
        if gone:
            advice = "choose another place, or start the node again if somebody removed it"
            return BadInput(f"can't write {path}: there is no folder {gone[-1]} (any more); {advice}")
    return BadInput(f"can't write {path} ({error.strerror or error}): choose another {setting} or fix its owner")


def _try_lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        import msvcrt

        try:
            # a byte far behind the process id, so that others can read that
            os.lseek(descriptor, 1 << 20, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _shell_quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))
