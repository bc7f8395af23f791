"""`make demo`: a seed and some nodes as real processes on this machine; one is killed, one joins, all must agree."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tscale.node.demo_processes import Child, ChildGroup
from tscale.node.demo_report import DemoFacts, DemoReport, build_report, measure_model, read_rounds
from tscale.node.live import count_alive, plural, show_loss
from tscale.node.netaddr import require_free_port
from tscale.node.specs import demo_spec, shipped_book_path
from tscale.protocol.errors import BadInput, RefuseFrame, StopNode
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.status import MAX_STATUS_BYTES, StatusSnapshot

DEFAULT_TOKENS = 1_600_000
START_LEAD_S = 6.0
POLL_S = 0.25
READY_TIMEOUT_S = 90.0
SAFETY_LIMIT_S = 1200.0
KILL_AT = 1 / 3
JOIN_AT = 1 / 2
SETTLE_ROUNDS = 2
"""How many rounds later a round is final for everybody: a fork lasts for one round."""
SEED, DASHBOARD = "seed", "dashboard"
LOOPBACK = "127.0.0.1"


class DemoFailed(StopNode):
    """The demo could not run to its end; the message says why and where its logs are."""


@dataclass(frozen=True)
class DemoOptions:
    """`nodes` that train from the start. The demo ends after `rounds` folded rounds if given, else after `tokens`
    accepted ones; never after a time, but `limit_s` ends it as failed. The modules are replaced in tests."""

    nodes: int = 3
    tokens: int = DEFAULT_TOKENS
    rounds: int | None = None
    dashboard_port: int = 0
    seed_value: int | None = None
    limit_s: float = SAFETY_LIMIT_S
    node_module: str = "tscale.node.cli"
    dashboard_module: str = "tscale.dashboard.cli"

    def __post_init__(self) -> None:
        """Refuse what makes no demo."""
        if not 1 <= self.nodes <= 16:
            raise BadInput(f"--nodes is {self.nodes}, it must be from 1 to 16")
        if self.tokens < 1 or (self.rounds is not None and self.rounds < 1):
            raise BadInput("--tokens and --rounds must be at least 1")


@dataclass
class Watch:
    """What is seen from outside while the demo runs: the newest status of each node and what it sent in each round."""

    latest: dict[str, StatusSnapshot] = field(default_factory=dict)
    sent_bytes: dict[tuple[str, int], int] = field(default_factory=dict)
    peers_max: int = 0

    def see(self, name: str, snapshot: StatusSnapshot, lone_rungs: frozenset[str]) -> None:
        """Take in one status. Contributions of a lone peer are not counted, since they travel nowhere."""
        self.latest[name] = snapshot
        self.peers_max = max(self.peers_max, count_alive(snapshot))
        transfer = snapshot.transfer
        if transfer.contribution_bytes and transfer.rung and transfer.rung not in lone_rungs:
            self.sent_bytes[name, snapshot.round.number] = transfer.contribution_bytes

    def bits_per_parameter(self) -> float | None:
        """The mean over all contributions that were seen, or None."""
        parameters = max((snapshot.model.parameters for snapshot in self.latest.values()), default=0)
        if not self.sent_bytes or not parameters:
            return None
        return 8 * sum(self.sent_bytes.values()) / len(self.sent_bytes) / parameters


def run_demo(options: DemoOptions, say: Callable[[str], None]) -> DemoReport:
    """Run the whole demo; `say` takes one line at a time. Everything it started has ended when this returns or raises.

    Raises PortInUse for the dashboard's port, DemoFailed when a process ends early or the safety limit is reached
    before there is anything to judge.
    """
    if options.dashboard_port:
        require_free_port(LOOPBACK, options.dashboard_port)
    folder = Path(tempfile.mkdtemp(prefix="tscale-demo-"))
    try:
        report = DemoRun(options, folder, say).run()
    except StopNode as error:
        raise DemoFailed(f"{error} (logs are in {folder})") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if report.ok:
        shutil.rmtree(folder, ignore_errors=True)
        return report
    return replace(report, failures=(*report.failures, f"logs are in {folder}"))


class DemoRun:
    """One run in `folder`: `spec.bin`, a state folder per node, and the output of every process in `logs/`."""

    def __init__(self, options: DemoOptions, folder: Path, say: Callable[[str], None]) -> None:
        self._options, self._folder, self._say = options, folder, say
        self._spec = fresh_spec(options.seed_value, time.time() + START_LEAD_S)
        self._lone_rungs = frozenset(rung.name for rung in self._spec.codec.rungs if rung.lone_only)
        self._watch = Watch()
        self._started_mono_s = time.monotonic()
        self._names = [f"node-{number}" for number in range(1, options.nodes + 2)]
        self._killed: Child | None = None
        self._joiner: Child | None = None
        self._shown_round = -1
        self._judged_round: int | None = None
        logs = folder / "logs"
        logs.mkdir()
        (folder / "spec.bin").write_bytes(self._spec.to_bytes())
        self._group = ChildGroup(logs)
        self._nodes: dict[str, Child] = {}
        self._seed_addr = ""

    def run(self) -> DemoReport:
        """Start, watch, stop, judge."""
        with self._group:
            self._start()
            self._loop()
            problems = self._group.stop_all()
        problems += [f"process {pid} is still there" for pid in self._group.wait_until_gone()]
        return build_report(self._facts(problems), measure_model(self._live_dirs(), self._spec))

    def _start(self) -> None:
        self._say(f"swarm {self._spec.swarm_id}: a seed and {plural(self._options.nodes, 'node')} on this machine")
        seed = self._start_node(SEED)
        self._seed_addr = self._wait_ready(seed)
        for name in self._names[:-1]:
            self._nodes[name] = self._start_node(name)
        self._say(f"dashboard: {self._start_dashboard()}")

    def _start_node(self, name: str) -> Child:
        args = ["seed" if name == SEED else "join", "--swarm", str(self._folder / "spec.bin")]
        args += [
            "--state-dir",
            str(self._folder / name),
            "--host",
            LOOPBACK,
            "--port",
            "0",
            "--name",
            name,
            "--json",
        ]
        if name == SEED:
            args += ["--data", str(shipped_book_path())]
        else:
            args += ["--seed", self._seed_addr]
        self._swarm_dir(name).mkdir(parents=True, exist_ok=True)
        return self._group.start(name, self._options.node_module, args)

    def _wait_ready(self, child: Child) -> str:
        """The address in the node's `ready` event."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            for event in child.events():
                addrs = event.get("addrs")
                if event.get("event") == "ready" and isinstance(addrs, list) and addrs:
                    return str(addrs[0])
            self._require_running(child)
            time.sleep(POLL_S)
        raise DemoFailed(f"{child.name} was not ready within {READY_TIMEOUT_S:.0f} s")

    def _start_dashboard(self) -> str:
        """Start the dashboard over all nodes, the later one included. Returns its address."""
        port_file = self._folder / "dashboard.port"
        args = ["--port", str(self._options.dashboard_port), "--port-file", str(port_file)]
        for name in (*self._names, SEED):
            self._swarm_dir(name).mkdir(parents=True, exist_ok=True)
            args += ["--status", str(self._swarm_dir(name))]
        child = self._group.start(DASHBOARD, self._options.dashboard_module, args)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if port_file.exists() and (text := port_file.read_text().strip()):
                return f"http://{LOOPBACK}:{int(text)}/"
            self._require_running(child)
            time.sleep(POLL_S)
        raise DemoFailed(f"the dashboard was not ready within {READY_TIMEOUT_S:.0f} s")

    def _loop(self) -> None:
        deadline = self._started_mono_s + self._options.limit_s
        while not self._finished():
            if time.monotonic() > deadline:
                raise DemoFailed(f"the target was not reached within the safety limit of {self._options.limit_s:.0f} s")
            self._poll()
            done = self._done_share()
            if self._killed is None and done >= KILL_AT and len(self._nodes) > 1:
                self._kill_one()
            if self._joiner is None and done >= JOIN_AT:
                self._join_one()
            time.sleep(POLL_S)

    def _poll(self) -> None:
        self._group.watch()
        for child in self._group.children:
            if child is not self._killed:
                self._require_running(child)
        for name, child in self._nodes.items():
            snapshot = read_status(self._swarm_dir(name)) if child is not self._killed else None
            if snapshot is not None:
                self._watch.see(name, snapshot, self._lone_rungs)
        newest = self._newest()
        if newest is not None and newest.round.folded_round > self._shown_round:
            self._shown_round = newest.round.folded_round
            self._say(self._progress(newest))

    def _kill_one(self) -> None:
        name = self._names[-2]
        self._killed = self._nodes[name]
        self._group.kill(self._killed)
        del self._watch.latest[name]
        self._say(f"{name} was killed with SIGKILL")

    def _join_one(self) -> None:
        name = self._names[-1]
        self._joiner = self._nodes[name] = self._start_node(name)
        self._say(f"{name} joins")

    def _finished(self) -> bool:
        """At the target, with the late node training too (it may still be starting on a slow machine), and then until
        all have folded two more rounds, after which the rounds up to here are settled everywhere."""
        if self._judged_round is None and self._done_share() >= 1.0 and self._joiner is not None:
            joined, newest = self._watch.latest.get(self._joiner.name), self._newest()
            if newest is not None and joined is not None and joined.round.folded_round >= 0:
                self._judged_round = newest.round.folded_round
                self._say(f"rounds up to {self._judged_round} are compared once {SETTLE_ROUNDS} more have settled them")
        if self._judged_round is None:
            return False
        final = self._judged_round + SETTLE_ROUNDS
        live = [self._watch.latest.get(name) for name in self._live_names()]
        return all(snapshot is not None and snapshot.round.folded_round >= final for snapshot in live)

    def _done_share(self) -> float:
        newest = self._newest()
        if newest is None or newest.round.folded_round < 0:
            return 0.0
        if self._options.rounds is not None:
            return (newest.round.folded_round + 1) / self._options.rounds
        return newest.training.tokens_total / self._options.tokens

    def _newest(self) -> StatusSnapshot | None:
        return max(self._watch.latest.values(), key=lambda snapshot: snapshot.round.folded_round, default=None)

    def _progress(self, newest: StatusSnapshot) -> str:
        alive = [snapshot for name, snapshot in self._watch.latest.items() if name in self._nodes]
        speed = sum(snapshot.training.tokens_per_s for snapshot in alive)
        losses = [snapshot.training.loss_heldout for snapshot in alive if snapshot.training.loss_heldout is not None]
        share = f"{100 * min(1.0, self._done_share()):.0f} %" if self._judged_round is None else "settling"
        return (
            f"round {newest.round.folded_round}: "
            f"{plural(newest.round.contributors, 'contribution')}, "
            f"{newest.training.tokens_total:,} tokens ({share}), "
            f"{speed:,.0f} tokens/s, held-out loss {show_loss(min(losses, default=None))}, "
            f"peers {count_alive(newest)}"
        )

    def _require_running(self, child: Child) -> None:
        if not child.running:
            code = child.process.returncode
            raise DemoFailed(f"{child.name} ended early with exit code {code}: {child.last_words()}")

    def _swarm_dir(self, name: str) -> Path:
        return self._folder / name / self._spec.swarm_id

    def _live_names(self) -> tuple[str, ...]:
        return tuple(name for name, child in self._nodes.items() if child is not self._killed)

    def _live_dirs(self) -> list[Path]:
        return [self._swarm_dir(name) for name in self._live_names()]

    def _facts(self, problems: list[str]) -> DemoFacts:
        return DemoFacts(
            spec=self._spec,
            rounds={name: read_rounds(self._swarm_dir(name) / "rounds.jsonl") for name in self._nodes},
            live=self._live_names(),
            killed=None if self._killed is None else self._killed.name,
            joiner=None if self._joiner is None else self._joiner.name,
            judged_round=self._judged_round if self._judged_round is not None else -1,
            peers_max=self._watch.peers_max,
            bits_per_parameter=self._watch.bits_per_parameter(),
            seconds=time.monotonic() - self._started_mono_s,
            problems=tuple(problems),
        )


def fresh_spec(seed_value: int | None, t0_unix_s: float) -> SwarmSpec:
    """A demo swarm of its own: the built-in spec with another start and seed."""
    base = demo_spec()
    seed = secrets.randbits(62) if seed_value is None else seed_value
    spec = replace(base, seed=seed, rounds=replace(base.rounds, t0_unix_s=float(round(t0_unix_s))))
    spec.validate()
    return spec


def read_status(swarm_dir: Path) -> StatusSnapshot | None:
    """The node's status, or None while there is none that can be read."""
    try:
        with (swarm_dir / "status.json").open("rb") as stream:
            return StatusSnapshot.from_json(stream.read(MAX_STATUS_BYTES + 1))
    except (OSError, RefuseFrame):
        return None
