"""A run is a function of its seed: nothing depends on the order of sets, which changes from process to process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from tests.sim.churn import Churn, ChurnPlan
from tests.sim.health import heads
churn = Churn(ChurnPlan(peers=8, rounds=6, part_at=3, heal_at=4), int({seed}))
result = churn.run()
print(result.messages, sorted((m.hex(), s.hex()) for m, s in heads(churn.world)))
"""


def run(seed: int, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(seed=seed)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    first = run(5, "1")
    assert first == run(5, "2"), "something depends on the order of a set"
    assert first != run(6, "1")
