"""Same-machine rendezvous: who is found, who is not, and what a hostile entry does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tscale.node import local_peers
from tscale.node.local_peers import announce_local, find_local, withdraw_local
from tscale.protocol.identity import Identity

SWARM = "demo-" + "a" * 26
PEER = Identity.from_secret(b"\x07" * 32).peer_id
ADDR = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "peers"


@pytest.fixture
def other_pid() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.kill()
    process.wait()


def entry_of(pid: int, tag: str = "00000000") -> str:
    return f"{pid}-{local_peers._start_time(pid)}-{tag}"


def test_own_entry_is_not_found(root: Path) -> None:
    assert announce_local(SWARM, ADDR, root)
    assert len(list((root / SWARM).iterdir())) == 1
    assert find_local(SWARM, root) == []


def test_another_live_process_is_found(root: Path, other_pid: int) -> None:
    (root / SWARM).mkdir(parents=True, mode=0o700)
    (root / SWARM / entry_of(other_pid)).write_text(ADDR)
    assert find_local(SWARM, root) == [ADDR]
    assert find_local("other-" + "b" * 26, root) == []


def test_announced_twice_is_one_entry_and_withdrawn_is_none(root: Path, other_pid: int) -> None:
    announce_local(SWARM, ADDR, root)
    announce_local(SWARM, ADDR, root)
    stranger = root / SWARM / entry_of(other_pid)
    stranger.write_text(ADDR)
    assert len(list((root / SWARM).iterdir())) == 2
    withdraw_local(SWARM, root)
    assert [path.name for path in (root / SWARM).iterdir()] == [stranger.name]


def test_entry_of_a_dead_process_is_ignored_and_removed(root: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    name = entry_of(process.pid)
    process.wait()
    (root / SWARM).mkdir(parents=True)
    (root / SWARM / name).write_text(ADDR)
    assert find_local(SWARM, root) == []
    assert not (root / SWARM / name).exists()


def test_reused_pid_is_not_the_announcer(root: Path, other_pid: int) -> None:
    (root / SWARM).mkdir(parents=True)
    stale = root / SWARM / f"{other_pid}-12345-00000000"
    stale.write_text(ADDR)
    assert find_local(SWARM, root) == []
    assert not stale.exists()


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe", b"/ip4/127.0.0.1/tcp/1", b"A" * 5000, ADDR.encode() + b"\n" + ADDR.encode(), b"/ip4/1.2.3.4"],
)
def test_what_is_no_address_is_ignored(root: Path, other_pid: int, text: bytes) -> None:
    (root / SWARM).mkdir(parents=True)
    (root / SWARM / entry_of(other_pid)).write_bytes(text)
    assert find_local(SWARM, root) == []


@pytest.mark.parametrize("swarm_id", ["../escape", "", "a/b", "UPPER", "x" * 200])
def test_a_swarm_id_is_never_a_path(root: Path, swarm_id: str) -> None:
    assert not announce_local(swarm_id, ADDR, root)
    assert find_local(swarm_id, root) == []
    assert not root.exists()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX modes")
def test_folder_that_others_can_write_is_not_used(root: Path, other_pid: int) -> None:
    (root / SWARM).mkdir(parents=True)
    (root / SWARM / entry_of(other_pid)).write_text(ADDR)
    root.chmod(0o777)
    assert find_local(SWARM, root) == []
    assert not announce_local(SWARM, ADDR, root)
