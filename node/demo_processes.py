"""The demo's processes: started in groups of their own, watched with all their children, and none left behind."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

STOP_TIMEOUT_S = 15.0
GONE_TIMEOUT_S = 10.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """One started command. `tree` holds every (pid, start time) that was ever seen below it, itself included."""

    name: str
    process: subprocess.Popen[bytes]
    out_path: Path
    err_path: Path
    tree: set[tuple[int, float]] = field(default_factory=set)
    killed: bool = False

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def events(self) -> list[dict[str, object]]:
        """The JSON lines the command has printed so far; an unfinished last line is left out."""
        try:
            text = self.out_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        found: list[dict[str, object]] = []
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return found

    def last_words(self) -> str:
        """The last line on stderr, for a message about a command that ended too early."""
        try:
            lines = self.err_path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class ChildGroup:
    """The started commands. As a context it stops all of them at the end, however it ends."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self.children: list[Child] = []

    def __enter__(self) -> ChildGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop_all()

    def start(self, name: str, module: str, args: Sequence[str]) -> Child:
        """Start `python -m <module> <args>`; its output goes to `<log_dir>/<name>.{out,err}`."""
        out_path, err_path = self._log_dir / f"{name}.out", self._log_dir / f"{name}.err"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with out_path.open("wb") as out, err_path.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then stops the rest in order
                preexec_fn=self._end_with_parent,
            )
        child = Child(name, process, out_path, err_path)
        self.children.append(child)
        self.watch()
        return child

    def watch(self) -> None:
        """Note the pids of all children's children; call it often enough to see each of them."""
        for child in self.children:
            if child.running:
                child.tree |= _tree_of(child.process.pid)

    def kill(self, child: Child) -> None:
        """SIGKILL to the command itself, as a power cut would do it: what it started has to notice by itself."""
        self.watch()
        child.killed = True
        child.process.kill()
        child.process.wait()

    def stop_all(self) -> list[str]:
        """SIGTERM to everything that runs, SIGKILL to what is still there after STOP_TIMEOUT_S.

        Returns what went wrong: a command that had to be killed or that ended with another code than 0.
        """
        self.watch()
        for child in self.children:
            if child.running:
                child.process.terminate()
        problems: list[str] = []
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self.children:
            try:
                code = child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
                problems.append(f"{child.name} did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM")
                continue
            if code != 0 and not child.killed:
                problems.append(f"{child.name} ended with exit code {code}: {child.last_words()}")
        return problems

    def wait_until_gone(self, timeout_s: float | None = None) -> list[int]:
        """The pids of this group that are still there after at most `timeout_s`; empty is what one wants."""
        deadline = time.monotonic() + (GONE_TIMEOUT_S if timeout_s is None else timeout_s)
        left = self._alive()
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = self._alive()
        return left

    def _end_with_parent(self) -> None:
        """In the child, before its command: SIGTERM when the demo itself is killed."""
        if self._libc is not None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    def _alive(self) -> list[int]:
        return sorted(pid for child in self.children for pid, start in child.tree if _is_alive(pid, start))


def _tree_of(pid: int) -> set[tuple[int, float]]:
    try:
        top = psutil.Process(pid)
        processes = [top, *top.children(recursive=True)]
    except psutil.Error:
        return set()
    found: set[tuple[int, float]] = set()
    for process in processes:
        try:
            found.add((process.pid, process.create_time()))
        except psutil.Error:
            continue
    return found


def _is_alive(pid: int, start: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == start and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
