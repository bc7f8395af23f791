"""A swarm of real processes: found by a link, in step to the last bit, and indifferent to who dies or joins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.node_processes import NodeProcess, Nodes, nodes_in_temp
from tscale.protocol.links import parse_link

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


class Swarm:
    """The nodes of this module's one swarm; the tests run in order and each takes up where the last one ended."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.creator = nodes.create("creator")
        nodes.wait_for(lambda: self.creator.link, "the link", self.creator)
        self.link = self.creator.link
        self.one = nodes.join("one", self.link)
        self.seed = nodes.join("seed", self.link, command="seed")
        self.late: NodeProcess | None = None

    @property
    def trainers(self) -> list[NodeProcess]:
        return [node for node in (self.creator, self.one, self.late) if node is not None and node.running]

    def rounds_pass(self, count: int, *nodes: NodeProcess) -> None:
        """Wait until each of the nodes has folded `count` rounds more, while all of them live."""
        goals = {node.name: node.last_round + count for node in nodes}
        self.nodes.wait_for(
            lambda: all(node.last_round >= goals[node.name] for node in nodes), f"{count} rounds", *nodes
        )

    def together(self, *nodes: NodeProcess) -> bool:
        """Whether each trains and sees all others."""
        return all(a.activity == "training" and all(a is b or a.sees(b) for b in nodes) for a in nodes)


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    with nodes_in_temp() as nodes:
        yield Swarm(nodes)


def test_joiners_get_spec_and_dataset_from_the_creator(swarm: Swarm) -> None:
    nodes, creator, one, seed = swarm.nodes, swarm.creator, swarm.one, swarm.seed
    nodes.wait_for(lambda: swarm.together(creator, one), "training together", creator, one, seed)
    nodes.wait_for(lambda: seed.activity == "serving" and creator.sees(seed), "the seed's dataset", creator, one, seed)
    link = parse_link(swarm.link)
    for node in (one, seed):
        assert node.folder.name == link.swarm_id
        assert (node.folder / "spec.bin").read_bytes() == (creator.folder / "spec.bin").read_bytes()
        assert nodes.book.read_bytes() in {path.read_bytes() for path in (node.folder / "blobs").iterdir()}
        assert node.err == ""
    assert seed.worker is None
    assert creator.worker is not None


def test_all_fold_the_same_and_everybody_is_in(swarm: Swarm) -> None:
    swarm.rounds_pass(5, swarm.creator, swarm.one)
    assert swarm.nodes.differences(swarm.creator, swarm.one) == []
    for node in (swarm.creator, swarm.one):
        status = node.status
        tokens = {peer["peer_id"]: peer["tokens"] for peer in status["peers"]}
        assert tokens[swarm.creator.peer_id] > 0 and tokens[swarm.one.peer_id] > 0
        assert status["round"]["contributors"] in (1, 2)
        assert status["training"]["loss_train"] < 5.0


def test_a_joiner_in_the_run_catches_up(swarm: Swarm) -> None:
    # it knows the first node that joined, not the creator
    swarm.late = swarm.nodes.join("late", swarm.one.link)
    swarm.nodes.wait_for(lambda: swarm.together(*swarm.trainers), "three in training", *swarm.trainers, swarm.seed)
    swarm.rounds_pass(4, *swarm.trainers)
    assert swarm.nodes.differences(*swarm.trainers) == []
    assert swarm.late.last_round > 5


def test_a_killed_creator_stops_nobody_and_comes_back_with_the_same_command(swarm: Swarm) -> None:
    creator, nodes = swarm.creator, swarm.nodes
    creator.kill()
    swarm.rounds_pass(4, *swarm.trainers)
    assert len(swarm.trainers) == 2
    nodes.wait_for(lambda: not swarm.one.sees(creator), "the loss of the creator", *swarm.trainers)

    died_at = creator.last_round
    back = swarm.creator = nodes.create("creator")
    nodes.wait_for(lambda: swarm.together(*swarm.trainers), "three in training again", *swarm.trainers)
    log = (back.folder / "log" / "node.log").read_text().rsplit("worker_ready", 1)[1]
    assert "resumed=True" in log.splitlines()[0]
    swarm.rounds_pass(4, *swarm.trainers)
    assert back.last_round > died_at + 3
    assert nodes.differences(*swarm.trainers) == []
    assert back.err == ""


def test_a_killed_seed_stops_nobody_and_a_left_node_is_gone(swarm: Swarm) -> None:
    swarm.seed.kill()
    swarm.rounds_pass(3, *swarm.trainers)
    late = swarm.late
    assert late is not None
    done = swarm.nodes.run("leave", "--swarm", parse_link(swarm.link).swarm_id, "--state-dir", str(late.state_dir))
    assert (done.returncode, done.stderr) == (0, "")
    assert late.process.wait(10) == 0
    swarm.nodes.wait_for(lambda: not swarm.one.sees(late), "the goodbye", *swarm.trainers)
    swarm.rounds_pass(3, *swarm.trainers)
    assert swarm.nodes.differences(swarm.creator, swarm.one, late) == []
    assert [swarm.creator.err, swarm.one.err, late.err] == ["", "", ""]


def test_status_tells_what_runs(swarm: Swarm) -> None:
    for node, running in ((swarm.one, "running, training"), (swarm.seed, "not running")):
        done = swarm.nodes.run("status", "--state-dir", str(node.state_dir))
        assert done.returncode == 0 and running in done.stdout
