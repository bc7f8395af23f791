"""Does training wait for the network? `python -m tests.bench.utilisation` prints one JSON object.

Two nodes, as processes on loopback, train a model of some million parameters; each may send 20 Mbit/s (limited in the
node's transport). The length of a round is chosen so that one contribution takes a tenth of it at that speed. The
figure is training time over wall time of each worker, from the first common round on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
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
RUNG = RungSpec("1/4", kept_per_chunk=1024, bits=2, gain=1.0, lone_only=False)
WARM_ROUNDS = 2


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
    """A worker's share of training since it began, at a time."""

    unix_s: float
    began_unix_s: float
    share: float

    @classmethod
    def of(cls, node: NodeProcess) -> Reading:
        """What the node's status says now."""
        status = node.status
        worker = node.worker
        assert worker is not None
        return cls(status["updated_unix_s"], psutil.Process(worker).create_time(), status["training"]["utilisation"])

    def until(self, later: Reading) -> float:
        """The share of training between two readings."""
        trained_s = later.share * (later.unix_s - later.began_unix_s) - self.share * (self.unix_s - self.began_unix_s)
        return trained_s / (later.unix_s - self.unix_s)


def measure(nodes: Nodes, spec: SwarmSpec, rounds: int) -> dict[str, object]:
    """Start two nodes, wait until they fold together, and read their share of training over some rounds."""
    spec_file, config = nodes.base / "spec.bin", nodes.base / "config.toml"
    spec_file.write_bytes(spec.to_bytes())
    config.write_text(f"[network]\nupload_bytes_per_s = {round(UPLOAD_BITS_PER_S / 8)}\n")
    module = "tests.bench.utilisation"
    first = nodes.start("first", "--node", str(spec_file), "--config", str(config), module=module)
    nodes.wait_for(lambda: first.link, "the link", first)
    second = nodes.start(
        "second", "--node", str(spec_file), "--config", str(config), "--seed", seed_of(first), module=module
    )
    both = (first, second)

    def common() -> int:
        there = (first.folder / "rounds.jsonl").exists()
        return sum(line["contributors"] >= len(both) for line in read_lines(first)) if there else 0

    limit_s = 120.0 + 10.0 * (rounds + WARM_ROUNDS) * spec.rounds.length_s
    nodes.wait_for(lambda: common() >= WARM_ROUNDS, "common rounds", *both, limit_s=limit_s)
    before = [(node, Reading.of(node), node.last_round) for node in both]
    nodes.wait_for(lambda: common() >= WARM_ROUNDS + rounds, "the rounds", *both, limit_s=limit_s)
    shares = {node.name: round(reading.until(Reading.of(node)), 4) for node, reading, _ in before}
    logs = {node.name: settled(settled(read_rounds(node.folder / "rounds.jsonl"))) for node in both}
    compared, differences = compare_rounds(logs)
    passed = first.last_round - before[0][2]
    transfer = first.status["transfer"]
    return {
        "utilisation": shares,
        "rounds": passed,
        "rounds_with_both": common() - WARM_ROUNDS,
        "contribution_bytes": transfer["contribution_bytes"],
        "upload_bytes": {node.name: node.status["transfer"]["up_bytes"] for node in both},
        "contribution_share_of_round": round(
            8 * transfer["contribution_bytes"] / UPLOAD_BITS_PER_S / spec.rounds.length_s, 4
        ),
        "rounds_compared": compared,
        "digests_equal": not differences,
    }


def seed_of(node: NodeProcess) -> str:
    """The first address in a node's link."""
    return resolve_swarm(node.link).seeds[0]


def main() -> int:
    """Measure, or be one of the nodes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=20)
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
    with nodes_in_temp() as nodes:
        spec, numel = make_spec(given.width, given.layers, nodes.book)
        result = {"parameters": numel, "round_s": spec.rounds.length_s, **measure(nodes, spec, given.rounds)}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["digests_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
