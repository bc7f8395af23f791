"""Real nodes for tests: `python -m tscale.node.cli ...` on loopback, with folders and a temp folder of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tscale.node.demo_report import compare_rounds, read_rounds, settled
from tscale.node.specs import shipped_book_path
from tscale.node.statedir import read_identity
from tscale.protocol.errors import BadInput

WAIT_S = 120.0
"""A safety net for a busy machine, not a measurement."""
END_S = 10.0
"""What the product promises: an ended or killed node has left nothing after this."""


@dataclass
class NodeProcess:
    """One started command, in a session of its own, as a terminal's foreground job is in a group of its own."""

    name: str
    process: subprocess.Popen[bytes]
    base: Path
    state_dir: Path
    tree: dict[int, float] = field(default_factory=dict)

    @property
    def out(self) -> str:
        return (self.base / f"{self.name}.out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.base / f"{self.name}.err").read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def folder(self) -> Path:
        """The swarm's folder in the state directory; there is one."""
        (folder,) = [path for path in self.state_dir.iterdir() if (path / "lock").exists()]
        return folder

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.base / f"{self.name}.out").read_text(errors="replace").split("\n")[:-1]
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in found if event.get("event") == kind]

    @property
    def link(self) -> str:
        events = self.events("ready")
        return str(events[-1]["link"]) if events else ""

    @property
    def status(self) -> dict[str, Any]:
        """The status file, or an empty one before the node has written any."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        # one of an earlier run is no news
        return found if found["node"]["pid"] == self.process.pid else {}

    @property
    def activity(self) -> str:
        return str(self.status.get("activity", ""))

    @property
    def peer_id(self) -> str:
        """Of the key in its folder; empty before there is one."""
        try:
            return read_identity(self.folder / "identity.key").peer_id
        except (ValueError, OSError, BadInput):
            return ""

    @property
    def last_round(self) -> int:
        try:
            return max(read_rounds(self.folder / "rounds.jsonl"), default=-1)
        except ValueError:  # no folder yet
            return -1

    @property
    def total_tokens(self) -> int:
        """Of the swarm, up to the last fold."""
        lines = read_rounds(self.folder / "rounds.jsonl")
        return lines[max(lines)].tokens_total

    @property
    def folds(self) -> int:
        """How many folds its log has, those of earlier runs included."""
        log = self.folder / "log" / "node.log"
        return log.read_text().count(" folded round=") if log.exists() else 0

    def sees(self, other: NodeProcess) -> bool:
        """Whether this node lists the other one as alive."""
        peers = self.status.get("peers", [])
        return any(peer["alive"] and peer["peer_id"] == other.peer_id for peer in peers)

    @property
    def worker(self) -> int | None:
        """The worker's process id."""
        return self._child("tscale.node.worker.process")

    @property
    def p2pd(self) -> int | None:
        return self._child("p2pd")

    def _child(self, mark: str) -> int | None:
        for pid in self.watch():
            try:
                if any(part.endswith(mark) for part in psutil.Process(pid).cmdline()):
                    return pid
            except psutil.Error:
                continue
        return None

    def watch(self) -> list[int]:
        """Note who is below the node now."""
        try:
            top = psutil.Process(self.process.pid)
            for process in [top, *top.children(recursive=True)]:
                self.tree[process.pid] = process.create_time()
        except psutil.Error:
            pass
        return [pid for pid in self.tree if is_alive(pid, self.tree[pid])]

    def signal(self, number: signal.Signals) -> None:
        """Send to the process group, as a terminal does."""
        self.watch()
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the node alone."""
        self.watch()
        self.process.kill()
        self.process.wait()

    def left(self) -> list[int]:
        """Which of its processes are still there."""
        return [pid for pid, start in self.tree.items() if is_alive(pid, start)]


def is_alive(pid: int, start: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == start and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Nodes:
    """Starts nodes below one folder. `tmp` is their TMPDIR, `book` a short text."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.tmp = base / "tmp"
        self.book = base / "book.txt"
        self.all: list[NodeProcess] = []
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(self.tmp)}
        for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
            self.env[variable] = str(base / "home" / variable)
            (base / "home" / variable).mkdir(parents=True, mode=0o700)
        self.tmp.mkdir()
        self.book.write_bytes(shipped_book_path().read_bytes()[:200_000])

    def start(
        self, name: str, command: str, *args: str, state: str = "", module: str = "tscale.node.cli", **env: str
    ) -> NodeProcess:
        """Run `tscale-node <command> <args>` with `--json`. A second start of a name replaces its output files."""
        state_dir = self.base / "state" / (state or name)
        line = [sys.executable, "-m", module, command, *args, "--state-dir", str(state_dir), "--json"]
        with (self.base / f"{name}.out").open("wb") as out, (self.base / f"{name}.err").open("wb") as err:
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**self.env, **env},
                start_new_session=True,
            )
        node = NodeProcess(name, process, self.base, state_dir)
        self.all.append(node)
        return node

    def create(self, name: str, *args: str, **env: str) -> NodeProcess:
        data = ("--name", "ours", "--data", str(self.book), "--preset", "nano", "--round-seconds", "1")
        return self.start(name, "create", *data, "--host", "127.0.0.1", *args, **env)

    def join(self, name: str, link: str, *args: str, command: str = "join", **env: str) -> NodeProcess:
        return self.start(name, command, "--swarm", link, "--host", "127.0.0.1", *args, **env)

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        line = [sys.executable, "-m", "tscale.node.cli", *args]
        return subprocess.run(
            line, capture_output=True, text=True, errors="replace", env={**self.env, **env}, timeout=WAIT_S, check=False
        )

    def wait_for(self, what: Callable[[], object], said: str, *needed: NodeProcess, limit_s: float = WAIT_S) -> None:
        """Wait until `what` holds, while all of `needed` run."""
        deadline = time.monotonic() + limit_s
        while not what():
            for node in needed:
                assert node.running, f"{node.name} ended with {node.process.returncode}: {node.err or node.out[-500:]}"
            assert time.monotonic() < deadline, f"{said} did not happen within {limit_s:.0f} s\n{self.describe()}"
            time.sleep(0.05)

    def describe(self) -> str:
        """What every node says of itself, for a failure's message."""
        lines = []
        for node in self.all:
            status = node.status if node.running else {}
            what = f"{status.get('activity')} ({status.get('reason')})" if status else f"ended {node.process.poll()}"
            lines.append(f"  {node.name}: {what}, last round {node.last_round} {node.err[-300:]}")
        return "\n".join(lines)

    def differences(self, *nodes: NodeProcess) -> list[str]:
        """Rounds of which two nodes have different states; the newest ones of each node may still change."""
        rounds = {node.name: settled(settled(read_rounds(node.folder / "rounds.jsonl"))) for node in nodes}
        compared, found = compare_rounds(rounds)
        assert compared >= 2, f"only {compared} rounds are known to several of the nodes"
        return found

    def close(self) -> None:
        """End everything that is still there."""
        for node in self.all:
            node.watch()
            if node.running:
                node.process.send_signal(signal.SIGCONT)
                node.process.kill()
                node.process.wait()
        deadline = time.monotonic() + END_S
        while any(node.left() for node in self.all) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in {pid for node in self.all for pid in node.left()}:
            psutil.Process(pid).kill()


@contextmanager
def nodes_in_temp(name: str = "") -> Iterator[Nodes]:
    """Nodes in a new folder (or in one of this name in it) whose path is short enough for unix sockets."""
    top = Path(tempfile.mkdtemp(prefix="ts-"))
    base = top / name
    base.mkdir(exist_ok=True)
    nodes = Nodes(base)
    try:
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(top, ignore_errors=True)
