"""What a node says of contributions that the screen found: log lines, counts, and once a word about its own."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.solo import GENESIS, Solo, announce, manifest, other, state_of
from tests.helpers.worker_bench import worker_config
from tscale.node.blobs import BlobStore
from tscale.node.board import Board, BoardConfig
from tscale.node.screening import SHOWN_ROUNDS, Screening
from tscale.node.trainer import Trainer, TrainerHooks
from tscale.node.transport.memory import MemoryNetwork, MemoryTransport
from tscale.node.worker.messages import Folded as WorkerFolded
from tscale.protocol.effects import Fold
from tscale.protocol.events import Event, Folded
from tscale.protocol.identity import peer_id
from tscale.protocol.status import ScreenStatus

ALICE, BOB = other(1), other(2)


class Told:
    """A node's machine, its screening and what the person was told."""

    def __init__(self) -> None:
        self.solo = Solo().boot().meet(ALICE)
        self.lines: list[str] = []
        self.screening = Screening(self.solo.machine, self.lines.append)
        self.own = self.solo.identity
        self.parent, self.tokens = GENESIS, 0

    def screened(self, round_: int, left_out: tuple[int, ...] = (), shrunk: tuple[int, ...] = ()) -> bytes:
        """A round of three contributions that the worker folds and judges."""
        made = [announce(who, round_, self.parent) for who in (ALICE, BOB, self.own)]
        signed = manifest(ALICE, round_, made, self.parent, before=self.tokens)
        chain = self.solo.machine.view.chain
        assert chain.insert(signed)[1] == "added"
        self.parent, self.tokens = signed.digest, signed.record.total_tokens
        event = Folded(signed.digest, state_of(signed.digest), left_out, shrunk)
        self.solo.feed(event)
        self.screening.take(event)
        return signed.digest

    def place(self, public: bytes) -> int:
        """Where an author is in the parts of a manifest."""
        return sorted([ALICE.public, BOB.public, self.own.public]).index(public)


def test_every_case_has_a_line_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    assert told.screening.status() == ScreenStatus(0, 0) and told.screening.warning() == ""
    with caplog.at_level(logging.INFO, "tscale.peer"):
        told.screened(0)
        assert caplog.messages == []
        told.screened(1, left_out=(told.place(BOB.public),), shrunk=(told.place(ALICE.public),))
    assert caplog.messages == [
        f"contribution_screened round=1 author={peer_id(BOB.public)[-8:]} reason=against_the_others",
        f"contribution_screened round=1 author={peer_id(ALICE.public)[-8:]} reason=too_large",
    ]
    assert told.screening.status() == ScreenStatus(1, 1)
    assert told.lines == [] and told.screening.warning() == ""


def test_the_person_is_told_once_of_an_own_one_and_the_status_says_it_for_a_while() -> None:
    told = Told()
    own = told.place(told.own.public)
    told.screened(0, shrunk=(own,))
    assert told.lines == [] and told.screening.warning() == ""
    for round_ in (1, 2):
        told.screened(round_, left_out=(own,))
    (line,) = told.lines
    assert line.startswith("round 1: this node's contribution went against those of the others") and "memory" in line
    assert told.screening.warning().startswith("round 2: ") and "2 in the last" in told.screening.warning()
    told.screened(SHOWN_ROUNDS)
    assert "2 in the last" in told.screening.warning()
    told.screened(1 + SHOWN_ROUNDS)
    assert told.screening.warning().startswith("round 2: ") and "1 in the last" in told.screening.warning()
    told.screened(2 + SHOWN_ROUNDS)
    assert told.screening.warning() == ""


def test_a_manifest_that_is_folded_again_counts_once() -> None:
    told = Told()
    digest = told.screened(0, left_out=(told.place(BOB.public),))
    for _ in range(2):
        told.screening.take(Folded(digest, state_of(digest), (0,), ()))
    assert told.screening.status() == ScreenStatus(1, 0)


def test_what_does_not_fit_the_manifest_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.screening.take(Folded(b"?" * 32, b"", (0,), ()))
    assert told.screening.status() == ScreenStatus(0, 0)
    with caplog.at_level(logging.INFO, "tscale.peer"):
        told.screened(0, left_out=(7, -1, -2, -3))
    assert told.lines == [] and caplog.messages == []


def test_the_board_shows_the_counts_and_the_warning() -> None:
    told = Told()
    told.screened(0, left_out=(told.place(told.own.public),), shrunk=(told.place(BOB.public),))
    transport = MemoryTransport(MemoryNetwork(1, lambda: told.solo.now), told.own.public, True)
    board = Board(BoardConfig("trainer", "", "/tmp", 50_000, "nano"), told.solo.machine, transport, told.screening)
    shown = board.snapshot(told.solo.now)
    assert shown.screen == ScreenStatus(1, 1)
    assert [line[:8] for line in shown.warnings] == ["round 0:"]


class Folding(Trainer):
    """One whose worker has an answer ready."""

    def _worker(self) -> Any:
        class Worker:
            async def call(self, command: Any, timeout_s: float) -> WorkerFolded:
                assert [numbers for _, *numbers in command.parts] == [[100.0, 2.0], [50.0, 4.0]]
                return WorkerFolded(command.manifest, b"s" * 32, 0.1, (1,), (0,))

        return Worker()


def test_the_worker_is_given_shares_and_what_it_found_comes_back(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs", 1 << 20)
    roots = [store.add_bytes(data).root for data in (b"one", b"two")]
    heard: list[Event] = []

    def ignore(_: object) -> None:
        pass

    hooks = TrainerHooks(heard.append, ignore, ignore, ignore, ignore, ignore, ignore)
    trainer = Folding(worker_config(tmp_path), store, hooks)
    asked = Fold(b"m" * 32, b"p" * 32, 3, 150, ((roots[0], 100.0, 2.0), (roots[1], 50.0, 4.0)))
    asyncio.run(trainer._fold(asked))
    assert heard == [Folded(b"m" * 32, b"s" * 32, (1,), (0,))]
