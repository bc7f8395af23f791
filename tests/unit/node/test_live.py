"""The lines that a running node shows, and that nothing in them can steer a terminal."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from tscale.node.live import (
    JsonDisplay,
    PlainDisplay,
    TerminalDisplay,
    choose_display,
    count_alive,
    live_line,
    plain_text,
    round_line,
    show_bytes,
    show_seconds,
)
from tscale.protocol.status import (
    STATUS_SCHEMA,
    CreditStatus,
    ModelStatus,
    NodeStatus,
    PeerStatus,
    RoundStatus,
    ScreenStatus,
    StatusSnapshot,
    TrainingStatus,
    TransferStatus,
)

LINK = "tscale://demo-" + "a" * 26 + "?seed=" + "&seed=".join(["/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW" + "x" * 44] * 3)


def peer(number: int, alive: bool, this_node: bool = False) -> PeerStatus:
    return PeerStatus(f"12D3KooW{number}", f"p{number}", "trainer", alive, 1.0, "0.1.0", 10, this_node)


def snapshot(folded_round: int = 11, activity: str = "training", reason: str = "") -> StatusSnapshot:
    return StatusSnapshot(
        schema=STATUS_SCHEMA,
        updated_unix_s=1000.0,
        swarm_id="demo-" + "a" * 26,
        swarm_name="demo",
        node=NodeStatus("12D3KooW0", "trainer", "0.1.0", 4711, 900.0, (), "/state"),
        activity=activity,
        reason=reason,
        round=RoundStatus(12, 1004.5, 8.0, folded_round, "ab" * 32, "cd" * 32, 3),
        training=TrainingStatus(5_000, 45_312, 8123.4, 40, 2.1129, None, 0.97, "the processor", "fp32", ()),
        peers=(peer(0, True, this_node=True), peer(1, True), peer(2, False), peer(3, True)),
        transfer=TransferStatus(1, 2, 96_000.0, 272_000.0, 34_100, 0.4671, "1/16"),
        model=ModelStatus("tscale", 600_000),
        credit=CreditStatus(5_000, 3, 0, ""),
        screen=ScreenStatus(0, 0),
        warnings=(),
    )


def test_live_line_has_round_time_speed_losses_peers_and_traffic_in_bytes() -> None:
    line = live_line(snapshot(), now_unix_s=1002.0)
    assert line == (
        "round 12, 2s left · training · 8,123 tokens/s · loss 2.113 · peers 3 · up 12.0 kB/s down 34.0 kB/s"
    )


def test_live_line_has_the_heldout_loss_once_there_is_one() -> None:
    evaluated = dataclasses.replace(snapshot(), training=dataclasses.replace(snapshot().training, loss_heldout=2.2))
    assert "· loss 2.113, held-out 2.200 ·" in live_line(evaluated, now_unix_s=1002.0)


@pytest.mark.parametrize(
    ("width", "fields"),
    [
        (200, "8,123 tokens/s · loss 2.113, held-out 2.200 · peers 3 · up 12.0 kB/s down 34.0 kB/s"),
        (90, "8,123 tokens/s · loss 2.113, held-out 2.200 · peers 3"),
        (80, "8,123 tokens/s · loss 2.113 · peers 3"),
        (55, "loss 2.113 · peers 3"),
        (45, "loss 2.113"),
    ],
)
def test_live_line_leaves_out_what_does_not_fit(width: int, fields: str) -> None:
    evaluated = dataclasses.replace(snapshot(), training=dataclasses.replace(snapshot().training, loss_heldout=2.2))
    line = live_line(evaluated, 1002.0, width)
    assert line == f"round 12, 2s left · training · {fields}"
    assert len(line) <= width


def test_time_left_is_never_negative() -> None:
    assert ", 0s left" in live_line(snapshot(), now_unix_s=2000.0)


def test_round_line_says_what_the_contribution_cost() -> None:
    assert round_line(snapshot()) == (
        "round 11: 3 contributions, 45,312 tokens in all, 8,123 tokens/s, loss 2.113 (held-out -), peers 3, "
        "sent 34.1 kB (0.467 bits per parameter)"
    )


def test_round_line_of_a_lone_node_does_not_claim_to_have_sent_anything() -> None:
    status = snapshot()
    alone = dataclasses.replace(status, peers=(), round=dataclasses.replace(status.round, contributors=1))
    assert round_line(alone) == (
        "round 11: 1 contribution, 45,312 tokens in all, 8,123 tokens/s, loss 2.113 (held-out -), peers 1, "
        "nobody to send to"
    )


def test_round_line_of_a_node_that_has_just_resumed_says_what_it_does_not_know_yet() -> None:
    status = snapshot()
    resumed = dataclasses.replace(
        status,
        training=dataclasses.replace(status.training, tokens_per_s=0.0, loss_train=None),
        transfer=dataclasses.replace(status.transfer, contribution_bytes=0),
    )
    for peers in (status.peers, ()):
        line = round_line(dataclasses.replace(resumed, peers=peers))
        assert "45,312 tokens in all, - tokens/s, loss - (held-out -), peers" in line
        assert line.endswith(", nothing sent yet")
    assert " · - tokens/s · " in live_line(resumed, now_unix_s=1002.0)


def test_this_node_counts_as_a_peer_even_when_its_list_leaves_it_out() -> None:
    alone = dataclasses.replace(snapshot(), peers=())
    assert count_alive(alone) == 1
    assert count_alive(snapshot()) == 3


def test_plain_display_prints_a_round_once_and_a_change_of_activity_once() -> None:
    out, err = io.StringIO(), io.StringIO()
    display = PlainDisplay(out, err)
    for status in (
        snapshot(-1, "starting"),
        snapshot(10),
        snapshot(10),
        snapshot(11),
        snapshot(11, "alone", "no peer"),
    ):
        display.on_status(status)
    display.on_notice("a notice")
    lines = out.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["starting", "training", "round 10", "round 11", "alone"]
    assert lines[-1] == "alone: no peer"
    assert err.getvalue() == "a notice\n"


def test_link_stands_alone_on_its_line() -> None:
    out = io.StringIO()
    PlainDisplay(out, out).on_ready(LINK, ["/ip4/127.0.0.1/tcp/4001"])
    assert LINK in out.getvalue().splitlines()


def test_terminal_display_keeps_a_long_link_whole() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40)
    with TerminalDisplay(console, clock=lambda: 1002.0) as display:
        display.on_status(snapshot())
        display.on_ready(LINK, [])
        display.on_notice("[red]not markup[/red]\x1b[2J")
    assert LINK in out.getvalue()
    assert "[red]not markup[/red]?[2J" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()


def test_terminal_line_is_cut_to_the_width() -> None:
    out = io.StringIO()
    with TerminalDisplay(Console(file=out, force_terminal=True, width=30), clock=lambda: 1002.0) as display:
        display.on_status(snapshot())
    assert "round 12, 2s left · training" in out.getvalue()
    assert "tokens/s" not in out.getvalue()


def test_json_display_writes_one_object_a_line() -> None:
    out = io.StringIO()
    display = JsonDisplay(out)
    display.on_ready(LINK, ["/ip4/127.0.0.1/tcp/4001"])
    display.on_status(snapshot(3))
    display.on_status(snapshot(3))
    display.on_notice("two\nlines")
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["ready", "round", "notice"]
    assert events[0]["link"] == LINK
    assert StatusSnapshot.from_json(json.dumps(events[1]["status"])) == snapshot(3)


def test_display_follows_the_stream() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(choose_display(False, io.StringIO()), PlainDisplay)
    assert isinstance(choose_display(False, Terminal()), TerminalDisplay)
    assert isinstance(choose_display(True, Terminal()), JsonDisplay)


def test_sizes_and_times_in_words() -> None:
    assert [show_bytes(value) for value in (0, 999, 1000, 99_949, 123_456, 5e9, 1e18)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "99.9 kB",
        "123 kB",
        "5.0 GB",
        "1000000 TB",
    ]
    assert [show_seconds(value) for value in (0, 59.9, 60, 3725)] == ["0s", "59s", "1m 00s", "1h 02m"]


def test_control_characters_are_shown_as_question_marks() -> None:
    assert plain_text("a\x1b]0;title\x07b\u202ec") == "a?]0;title?b?c"
