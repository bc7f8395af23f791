"""The status snapshot: strict JSON both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.protocol_samples import sample_status
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.status import MAX_STATUS_BYTES, LossPoint, StatusSnapshot

STATUS = sample_status()
PLAIN: dict[str, Any] = json.loads(STATUS.to_json())


def test_json_round_trip() -> None:
    text = STATUS.to_json()
    assert "\n" not in text
    assert StatusSnapshot.from_json(text) == STATUS
    assert StatusSnapshot.from_json(text.encode()) == STATUS


def test_the_top_level_names() -> None:
    assert list(PLAIN) == [
        "schema",
        "updated_unix_s",
        "swarm_id",
        "swarm_name",
        "node",
        "activity",
        "reason",
        "round",
        "training",
        "peers",
        "transfer",
        "model",
        "credit",
        "screen",
        "warnings",
    ]
    assert PLAIN["training"]["history"][0] == {
        "round": 0,
        "tokens_total": 0,
        "loss_train": None,
        "loss_heldout": 5.5,
    }


def test_no_address_of_another_peer_can_be_in_it() -> None:
    assert set(PLAIN["peers"][0]) == {
        "peer_id",
        "name",
        "role",
        "alive",
        "last_seen_s",
        "version",
        "tokens",
        "this_node",
    }


def test_a_whole_number_is_taken_as_a_float() -> None:
    snapshot = StatusSnapshot.from_json(json.dumps({**PLAIN, "updated_unix_s": 5}))
    assert (snapshot.updated_unix_s, type(snapshot.updated_unix_s)) == (5.0, float)


def test_numbers_that_are_not_finite_are_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(STATUS, updated_unix_s=float("nan")).to_json()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": 1}, "another schema than 2: start the node again in this program's version"),
        ({"schema": 3}, "another schema"),
        ({"schema": None}, "another schema"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"activity": "dancing"}, "unknown activity"),
        ({"reason": None}, "reason must be of type str"),
        ({"reason": "\ud800"}, "lone surrogates"),
        ({"swarm_id": 5}, "swarm_id must be of type str"),
        ({"peers": {}}, "peers must be a list"),
        ({"peers": [1]}, "peers must be a map"),
        ({"peers": [{**PLAIN["peers"][0], "name": "\u202ex"}]}, "peer name"),
        ({"peers": [{**PLAIN["peers"][0], "alive": 1}]}, "peers.alive must be of type bool"),
        ({"peers": [PLAIN["peers"][0]] * 5000}, "at most 4096"),
        ({"node": {**PLAIN["node"], "pid": 1.5}}, "node.pid must be of type int"),
        ({"node": {**PLAIN["node"], "pid": 1 << 70}}, "64 bits"),
        ({"training": {**PLAIN["training"], "history": [PLAIN["training"]["history"][0]] * 2001}}, "more history"),
        ({"round": [1]}, "round must be a map"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(RefuseFrame, match=why):
        StatusSnapshot.from_json(json.dumps({**PLAIN, **change}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "NaN",
        '{"schema":2,"schema":2}',
        '{"schema":1e999}',
        "[" * 100_000,
        "9" * 5000,
        b"\xff",
        " " * (MAX_STATUS_BYTES + 1),
    ],
    ids=range(11),
)
def test_other_text_is_refused(text: str | bytes) -> None:
    with pytest.raises(RefuseFrame):
        StatusSnapshot.from_json(text)


def test_a_full_history_fits() -> None:
    history = tuple(LossPoint(n, n * 1000, 2.5, None) for n in range(2000))
    full = replace(STATUS, training=replace(STATUS.training, history=history))
    assert StatusSnapshot.from_json(full.to_json()) == full
