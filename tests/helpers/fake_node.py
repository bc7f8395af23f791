"""A node for tests of the demo: it takes the demo's command lines, counts tokens, and writes a node's files.

All fakes of a swarm agree, because a round's manifest and state follow from its number and the time alone. The
environment variable FAKE_FAULT makes one of them misbehave: `<name>:drift`, `<name>:crash`, `<name>:linger`.
Run as `python -m tests.helpers.fake_node`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import numpy as np

from tscale.kernels.init import init_state
from tscale.kernels.model_config import ModelConfig
from tscale.node.checkpoint import save_checkpoint
from tscale.node.statedir import atomic_write
from tscale.protocol.spec import SwarmSpec
from tscale.protocol.status import (
    STATUS_SCHEMA,
    CreditStatus,
    ModelStatus,
    NodeStatus,
    RoundStatus,
    ScreenStatus,
    StatusSnapshot,
    TrainingStatus,
    TransferStatus,
)

ROUND_S = 0.05
EARLY_S = 5.0
"""Rounds begin this much before the spec says, so that tests need not wait."""
TOKENS = 1000


class FakeNode:
    """One fake. `fault` is what it does wrong."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = args.name
        self.spec = SwarmSpec.from_bytes(Path(args.swarm).read_bytes())
        self.folder = Path(args.state_dir) / self.spec.swarm_id
        name, _, fault = os.environ.get("FAKE_FAULT", "").partition(":")
        self.fault = fault if name == args.name else ""
        self.folder.mkdir(parents=True, exist_ok=True)

    def fold(self, number: int) -> None:
        """Write the line and the status of one round."""
        state = f"drifted{number}" if self.fault == "drift" and number > 3 else sha256(b"s%d" % number).hexdigest()
        line = {"round": number, "manifest": sha256(b"m%d" % number).hexdigest(), "state": state, "parent": ""}
        with (self.folder / "rounds.jsonl").open("a") as stream:
            stream.write(json.dumps({**line, "contributors": 3, "tokens_total": number * TOKENS, "unix_s": 1.0}) + "\n")
        atomic_write(self.folder / "status.json", self.status(number).to_json().encode(), durable=False)

    def status(self, number: int) -> StatusSnapshot:
        return StatusSnapshot(
            schema=STATUS_SCHEMA,
            updated_unix_s=time.time(),
            swarm_id=self.spec.swarm_id,
            swarm_name=self.spec.name,
            node=NodeStatus("12D3KooW" + self.name, "trainer", "0.1.0", os.getpid(), 1.0, (), str(self.folder)),
            activity="training",
            reason="",
            round=RoundStatus(number + 1, 0.0, 1.0, number, "", "", 3),
            training=TrainingStatus(0, number * TOKENS, 100.0, 1, 2.0, 2.0, None, "", "", ()),
            peers=(),
            transfer=TransferStatus(0, 0, 0.0, 0.0, 1000, 0.5, "1/16"),
            model=ModelStatus("tscale", 16_000),
            credit=CreditStatus(0, 0, 0, ""),
            screen=ScreenStatus(0, 0),
            warnings=(),
        )

    def save(self) -> None:
        """A checkpoint whose embedding is much smaller, so that its loss is another one than at the start."""
        anchor = init_state(ModelConfig(**asdict(self.spec.model)), self.spec.seed) * np.float32(0.01)
        save_checkpoint(self.folder / "checkpoint", {"head/anchor": anchor}, {"head": {"round": 99}})


def main() -> None:
    """Take the demo's options, be ready, fold until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("seed", "join"))
    for option in ("swarm", "state-dir", "host", "port", "name", "data", "seed"):
        parser.add_argument(f"--{option}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    node = FakeNode(args)
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    print(json.dumps({"event": "ready", "link": "tscale://x", "addrs": ["/ip4/127.0.0.1/tcp/1"]}), flush=True)
    if node.fault == "linger":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    while not stop:
        number = int((time.time() - node.spec.rounds.t0_unix_s + EARLY_S) / ROUND_S)
        if args.role == "join" and number > 0:
            node.fold(number)
            if node.fault == "crash" and number > 3:
                sys.exit("the fake crashed")
        time.sleep(ROUND_S - time.time() % ROUND_S)
    if args.role == "join":
        node.save()


if __name__ == "__main__":
    main()
