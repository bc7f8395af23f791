"""A daemon that does what a test says, for the commands around it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from tscale.protocol.identity import Identity
from tscale.protocol.links import SwarmLink, format_link

PEER = Identity.from_secret(b"\x05" * 32).peer_id
ADDR = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
LINK = format_link(SwarmLink("ours-" + "a" * 26, (ADDR,)))


class FakeDaemon:
    """Stands where tscale.node.daemon is; `act` is the node's whole life."""

    def __init__(self) -> None:
        self.options: Any = None
        self.act: Callable[[Any], int] = lambda events: 0

    def module(self) -> types.ModuleType:
        module = types.ModuleType("tscale.node.daemon")

        class NodeOptions(types.SimpleNamespace):
            pass

        async def run_node(options: Any, events: Any) -> int:
            self.options = options
            return self.act(events)

        module.NodeOptions = NodeOptions  # type: ignore[attr-defined]
        module.run_node = run_node  # type: ignore[attr-defined]
        return module


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error output: exactly one line that starts with the command's name."""
    err = capsys.readouterr().err
    assert err.startswith("tscale-node: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err
