"""What the page gets: one JSON line for all nodes (without their histories), and each node's history by itself."""

import dataclasses
import json
from typing import Any

from tscale.dashboard.source import STALE_AFTER_S, SourceState
from tscale.protocol.status import StatusSnapshot

RECENT_POINTS = 6


def _json_line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _snapshot_parts(snapshot: StatusSnapshot) -> dict[str, Any]:
    """The snapshot as plain values; `recent` holds the last points of the history in its place."""
    history = snapshot.training.history
    bare = dataclasses.replace(snapshot, training=dataclasses.replace(snapshot.training, history=()))
    parts: dict[str, Any] = dataclasses.asdict(bare)
    del parts["training"]["history"]
    parts["recent"] = [dataclasses.asdict(point) for point in history[-RECENT_POINTS:]]
    return parts


def render_view(states: tuple[SourceState, ...], chosen: SourceState | None, now_unix_s: float) -> bytes:
    """The page's whole state but for the histories, as one line of JSON.

    Ages are as of `now_unix_s`; the page counts on from there with its own stopwatch, so that neither the visitor's
    clock nor the absence of news makes a wrong number. A history is fetched again when its `history_rev` changes.
    """
    sources = [
        {
            "id": state.source_id,
            "label": state.label,
            "fresh": state.fresh,
            "age_s": state.age_s,
            "problem": state.problem,
            "history_rev": state.history_revision,
            "snapshot": None if state.snapshot is None else _snapshot_parts(state.snapshot),
        }
        for state in states
    ]
    return _json_line(
        {
            "now_unix_s": now_unix_s,
            "stale_after_s": STALE_AFTER_S,
            "auto": None if chosen is None else chosen.source_id,
            "sources": sources,
        }
    )


def render_history(state: SourceState) -> bytes:
    """The loss history of one node as a JSON list of points."""
    history = () if state.snapshot is None else state.snapshot.training.history
    return _json_line([dataclasses.asdict(point) for point in history])
