"""A long run of small nodes that are killed with -9 and started again at random, beside one that is left alone.

`python -m tests.bench.soak --minutes 15` prints one JSON object: rounds, kills, whether all nodes had the same state
after every round, and how open files and memory of the untouched node and its helpers moved. Exit 1 when states
differ or a limit is passed. Memory is judged from round 512 on: less than 12 minutes judge it not at all.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field

import psutil

from tests.helpers.node_processes import NodeProcess, Nodes, nodes_in_temp
from tscale.node.demo_report import compare_rounds, read_rounds, settled

WARM_UP_S = 120.0  # of a run of six minutes or more; else a third of it
FULL_CHAIN_ROUNDS = 512
"""How deep the chain is kept. Until then memory has to grow, and its slope is not judged."""
SAMPLE_EVERY_S = 5.0
PAUSE_S = (3.0, 15.0)
DOWN_S = (0.5, 12.0)
MAX_SLOPE_MB_PER_100_ROUNDS = 1.0
MAX_MORE_FDS = 16
"""Connections come and go with the churn; a leak of one for each of some fifty restarts is more than this."""


@dataclass
class Series:
    """Samples of one process: (round, open files, resident MB)."""

    samples: list[tuple[int, int, float]] = field(default_factory=list)

    def add(self, round_: int, pid: int | None) -> None:
        """Take a sample; a process that is gone gives none."""
        if pid is None:
            return
        try:
            process = psutil.Process(pid)
            self.samples.append((round_, process.num_fds(), process.memory_info().rss / 1e6))
        except psutil.Error:
            return

    def summary(self) -> dict[str, float]:
        """First and last values; the slope of the memory over all samples, and over the last third alone, with the
        round at which that begins."""
        third = max(2, len(self.samples) // 3)
        fds = [sample[1] for sample in self.samples]
        return {
            "rss_mb_first": round(self.samples[0][2], 1),
            "rss_mb_last": round(self.samples[-1][2], 1),
            "rss_mb_per_100_rounds": round(100 * slope(self.samples), 2),
            "rss_mb_per_100_rounds_late": round(100 * slope(self.samples[-third:]), 2),
            "late_from_round": self.samples[-third:][0][0],
            "fds_first_third_max": max(fds[:third]),
            "fds_last_third_max": max(fds[-third:]),
        }


def slope(samples: list[tuple[int, int, float]]) -> float:
    """MB a round, by least squares."""
    middle = sum(sample[0] for sample in samples) / len(samples)
    mean = sum(sample[2] for sample in samples) / len(samples)
    spread = sum((sample[0] - middle) ** 2 for sample in samples) or 1.0
    return sum((sample[0] - middle) * (sample[2] - mean) for sample in samples) / spread


class Soak:
    """The nodes and their troublemaker."""

    def __init__(self, nodes: Nodes, count: int, seed: int) -> None:
        self.nodes = nodes
        self.rng = random.Random(seed)
        self.steady = nodes.create("steady")
        nodes.wait_for(lambda: self.steady.link, "the link", self.steady)
        self.link = self.steady.link
        self.names = [f"node-{number}" for number in range(1, count)]
        self.running: dict[str, NodeProcess] = {name: nodes.join(name, self.link) for name in self.names}
        self.back_at_s: dict[str, float] = {}
        self.kills = 0
        self.series = {name: Series() for name in ("node", "p2pd", "worker")}

    def run(self, seconds: float) -> None:
        """Kill, start and sample for so long."""
        begin_s = time.monotonic()
        next_kill_s, next_sample_s = begin_s + 20.0, begin_s + min(WARM_UP_S, seconds / 3.0)
        while (now_s := time.monotonic()) < begin_s + seconds:
            for name in [name for name, at_s in self.back_at_s.items() if at_s <= now_s]:
                del self.back_at_s[name]
                self.running[name] = self.nodes.join(name, self.link)
            for node in (self.steady, *self.running.values()):
                if not node.running:
                    raise SystemExit(f"{node.name} ended with {node.process.returncode}: {node.err}")
            if now_s >= next_kill_s and self.running:
                self.kill(self.rng.choice(sorted(self.running)), now_s)
                next_kill_s = now_s + self.rng.uniform(*PAUSE_S)
            if now_s >= next_sample_s:
                next_sample_s = now_s + SAMPLE_EVERY_S
                self.sample()
            time.sleep(0.2)

    def kill(self, name: str, now_s: float) -> None:
        """SIGKILL to the node, or now and then to its worker alone."""
        node = self.running[name]
        worker = node.worker
        self.kills += 1
        if worker is not None and self.rng.random() < 0.3:
            psutil.Process(worker).kill()
            return
        node.kill()
        del self.running[name]
        self.back_at_s[name] = now_s + self.rng.uniform(*DOWN_S)

    def sample(self) -> None:
        """One sample of the node that is left alone."""
        round_ = self.steady.last_round
        self.series["node"].add(round_, self.steady.process.pid)
        self.series["p2pd"].add(round_, self.steady.p2pd)
        self.series["worker"].add(round_, self.steady.worker)

    def report(self) -> dict[str, object]:
        """What came of it."""
        folders = {node.state_dir: node for node in self.nodes.all}
        rounds = {node.name: settled(settled(read_rounds(node.folder / "rounds.jsonl"))) for node in folders.values()}
        compared, differences = compare_rounds(rounds)
        counts = [line["contributors"] for line in read_lines(self.steady)]
        return {
            "rounds": self.steady.last_round,
            "rounds_compared": compared,
            "differences": differences[:10],
            "kills": self.kills,
            "contributors_mean": round(sum(counts) / max(1, len(counts)), 2),
            "tokens": self.steady.status["training"]["tokens_total"],
            **{name: series.summary() for name, series in self.series.items() if series.samples},
        }


def read_lines(node: NodeProcess) -> list[dict[str, int]]:
    """The folds that a node has logged."""
    return [json.loads(line) for line in (node.folder / "rounds.jsonl").read_text().splitlines()]


def passed(report: dict[str, object]) -> bool:
    """Whether the states agreed and nothing grew; memory is judged once the chain is full."""
    if report["differences"] or not report["rounds_compared"]:
        return False
    for name in ("node", "p2pd"):
        found = report.get(name)
        if not isinstance(found, dict):
            return False
        full = found["late_from_round"] >= FULL_CHAIN_ROUNDS
        if full and found["rss_mb_per_100_rounds_late"] > MAX_SLOPE_MB_PER_100_ROUNDS:
            return False
        if found["fds_last_third_max"] > found["fds_first_third_max"] + MAX_MORE_FDS:
            return False
    return True


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with nodes_in_temp() as nodes:
        soak = Soak(nodes, args.nodes, args.seed)
        soak.run(60.0 * args.minutes)
        report = soak.report()
    report["passed"] = passed(report)
    print(json.dumps({"minutes": args.minutes, "nodes": args.nodes, "seed": args.seed, **report}))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
