"""How nodes end, and what is left of them: Ctrl-C, SIGTERM, kill -9 of the node or its worker, a stopped process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.helpers.node_processes import END_S, NodeProcess, Nodes, nodes_in_temp
from tscale.node.checkpoint import load_checkpoint
from tscale.node.statedir import StateDir

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with nodes_in_temp() as made:
        yield made


@pytest.fixture(scope="module")
def watcher(nodes: Nodes) -> NodeProcess:
    """The creator, which stays up and sees what the other one does."""
    node = nodes.create("watcher")
    nodes.wait_for(lambda: node.link, "the link", node)
    return node


def start(nodes: Nodes, watcher: NodeProcess) -> NodeProcess:
    """The other node, training with the watcher; always the same one, from its state directory."""
    node = nodes.join("other", watcher.link)
    nodes.wait_for(lambda: node.activity == "training" and watcher.sees(node), "training together", node, watcher)
    return node


def end(node: NodeProcess, number: signal.Signals) -> int:
    """Send the signal as a terminal does; the exit code, which must come within 10 s, with nothing left."""
    node.signal(number)
    begin_s = time.monotonic()
    code = node.process.wait(END_S)
    while node.left():
        assert time.monotonic() - begin_s < END_S, f"{node.left()} are still there"
        time.sleep(0.02)
    return code


def private_folders(nodes: Nodes, node: NodeProcess) -> list[str]:
    return [path.name for path in nodes.tmp.iterdir() if path.name.startswith(f"tscale-{node.process.pid}-")]


def saved_round(node: NodeProcess) -> int:
    found = load_checkpoint(StateDir(node.folder).checkpoint)
    assert found is not None
    return int(found.meta["head"]["round"])


def resumed(node: NodeProcess) -> bool:
    return "resumed=True" in (node.folder / "log" / "node.log").read_text().rsplit("worker_ready", 1)[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_a_node_with_its_checkpoint_saved(
    number: signal.Signals, nodes: Nodes, watcher: NodeProcess
) -> None:
    node = start(nodes, watcher)
    # the second of these tests finds what the first one saved
    assert resumed(node) == (number is signal.SIGTERM)
    before = node.last_round
    nodes.wait_for(lambda: node.last_round > before, "a round", node, watcher)
    assert end(node, number) == 0
    assert private_folders(nodes, node) == []
    assert node.err == ""
    assert saved_round(node) == node.last_round > before
    assert node.activity == "stopped"
    # the others hear the goodbye and need no timeout for it
    nodes.wait_for(lambda: not watcher.sees(node), "the goodbye", watcher)


@pytest.fixture(scope="module")
def other(nodes: Nodes, watcher: NodeProcess) -> NodeProcess:
    """The other node for the tests that leave it running."""
    return start(nodes, watcher)


def test_kill_9_of_the_worker_costs_a_restart_and_no_membership(
    nodes: Nodes, watcher: NodeProcess, other: NodeProcess
) -> None:
    worker, helper = other.worker, other.p2pd
    assert worker is not None
    tokens = other.status["credit"]["tokens_accepted"]
    os.kill(worker, signal.SIGKILL)
    unseen = 0

    def contributes_again() -> bool:
        nonlocal unseen
        unseen += not watcher.sees(other)
        status = other.status
        return other.worker not in (None, worker) and bool(status) and status["credit"]["tokens_accepted"] > tokens

    nodes.wait_for(contributes_again, "a contribution of a new worker", other, watcher)
    assert unseen == 0
    assert other.p2pd == helper
    said = [event["text"] for event in other.events("notice")]
    assert said == ["signal 9 ended the worker: a new one starts in 1 s"]


def test_a_node_that_was_stopped_for_a_while_catches_up(nodes: Nodes, watcher: NodeProcess, other: NodeProcess) -> None:
    os.kill(other.process.pid, signal.SIGSTOP)
    nodes.wait_for(lambda: not watcher.sees(other), "the silence", watcher)
    away = watcher.last_round
    os.kill(other.process.pid, signal.SIGCONT)
    nodes.wait_for(lambda: other.last_round > away + 1 and other.activity == "training", "catching up", other, watcher)
    assert nodes.differences(other, watcher) == []


def test_after_kill_9_nothing_of_a_node_is_left_and_it_resumes(
    nodes: Nodes, watcher: NodeProcess, other: NodeProcess
) -> None:
    assert None not in (other.worker, other.p2pd)
    assert len(private_folders(nodes, other)) == 1
    other.kill()
    deadline = time.monotonic() + END_S
    while other.left() or private_folders(nodes, other):
        assert time.monotonic() < deadline, f"still there: {other.left()}, {private_folders(nodes, other)}"
        time.sleep(0.05)
    died_at = watcher.last_round

    again = start(nodes, watcher)
    assert resumed(again)
    nodes.wait_for(lambda: again.last_round > died_at + 1, "rounds after the kill", again, watcher)
    assert nodes.differences(again, watcher) == []
    # a terminal that is closed
    assert end(again, signal.SIGHUP) == 0
    assert saved_round(again) == again.last_round


def test_a_second_signal_ends_it_at_once(nodes: Nodes, watcher: NodeProcess) -> None:
    worker = watcher.worker
    assert worker is not None
    # a worker that hangs keeps the first signal waiting for its checkpoint
    os.kill(worker, signal.SIGSTOP)
    watcher.signal(signal.SIGINT)
    nodes.wait_for(lambda: watcher.activity == "stopping", "the stop", watcher)
    assert end(watcher, signal.SIGINT) == 130
    assert watcher.err == "tscale-node: interrupted\n"
    assert private_folders(nodes, watcher) == []


def test_ctrl_c_while_the_command_still_loads_is_one_line() -> None:
    script = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from tscale.node.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "tscale-node: interrupted\n")
