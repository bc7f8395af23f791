"""Status files: which there are, what is in them, and in plain words what is wrong with one that can't be used."""

import dataclasses
import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tscale.dashboard.redact import inert_text, public_snapshot
from tscale.protocol.errors import TscaleError
from tscale.protocol.status import MAX_STATUS_BYTES, StatusSnapshot

STATUS_FILE_NAME = "status.json"
STALE_AFTER_S = 10.0
RESCAN_S = 2.0
MAX_SOURCES = 64
MAX_ENTRIES = 256


@dataclass(frozen=True)
class SourceState:
    """One node as its status file shows it.

    `snapshot` is the last good one (already redacted) or None, `age_s` how old it is, `problem` one sentence when the
    file can't be used now. `revision` counts changes of what is shown, `history_revision` those of the loss history.
    """

    source_id: str
    label: str
    snapshot: StatusSnapshot | None
    age_s: float | None
    problem: str
    revision: int
    history_revision: int

    @property
    def fresh(self) -> bool:
        """Whether a running node wrote this a moment ago."""
        snapshot = self.snapshot
        alive = snapshot is not None and snapshot.activity != "stopped"
        return alive and self.age_s is not None and self.age_s <= STALE_AFTER_S


class StatusFile:
    """One status file, read again only when it changed. Never raises for what is or isn't in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source_id = hashlib.blake2s(os.fsencode(path.absolute()), digest_size=5).hexdigest()
        self._stamp: tuple[int, ...] | None = None
        self._snapshot: StatusSnapshot | None = None
        self._problem = ""
        self._changed_mono_s: float | None = None
        self._revision = 0
        self._history_revision = 0

    def poll(self, now_unix_s: float, now_mono_s: float) -> SourceState:
        """Look at the file and say what is known about the node now."""
        stamp, data, problem = _read_if_changed(self.path, self._stamp)
        self._stamp = stamp
        if data is not None:
            problem = self._take(data, now_mono_s)
        elif not problem and stamp is not None:
            problem = self._problem
        if problem != self._problem:
            self._problem = problem
            self._revision += 1
        return self._state(now_unix_s, now_mono_s)

    def _take(self, data: bytes, now_mono_s: float) -> str:
        """Keep `data` as the newest snapshot, or say what is wrong with it."""
        try:
            snapshot = public_snapshot(StatusSnapshot.from_json(data))
        except (TscaleError, ValueError) as error:
            reason = inert_text(str(error), 160)
            return f"The status file can't be used: {reason}." + (
                " Showing the last good one." if self._snapshot else ""
            )
        before = self._snapshot
        if before is None or before.training.history != snapshot.training.history:
            self._history_revision += 1
        if snapshot != before:
            self._revision += 1
            self._changed_mono_s = now_mono_s
        self._snapshot = snapshot
        return ""

    def _state(self, now_unix_s: float, now_mono_s: float) -> SourceState:
        age_s = None
        if self._snapshot is not None and self._changed_mono_s is not None:
            # the file's own time alone would look fresh for ever when the writer's clock was ahead
            age_s = max(now_unix_s - self._snapshot.updated_unix_s, now_mono_s - self._changed_mono_s)
        return SourceState(
            source_id=self.source_id,
            label=_label(self._snapshot),
            snapshot=self._snapshot,
            age_s=age_s,
            problem=self._problem,
            revision=self._revision,
            history_revision=self._history_revision,
        )


class SourceSet:
    """All status files under the given paths; a folder is looked through again every two seconds.

    A path is a status file, a node's folder, a state directory, or a folder of state directories.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._files: dict[Path, StatusFile] = {}
        self._scanned_mono_s: float | None = None
        self._chosen_id = ""

    def poll(self, now_unix_s: float, now_mono_s: float) -> tuple[SourceState, ...]:
        """The state of every source, in a stable order; empty while no status file has been found."""
        if self._scanned_mono_s is None or now_mono_s - self._scanned_mono_s >= RESCAN_S:
            self._scanned_mono_s = now_mono_s
            for path in find_status_files(self._paths):
                if path not in self._files and len(self._files) < MAX_SOURCES:
                    self._files[path] = StatusFile(path)
        return _numbered([file.poll(now_unix_s, now_mono_s) for file in self._files.values()])

    def choose(self, states: tuple[SourceState, ...]) -> SourceState | None:
        """The node to show when nobody asked for one: a fresh trainer if there is one, the same as long as it is."""
        if not states:
            return None
        best = max(states, key=lambda state: (*_worth(state), state.source_id == self._chosen_id))
        self._chosen_id = best.source_id
        return best


def _worth(state: SourceState) -> tuple[bool, bool, bool]:
    trains = state.snapshot is not None and state.snapshot.node.role == "trainer"
    return state.fresh, trains, state.snapshot is not None


def _label(snapshot: StatusSnapshot | None) -> str:
    if snapshot is None:
        return ""
    own = next((peer.name for peer in snapshot.peers if peer.this_node and peer.name), "")
    return own or f"{snapshot.node.role} …{snapshot.node.peer_id[-8:]}"


def _numbered(states: list[SourceState]) -> tuple[SourceState, ...]:
    """The states with a name for those that have none yet, and the swarm's name where there are several swarms."""
    swarms = {state.snapshot.swarm_id for state in states if state.snapshot is not None}
    labelled = []
    for number, state in enumerate(states, start=1):
        label = state.label or f"node {number}"
        if len(swarms) > 1 and state.snapshot is not None:
            label = f"{state.snapshot.swarm_name} / {label}"
        labelled.append(dataclasses.replace(state, label=label))
    return tuple(labelled)


def find_status_files(paths: Iterable[Path]) -> list[Path]:
    """The status files that the paths name or that are below them; one that ends in .json need not be there yet."""
    found: list[Path] = []
    for path in paths:
        if path.name.endswith(".json"):
            found.append(path)
        else:
            found.extend(_look_in(path, levels=2))
    return found


def _look_in(folder: Path, levels: int) -> list[Path]:
    """Status files in `folder` and up to `levels` below; a folder that has one is a node's own and not searched."""
    own = folder / STATUS_FILE_NAME
    if own.is_file():
        return [own]
    if levels == 0:
        return []
    try:
        with os.scandir(folder) as entries:
            below = sorted(entry.path for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False) if entry.is_dir())
    except OSError:
        return []
    return [file for path in below for file in _look_in(Path(path), levels - 1)]


def _read_if_changed(path: Path, stamp: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, bytes | None, str]:
    """(stamp, data, problem): data is None when nothing changed since `stamp` or when there is a problem."""
    try:
        # a FIFO put in place of the file must not block the page
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return None, None, "There is no status file. Is the node running?"
    except OSError as error:
        return None, None, f"The status file can't be opened: {error.strerror}."
    try:
        about = os.fstat(handle)
        now = (about.st_ino, about.st_mtime_ns, about.st_size)
        if not stat.S_ISREG(about.st_mode):
            return None, None, "The status file is not a regular file."
        if now == stamp:
            return stamp, None, ""
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(MAX_STATUS_BYTES + 1)
    except OSError as error:
        return None, None, f"The status file can't be read: {error.strerror}."
    finally:
        os.close(handle)
    if len(data) > MAX_STATUS_BYTES:
        return now, None, f"The status file is longer than {MAX_STATUS_BYTES >> 20} MiB and was not read."
    return now, data, ""
