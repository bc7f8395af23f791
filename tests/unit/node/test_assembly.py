"""What a node is put together from: its port (the one asked for, else that of the last run) and its links' limits."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tscale.node.assembly import NodeOptions, choose_port, keep_port, make_transport
from tscale.node.config import NetworkConfig, NodeConfig
from tscale.node.statedir import StateDir
from tscale.protocol.identity import Identity

ADDR_TAIL = f"/p2p/{Identity.from_secret(bytes(32)).peer_id}"


def options(folder: Path, port: int) -> NodeOptions:
    return NodeOptions("s", None, folder, "trainer", (), "127.0.0.1", port, "", NodeConfig())


def test_the_port_of_the_last_run_is_taken_again_while_it_is_free(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert choose_port(options(tmp_path, 0), state) == 0
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        keep_port(state, [f"/ip4/127.0.0.1/tcp/{port}{ADDR_TAIL}"])
        other.listen(1)
        assert choose_port(options(tmp_path, 0), state) == 0
    assert choose_port(options(tmp_path, 0), state) == port
    assert choose_port(options(tmp_path, 4001), state) == 4001


def test_a_damaged_note_of_the_port_is_no_port(tmp_path: Path) -> None:
    for text in ("", "x", "-5", "70000", "9" * 50):
        (tmp_path / "port").write_text(text)
        assert choose_port(options(tmp_path, 0), StateDir(tmp_path)) == 0


@pytest.mark.parametrize(
    ("network", "limits"),
    [
        (NetworkConfig(upload_bytes_per_s=2_500_000), (2_500_000, None)),
        (NetworkConfig(download_bytes_per_s=1_000), (None, 1_000)),
        (NetworkConfig(), (None, None)),
    ],
)
def test_every_stream_of_the_transport_has_the_limits_of_the_configuration(
    tmp_path: Path, network: NetworkConfig, limits: tuple[int | None, int | None]
) -> None:
    given = replace(options(tmp_path, 0), config=replace(NodeConfig(), network=network))
    link = make_transport(given, StateDir(tmp_path), lambda: 0.0).link
    assert (link.upload.bucket.rate_bps, link.download.bucket.rate_bps) == limits
