"""`tscale-node demo` as it is: the swarm learns, survives a kill, takes in a late node, and all states are equal."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]


def test_demo_holds_everything_it_claims() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tscale.node.cli", "demo", "--port", "0", "--seed-value", "1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["failures"] == []
    assert done.returncode == 0
    assert report["digests_equal"] is True
    assert report["digests_compared"] >= report["rounds"] - 5
    assert report["loss_last"] <= 0.55 * report["loss_first"]
    assert report["peers_max"] >= 4
    assert 0.0 < report["bits_per_parameter"] < 1.0
    assert 190_000 <= report["parameters"] <= 900_000
    assert len(report["sample"]) >= 100
    assert "dashboard: http://127.0.0.1:" in done.stdout
