"""The bench that measures whether training waits for the network: its arithmetic, and the swarm it makes."""

import os
import threading

import pytest

from tests.bench.utilisation import Reading, Uplink, make_spec, thread_times
from tests.helpers.node_processes import NodeProcess
from tscale.node.specs import shipped_book_path
from tscale.protocol.ladder import bits_per_parameter


def test_a_contribution_takes_a_tenth_of_a_round_at_20_mbit() -> None:
    spec, parameters = make_spec(64, 2, shipped_book_path())
    (rung,) = spec.codec.rungs
    assert bits_per_parameter(rung) * parameters / 20e6 == pytest.approx(0.1 * spec.rounds.length_s, rel=1e-2)


def test_what_neither_runs_nor_queues_waits() -> None:
    before = Reading(
        unix_s=1000.0, worker=7, training_s=50.0, running_s=40.0, queued_s=10.0, jobs_s=1.0, up_bytes=1_000
    )
    after = Reading(
        unix_s=1100.0, worker=7, training_s=146.0, running_s=70.0, queued_s=75.0, jobs_s=9.0, up_bytes=25_001_000
    )
    assert before.until(after) == {
        "training": 0.96,
        "waiting": 0.05,
        "queued": 0.65,
        "jobs_cpu": 0.08,
        "upload": 0.1,
    }


def test_the_kernel_counts_what_a_thread_runs() -> None:
    begin_s, _ = thread_times(os.getpid(), threading.get_native_id())
    while thread_times(os.getpid(), threading.get_native_id())[0] < begin_s + 0.01:
        sum(range(10_000))
    assert thread_times(os.getpid(), 2**30) == (0.0, 0.0)


def test_the_busiest_second_is_between_statuses_that_are_a_second_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter(
        {"updated_unix_s": at, "transfer": {"up_bytes": up}}
        for at, up in [(10.0, 0), (10.0, 0), (11.0, 500_000), (11.1, 900_000), (12.0, 3_000_000), (14.0, 5_500_000)]
    )
    monkeypatch.setattr(NodeProcess, "status", property(lambda self: next(statuses, {})))
    node, uplink = object.__new__(NodeProcess), Uplink()
    for _ in range(7):
        uplink.look(node)
    assert uplink.busiest == pytest.approx(1.0)  # 2.5 MB in the second from 11 to 12
