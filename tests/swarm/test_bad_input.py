"""Wrong input and broken files at the real command: one line on stderr, an exit code, no traceback, nothing lost.

Everything lies in a folder with spaces and letters of three scripts, and the locale is C.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.helpers.node_processes import NodeProcess, Nodes, nodes_in_temp
from tscale.node.checkpoint import load_checkpoint
from tscale.protocol.addrs import parse_addr
from tscale.protocol.links import parse_link

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SWARM = "ours-m36ehorekonlkcjfcckdhb75cv"
PEER = "12D3KooWGGEDoVKRUPcP2vxkhUHe5xThXMjuvApCfBBCjdG2FLbW"
ADDR = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with nodes_in_temp("Jörg Müller 測試") as made:
        made.env.update(LC_ALL="C", LANG="C")
        (made.base / "binary").write_bytes(bytes(range(256)))
        (made.base / "empty").touch()
        (made.base / "short").write_text("Call me Ishmael.")
        (made.base / "unknown.toml").write_text("[network]\nprot = 1\n")
        (made.base / "elsewhere.toml").write_bytes(b"\xef\xbb\xbfuplod_bytes_per_s = 1\r\n")
        yield made


@pytest.fixture(scope="module")
def creator(nodes: Nodes) -> NodeProcess:
    node = nodes.create("creator")
    nodes.wait_for(lambda: node.link, "the link", node)
    return node


def refuse(nodes: Nodes, code: int, says: str, *args: str) -> None:
    """The command ends with this code and one line that has `says` in it."""
    done = nodes.run(*args)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("tscale-node: ") and done.stderr.endswith("\n") and done.stderr.count("\n") == 1
    assert says in done.stderr
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("join", "--swarm", f"tscale://{SWARM}?seed={ADDR[:-1]}"), "wrong peer id"),
        (("join", "--swarm", f"tscale://{SWARM}?seed={ADDR}{ADDR}"), "two addresses pasted as one"),
        (("join", "--swarm", SWARM), "names no seed"),
        (
            ("join", "--swarm", "demo", "--config", "{}/unknown.toml"),
            'unknown key "prot" in [network]: did you mean "p',
        ),
        (
            ("join", "--swarm", "demo", "--config", "{}/elsewhere.toml"),
            'did you mean "upload_bytes_per_s" in [network]',
        ),
        (("create", "--name", "a", "--data", "{}/none"), "none does not exist"),
        (("create", "--name", "a", "--data", "{}/binary"), "is not a text file"),
        (("create", "--name", "a", "--data", "{}/empty"), "is empty"),
        (("create", "--name", "a", "--data", "{}"), "is a directory"),
        (("create", "--name", "a", "--data", "{}/short"), "too short"),
        (("join", "--swarm", "demo", "--state-dir", "{}/book.txt"), "book.txt is a file, not a folder"),
        (("join", "--swarm", "demo", "--state-dir", "{}/book.txt/x"), "book.txt is a file, not a folder"),
        (("join", "--swarm", "demo", "--state-dir", "/proc/nowhere"), "can't write /proc/nowhere"),
        (("join", "--swarm", "demo", "--host", "203.0.113.7"), "can't listen on 203.0.113.7"),
    ],
)
def test_what_a_person_gives(args: tuple[str, ...], says: str, nodes: Nodes) -> None:
    refuse(nodes, 2, says, *(arg.replace("{}", str(nodes.base)) for arg in args))


def test_a_running_nodes_port_folder_and_link(nodes: Nodes, creator: NodeProcess) -> None:
    link = parse_link(creator.link)
    port = parse_addr(link.seeds[0]).port
    here = ("--host", "127.0.0.1")
    elsewhere = str(nodes.base / "state" / "elsewhere")
    refuse(nodes, 4, f"port {port} of 127.0.0.1 is in use", "join", "--swarm", "demo", "--port", str(port), *here)
    in_use = ("join", "--swarm", creator.link, "--state-dir", str(creator.state_dir))
    refuse(nodes, 3, f"another node (process {creator.process.pid}) uses", *in_use, *here)
    wrong = creator.link.rpartition("/")[0] + f"/{PEER}"
    at = ("--state-dir", elsewhere, *here)
    # nodes of one machine find each other without a link; this one must not
    env = {name: str(nodes.base / "alone") for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME")}
    for text, says in (
        (wrong, "another peer answers at this address"),
        (creator.link.replace(link.swarm_id, SWARM), "the seed is in another swarm"),
    ):
        done = nodes.run("join", "--swarm", text, *at, **env)
        *waiting, error = done.stderr.splitlines()
        assert done.returncode == 2 and error.startswith("tscale-node: ") and says in error, done.stderr
        # a busy machine may answer the first dial too late
        assert all(line.startswith("waiting for a seed of ") for line in waiting), done.stderr
    refuse(nodes, 2, "is not a text of this swarm's dataset", "join", "--swarm", creator.link, "--data", __file__, *at)
    assert creator.running and creator.err == ""


def start_again(nodes: Nodes, creator: NodeProcess) -> NodeProcess:
    """The creator's command, once more, until it trains."""
    before = creator.folds
    node = nodes.create("creator")
    nodes.wait_for(lambda: node.activity == "alone" and node.folds > before, "training", node)
    return node


def stop(node: NodeProcess) -> None:
    node.signal(signal.SIGTERM)
    assert node.process.wait(30) == 0, node.err


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit of a running process")
def test_a_disk_that_fills_up_stops_the_node_and_keeps_the_last_checkpoint(nodes: Nodes, creator: NodeProcess) -> None:
    checkpoints = creator.folder / "checkpoint"
    nodes.wait_for(lambda: len(list(checkpoints.glob("*.tsck"))) == 2, "two checkpoints", creator)
    worker = creator.worker
    assert worker is not None
    newest = max(checkpoints.glob("*.tsck"))
    # contributions fit, a checkpoint does not
    limit_bytes = newest.stat().st_size // 2
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    assert creator.process.wait(120) == 5
    assert creator.err.startswith("tscale-node: no space left for ") and creator.err.count("\n") == 1
    assert all(path.name.endswith(".tsck") for path in checkpoints.iterdir())
    kept = load_checkpoint(checkpoints)
    assert kept is not None and kept.note is None
    assert max(checkpoints.glob("*.tsck")) >= newest


def test_files_of_a_node_that_someone_spoilt(nodes: Nodes, creator: NodeProcess) -> None:
    folder, link = creator.folder, creator.link
    if creator.running:
        stop(creator)
    join = ("join", "--swarm", parse_link(link).swarm_id, "--state-dir", str(creator.state_dir), "--host", "127.0.0.1")
    key, spec = folder / "identity.key", folder / "spec.bin"
    good = key.read_bytes()
    key.chmod(0o644)
    refuse(nodes, 2, "others can read the key file (mode 0644)", *join)
    key.write_bytes(b"not a key")
    key.chmod(0o600)
    refuse(nodes, 2, "identity.key: ", *join)
    assert key.read_bytes() == b"not a key"
    key.write_bytes(good)

    kept = spec.read_bytes()
    spec.write_bytes(kept.replace(b"ours", b"hers"))
    refuse(nodes, 2, "remove the file to fetch it again", *join)
    spec.write_bytes(kept[:-1])
    refuse(nodes, 2, "remove the file to fetch it again", *join)
    spec.write_bytes(kept)
    if os.geteuid() != 0:
        folder.chmod(0o500)
        refuse(nodes, 2, "can't write", *join)
        folder.chmod(0o700)


def test_a_damaged_checkpoint_costs_a_few_rounds_and_is_named(nodes: Nodes, creator: NodeProcess) -> None:
    checkpoints = creator.folder / "checkpoint"
    newest = max(checkpoints.glob("*.tsck"))
    data = newest.read_bytes()
    newest.write_bytes(data[:5000] + b"xxxx" + data[5004:])
    node = start_again(nodes, creator)
    (notice,) = [event["text"] for event in node.events("notice")]
    assert f"{newest.name} is damaged (its hash is wrong): using the one before it" in notice
    assert node.status["node"]["peer_id"] == node.peer_id
    stop(node)

    # none is left: what the node's store and chain hold brings the state back
    before, total_tokens = node.last_round, node.total_tokens
    for path in checkpoints.glob("checkpoint-*.tsck"):
        path.write_bytes(path.read_bytes()[:-100])
    node = nodes.create("creator")
    nodes.wait_for(lambda: max(shown_tokens(node), default=0) > total_tokens, "rounds after the loss", node)
    (notice,) = [event["text"] for event in node.events("notice")]
    assert "is whole (" in notice
    # what was trained before is not lost, and nothing that it shows on the way back looks like it
    tokens = shown_tokens(node)
    assert tokens[0] > 0 and tokens == sorted(tokens)
    stop(node)
    found = load_checkpoint(checkpoints)
    assert found is not None and found.note is None and found.meta["head"]["round"] > before


def shown_tokens(node: NodeProcess) -> list[int]:
    """All tokens of the swarm, as the node said with every round."""
    return [event["status"]["training"]["tokens_total"] for event in node.events("round")]
