"""One swarm of nodes that each compute in their own way: formats and layer-major training are a local matter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.node_processes import NodeProcess, Nodes, nodes_in_temp

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

WAYS = {
    "plain": "",
    "bf16": '[training]\nprecision = "bf16"\n',
    "fp8": '[training]\nprecision = "fp8"\n',
    "slots": "[compute]\noffload_slots = 2\n",
}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with nodes_in_temp() as made:
        yield made


def test_nodes_of_every_kind_end_each_round_with_the_same_digest(nodes: Nodes) -> None:
    trainers = start_one_of_each(nodes)
    nodes.wait_for(lambda: all(node.activity == "training" for node in trainers), "training together", *trainers)
    everybody = {node.peer_id for node in trainers}
    nodes.wait_for(lambda: all(contributors(node) == everybody for node in trainers), "a gift of each", *trainers)
    goal = max(node.last_round for node in trainers) + 3
    nodes.wait_for(lambda: all(node.last_round >= goal for node in trainers), "three rounds more", *trainers)
    assert nodes.differences(*trainers) == []
    said = ["".join(str(event["text"]) for event in node.events("notice")) for node in trainers]
    assert said == [
        "",
        "training on the processor in bf16 (emulation)",
        "training on the processor in fp8-block (emulation)",
        "training on the processor, 2 slots for layers, 4 sequences at a time in fp32",
    ]


def start_one_of_each(nodes: Nodes) -> list[NodeProcess]:
    started: list[NodeProcess] = []
    for name, text in WAYS.items():
        path = nodes.base / f"{name}.toml"
        path.write_text(text)
        if started:
            started.append(nodes.join(name, started[0].link, "--config", str(path)))
        else:
            started.append(nodes.create(name, "--config", str(path)))
            nodes.wait_for(lambda: started[0].link, "the link", started[0])
    return started


def contributors(node: NodeProcess) -> set[str]:
    """Whose tokens the node has folded."""
    return {peer["peer_id"] for peer in node.status.get("peers", []) if peer["tokens"] > 0}
