"""The status of a node: what of the swarm is shown, and what it says of a link that is too slow."""

from __future__ import annotations

from tests.helpers.solo import Solo, other, peer_record
from tscale.node.board import MAX_SHOWN_STRANGERS, SLOW_UPLINK, Board, BoardConfig
from tscale.node.screening import Screening
from tscale.node.transport.memory import MemoryNetwork, MemoryTransport
from tscale.protocol.messages import Push
from tscale.protocol.status import StatusSnapshot

ALICE = other(1)


def show(solo: Solo) -> StatusSnapshot:
    transport = MemoryTransport(MemoryNetwork(1, lambda: solo.now), solo.identity.public, True)
    config, screening = BoardConfig("trainer", "", "/tmp", 50_000, "nano"), Screening(solo.machine, lambda line: None)
    return Board(config, solo.machine, transport, screening).snapshot(solo.now)


def test_of_peers_that_were_only_told_of_a_few_are_shown() -> None:
    solo = Solo().boot().meet(ALICE)
    records = tuple(peer_record(other(number), solo.now).bytes for number in range(1000, 1200))
    solo.ask(ALICE, Push(records))
    assert len(solo.machine.view.members.contacts) == 201
    shown = show(solo)
    assert [peer.alive for peer in shown.peers] == [True, True, *[False] * MAX_SHOWN_STRANGERS]
    assert len(shown.to_json()) < 8_000


def test_a_link_too_slow_for_the_rounds_is_named_with_its_figures() -> None:
    solo = Solo(upload_bps=16_000.0).boot().meet(ALICE)
    assert show(solo).warnings == () and show(solo).reason == ""
    solo.machine.fetching.undelivered_bytes = 18_000
    shown = show(solo)
    assert (shown.activity, shown.reason) == ("training", SLOW_UPLINK)
    (line,) = shown.warnings
    assert "uplink of 2.0 kB/s" in line and "18.0 kB takes 12.0 s and has 6.0 s" in line
