"""Which folder a node uses: the swarm's own, or a numbered one beside it when a node of this machine holds that."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tscale.node.config import NodeConfig
from tscale.node.statedir import StateDir, default_state_dir, holder_pid, lock, open_state_dir, read_error
from tscale.protocol.errors import BadInput, StateInUse, StopNode
from tscale.protocol.fields import is_swarm_id

MAX_INSTANCES = 64

_FIRST_FILES = frozenset({"lock", "identity.key", "spec.bin", "log/node.log"})
_FIRST_FOLDERS = ("log", "scratch", "blobs")
"""What a node's start makes before there is anything to keep."""

_NUMBERED = re.compile(r"(.+)-(?:[2-9]|[1-9][0-9])")


@dataclass(frozen=True)
class Instance:
    """A locked folder. `notice` says so when it is not the first one. `made` are the folders that were made for it, the
    deepest first; none when it was there before."""

    state: StateDir
    notice: str | None
    made: tuple[Path, ...] = ()


def base_dir(chosen: Path | None, config: NodeConfig) -> Path:
    """Where the folders of nodes are: the one chosen on the command line, else the configuration's, else the
    platform's place. Raises BadInput for the folder of one node, which is what `status` prints."""
    given = chosen or (Path(config.storage.state_dir) if config.storage.state_dir else default_state_dir())
    base = Path(os.path.abspath(given.expanduser()))
    with contextlib.suppress(OSError):
        if (base / "lock").is_file() and (base / "identity.key").is_file():
            raise BadInput(f"{base} is the folder of one node: give the folder it is in, {base.parent}")
    return base


def claim_folder(stack: ExitStack, base: Path, swarm_id: str, numbered: bool) -> Instance:
    """Lock a folder for a node of the swarm until `stack` closes.

    If `numbered`, the first free one of `<swarm_id>`, `<swarm_id>-2`, ... is taken, so that the same command in
    several terminals gives several nodes and, after they ended, resumes them. Else `<swarm_id>`, or StateInUse.
    """
    if not numbered:
        state, made = _open_locked(stack, base, swarm_id)
        return Instance(state, None, made)
    for number in range(1, MAX_INSTANCES + 1):
        try:
            state, made = _open_locked(stack, base, swarm_id if number == 1 else f"{swarm_id}-{number}")
        except StateInUse:
            continue
        if number == 1:
            several = (base.expanduser() / f"{swarm_id}-2").is_dir()
            said = f"several nodes of this swarm have run here: this one goes on in {state.path}"
            return Instance(state, said if several else None, made)
        return Instance(state, f"another node of this swarm runs here: this one uses {state.path}", made)
    raise StateInUse(f"{MAX_INSTANCES} nodes of this swarm run on this machine already: stop one first")


def _open_locked(stack: ExitStack, base: Path, name: str) -> tuple[StateDir, tuple[Path, ...]]:
    """The locked folder, and what of its path was made for it."""
    path = base.expanduser() / name
    made = tuple(place for place in (path, *path.parents) if not os.path.lexists(place))
    try:
        state = open_state_dir(base, name)
        stack.enter_context(lock(state))
    except StopNode:
        _remove_empty(made)
        raise
    return state, made


@contextlib.contextmanager
def removed_if_unused(instance: Instance) -> Iterator[None]:
    """While a node runs in its locked folder. When it stops before there is anything to keep, a folder that was made
    for it goes again. An unexpected error leaves it, since its log tells why."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StopNode):
            _remove_unused(instance)
        raise
    except BaseException:
        _remove_unused(instance)
        raise
    else:
        _remove_unused(instance)


def _remove_unused(instance: Instance) -> None:
    if not instance.made:
        return
    path = instance.state.path
    files = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir() or file.is_symlink()}
    if files <= _FIRST_FILES:
        for name in files:
            with contextlib.suppress(OSError):
                (path / name).unlink()
        _remove_empty((*(path / name for name in _FIRST_FOLDERS), *instance.made))


def _remove_empty(folders: tuple[Path, ...]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # not there, or not empty
            folder.rmdir()


def find_folders(base: Path, swarm: str | None) -> list[StateDir]:
    """The folders of nodes under `base`, running or not, sorted by name.

    `swarm` is a swarm id, which means all its folders, or the name of one folder (`<swarm_id>-1` for the first, whose
    folder has no number); None means every swarm. Raises BadInput when `base` is a file or can't be read.
    """
    try:
        return _find_folders(base, swarm)
    except OSError as error:
        raise read_error(base, error) from error


def _find_folders(base: Path, swarm: str | None) -> list[StateDir]:
    if not base.is_dir():
        if base.exists():
            raise BadInput(f"{base} is a file, not a folder: choose another --state-dir")
        return []
    if swarm is not None and (first := folder_of(swarm)) != swarm:
        return [StateDir(base / first)] if (base / first).is_dir() else []
    found = []
    for path in sorted(base.iterdir()):
        swarm_id = swarm_of(path.name)
        if swarm_id is not None and path.is_dir() and swarm in (None, swarm_id, path.name):
            found.append(StateDir(path))
    return found


def folder_of(name: str) -> str:
    """The folder that a person means by a name: `<swarm_id>-1` is the first one, `<swarm_id>`."""
    swarm_id = name.removesuffix("-1")
    return swarm_id if is_swarm_id(swarm_id) and not is_swarm_id(name) else name


def shown_name(folder_name: str) -> str:
    """How a person names one folder: the first one with its number, too."""
    return f"{folder_name}-1" if is_swarm_id(folder_name) else folder_name


def swarm_of(folder_name: str) -> str | None:
    """The swarm id in a folder's name, or None when it is no node's folder."""
    if is_swarm_id(folder_name):
        return folder_name
    match = _NUMBERED.fullmatch(folder_name)
    return match[1] if match is not None and is_swarm_id(match[1]) else None


def is_running(state: StateDir) -> bool:
    """Whether a node holds the folder now."""
    return state.lock_file.exists() and holder_pid(state) is not None
