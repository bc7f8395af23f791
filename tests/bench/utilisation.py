"""Does training wait for the network? `python -m tests.bench.utilisation` prints one JSON object.

Two nodes, as processes on loopback, train a model of some million parameters; each may send 20 Mbit/s (limited in the
node's transport). The length of a round is chosen so that one contribution takes a tenth of it at that speed. From the
first common rounds on, of each worker:

- `training`: time in training steps over wall time, by the worker's own clock (the status shows the same).
- `waiting`: the share of wall time in which the training thread neither runs nor queues for a processor, by the
  kernel's count (schedstat). What waits for the network, a lock or the disk is in here; what other programs on the
  machine take is not.
- `queued`: the share in which it was ready to run and other work had the processors.
- `jobs_cpu`: processor time of the worker's other threads (compress, verify, fold, snapshot) over wall time.

Linux only. Exit 1 when states differ or `training` is below 0.95.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from tests.bench.soak import read_lines
from tests.helpers.node_processes import NodeProcess, Nodes, nodes_in_temp
from tscale.node.cli.running import NodeRequest, run_here
from tscale.node.demo_report import compare_rounds, read_rounds, settled
from tscale.node.specs import file_ref, with_length
from tscale.node.swarm_argument import resolve_swarm
from tscale.node.worker.kernel_config import kernel_config
from tscale.protocol.ladder import bits_per_parameter
from tscale.protocol.presets import preset
from tscale.protocol.spec import NO_OWNER, RungSpec, SwarmSpec

UPLOAD_BITS_PER_S = 20e6
SHARE_OF_ROUND = 0.1
RUNG = RungSpec("1/1", kept_per_chunk=4096, bits=2, gain=1.0, lone_only=False)
"""Dense, so that a round is long enough for some twenty steps on one core."""
WARM_ROUNDS = 2
ENOUGH = 0.95
SAMPLE_EVERY_S = 0.25


def make_spec(width: int, layers: int, book: Path) -> tuple[SwarmSpec, int]:
    """A swarm whose contributions take their share of a round at 20 Mbit/s, and the model's size."""
    base = preset("demo", data=(file_ref(book),), owner=NO_OWNER, t0_unix_s=float(round(time.time())), name="slow")
    model = replace(base.model, width=width, heads=width // 32, layers=layers)
    codec = replace(base.codec, rungs=(RUNG,))
    inner = replace(base.inner, batch=1, context=64)
    spec = replace(base, model=model, codec=codec, inner=inner)
    numel = kernel_config(spec).layout.numel
    length_s = bits_per_parameter(RUNG) * numel / UPLOAD_BITS_PER_S / SHARE_OF_ROUND
    caps = replace(base.caps, max_blob_bytes=64 << 20, max_snapshot_bytes=8 * numel)
    spec = replace(spec, rounds=with_length(base.rounds, round(length_s, 3)), caps=caps)
    spec.validate()
    return spec, numel


@dataclass(frozen=True)
class Reading:
    """What a node and its worker have done up to a time, in seconds since the worker began and bytes."""

    unix_s: float
    worker: int
    training_s: float
    running_s: float
    queued_s: float
    jobs_s: float
    up_bytes: int

    @classmethod
    def of(cls, node: NodeProcess) -> Reading:
        """What the node's status and the kernel say now."""
        status, worker = node.status, node.worker
        assert worker is not None
        now_s = time.time()
        running_s, queued_s = thread_times(worker, worker)
        others = [int(path.name) for path in Path(f"/proc/{worker}/task").iterdir() if path.name != str(worker)]
        began_s = psutil.Process(worker).create_time()
        training_s = status["training"]["utilisation"] * (now_s - began_s)  # the share of a second ago is near enough
        jobs_s = sum(thread_times(worker, other)[0] for other in others)
        return cls(now_s, worker, training_s, running_s, queued_s, jobs_s, status["transfer"]["up_bytes"])

    def until(self, later: Reading) -> dict[str, float]:
        """The shares of the time between two readings of one worker."""
        assert self.worker == later.worker, "the worker was started again"
        wall_s = later.unix_s - self.unix_s
        running, queued = (later.running_s - self.running_s) / wall_s, (later.queued_s - self.queued_s) / wall_s
        shares = {
            "training": (later.training_s - self.training_s) / wall_s,
            "waiting": 1.0 - running - queued,
            "queued": queued,
            "jobs_cpu": (later.jobs_s - self.jobs_s) / wall_s,
            "upload": 8 * (later.up_bytes - self.up_bytes) / wall_s / UPLOAD_BITS_PER_S,
        }
        return {name: round(share, 4) for name, share in shares.items()}


def thread_times(process: int, thread: int) -> tuple[float, float]:
    """Seconds a thread has run, and seconds it was ready to run and did not; zeros for one that is gone."""
    try:
        ran_ns, queued_ns, _ = Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0.0
    return int(ran_ns) / 1e9, int(queued_ns) / 1e9


@dataclass
class Uplink:
    """The most that a node has sent in about a second, between two statuses, as a share of its limit."""

    last: tuple[float, int] | None = None
    busiest: float = 0.0

    def look(self, node: NodeProcess) -> None:
        """Take note of a new status."""
        status = node.status
        if not status:
            return
        now = (status["updated_unix_s"], status["transfer"]["up_bytes"])
        if self.last is not None and now[0] - self.last[0] >= 0.5:
            self.busiest = max(self.busiest, 8 * (now[1] - self.last[1]) / (now[0] - self.last[0]) / UPLOAD_BITS_PER_S)
        if self.last is None or now[0] - self.last[0] >= 0.5:
            self.last = now


@dataclass
class Pair:
    """Two nodes that train together."""

    nodes: Nodes
    spec: SwarmSpec
    both: list[NodeProcess] = field(default_factory=list)

    def start(self) -> None:
        """Start one node, and the other as its peer."""
        spec_file, config = self.nodes.base / "spec.bin", self.nodes.base / "config.toml"
        spec_file.write_bytes(self.spec.to_bytes())
        config.write_text(f"[network]\nupload_bytes_per_s = {round(UPLOAD_BITS_PER_S / 8)}\n")
        given, module = ("--node", str(spec_file), "--config", str(config)), "tests.bench.utilisation"
        first = self.nodes.start("first", *given, module=module)
        self.nodes.wait_for(lambda: first.link, "the link", first)
        second = self.nodes.start("second", *given, "--seed", seed_of(first), module=module)
        self.both = [first, second]

    def common(self) -> int:
        """How many folds of both nodes' contributions the first one has logged."""
        first = self.both[0]
        there = (first.folder / "rounds.jsonl").exists()
        return sum(line["contributors"] >= len(self.both) for line in read_lines(first)) if there else 0

    def taken(self) -> int:
        """How many contributions the folds that the first one has logged had together."""
        return sum(line["contributors"] for line in read_lines(self.both[0]))

    def wait(self, what: Callable[[], object], said: str, rounds: int) -> None:
        """Wait for something that takes about so many rounds."""
        self.nodes.wait_for(what, said, *self.both, limit_s=120.0 + 3.0 * rounds * self.spec.rounds.length_s)


def measure(pair: Pair, rounds: int) -> dict[str, object]:
    """Start the nodes, wait until they fold together, and read what they do in the next rounds."""
    pair.start()
    pair.wait(lambda: pair.common() >= WARM_ROUNDS, "common rounds", WARM_ROUNDS)
    first, length_s = pair.both[0], pair.spec.rounds.length_s
    before = [Reading.of(node) for node in pair.both]
    common, taken, last_round = pair.common(), pair.taken(), first.last_round
    uplinks = [Uplink() for _ in pair.both]
    end_s = time.monotonic() + rounds * length_s
    while time.monotonic() < end_s:
        for node, uplink in zip(pair.both, uplinks, strict=True):
            assert node.running, f"{node.name} ended: {node.err}"
            uplink.look(node)
        time.sleep(SAMPLE_EVERY_S)
    shares = {
        node.name: {**reading.until(Reading.of(node)), "upload_busiest_second": round(uplink.busiest, 3)}
        for node, reading, uplink in zip(pair.both, before, uplinks, strict=True)
    }
    logs = {node.name: settled(settled(read_rounds(node.folder / "rounds.jsonl"))) for node in pair.both}
    compared, differences = compare_rounds(logs)
    contribution_bytes = first.status["transfer"]["contribution_bytes"]
    return {
        "shares": shares,
        "rounds": first.last_round - last_round,
        "rounds_with_both": pair.common() - common,
        "contributions_taken": pair.taken() - taken,
        "contribution_bytes": contribution_bytes,
        "contribution_share_of_round": round(8 * contribution_bytes / UPLOAD_BITS_PER_S / length_s, 4),
        "steps_per_s": {node.name: round(steps_per_s(node), 2) for node in pair.both},
        "rounds_compared": compared,
        "digests_equal": not differences,
        "enough": all(share["training"] >= ENOUGH for share in shares.values()),
    }


def steps_per_s(node: NodeProcess) -> float:
    """Over the last seconds."""
    training = node.status["training"]
    return float(training["tokens_per_s"] * training["steps"] / max(1, training["tokens_local"]))


def seed_of(node: NodeProcess) -> str:
    """The first address in a node's link."""
    return resolve_swarm(node.link).seeds[0]


def main() -> int:
    """Measure, or be one of the nodes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--node", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--state-dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.node is not None:
        book = given.node.parent / "book.txt"
        request = NodeRequest(
            target=resolve_swarm(str(given.node)),
            role="trainer",
            state_dir=given.state_dir,
            host="127.0.0.1",
            config=given.config,
            seeds=tuple(given.seed),
            dataset_files=(book,),
            as_json=True,
        )
        return run_here(request)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the nodes would stay
    with nodes_in_temp() as nodes:
        spec, numel = make_spec(given.width, given.layers, nodes.book)
        result = {"parameters": numel, "round_s": spec.rounds.length_s, **measure(Pair(nodes, spec), given.rounds)}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["digests_equal"] and result["enough"] else 1


if __name__ == "__main__":
    sys.exit(main())
