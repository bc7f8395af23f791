"""`tscale-node status`: what the nodes of this machine are doing, from their status files."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import typer

from tscale.node.cli import options
from tscale.node.config import load_config
from tscale.node.instances import base_dir, find_folders, is_running, swarm_of
from tscale.node.live import count_alive, plain_text, show_bytes, show_loss, show_seconds, show_speed
from tscale.node.statedir import StateDir, read_regular
from tscale.node.swarm_argument import resolve_swarm
from tscale.protocol.errors import BadInput, RefuseFrame
from tscale.protocol.status import MAX_STATUS_BYTES, StatusSnapshot

STALE_S = 10.0


@dataclass(frozen=True)
class NodeView:
    """One node's folder: whether it runs (by its lock), and its last snapshot, `age_s` old."""

    state: StateDir
    running: bool
    snapshot: StatusSnapshot | None
    problem: str
    age_s: float | None

    @property
    def stale(self) -> bool:
        """Whether a running node stopped writing its status."""
        return self.running and (self.age_s is None or self.age_s > STALE_S)


def status(swarm: options.AnySwarm = None, state_dir: options.StateDir = None, as_json: options.Json = False) -> None:
    """Show what the nodes of this machine are doing."""
    views = [look(state, time.time()) for state in find_folders(base_dir(state_dir, load_config()), folder_name(swarm))]
    if as_json:
        typer.echo(json.dumps([as_plain(view) for view in views]))
        return
    if swarm is not None and not views:
        raise BadInput(f"there is no node of {swarm} here: `tscale-node status` lists all of them")
    if not views:
        typer.echo("no node has run here yet")
    for view in views:
        typer.echo("\n".join(as_lines(view)))


def folder_name(swarm: str | None) -> str | None:
    """The swarm id (or the folder's name) that a person means."""
    if swarm is None or swarm_of(swarm) is not None or swarm_of(swarm.removesuffix("-1")) is not None:
        return swarm
    return resolve_swarm(swarm).swarm_id


def look(state: StateDir, now_unix_s: float) -> NodeView:
    """Read a node's folder."""
    running = is_running(state)
    try:
        snapshot = StatusSnapshot.from_json(read_regular(state.status, MAX_STATUS_BYTES + 1))
    except FileNotFoundError:
        return NodeView(state, running, None, "it has not written a status yet", None)
    except (OSError, RefuseFrame) as error:
        return NodeView(state, running, None, f"its status can't be read: {error}", None)
    return NodeView(state, running, snapshot, "", max(0.0, now_unix_s - snapshot.updated_unix_s))


def as_plain(view: NodeView) -> dict[str, object]:
    """The view for scripts; `status` is the snapshot of protocol/status.py."""
    return {
        "folder": str(view.state.path),
        "swarm_id": swarm_of(view.state.path.name),
        "running": view.running,
        "stale": view.stale,
        "age_s": None if view.age_s is None else round(view.age_s, 1),
        "problem": view.problem or None,
        "status": None if view.snapshot is None else json.loads(view.snapshot.to_json()),
    }


def as_lines(view: NodeView) -> list[str]:
    """The view for people."""
    lines = [f"{view.state.path.name}: {_verdict(view)}", f"  folder {view.state.path}"]
    snapshot = view.snapshot
    if snapshot is None:
        return [*lines, f"  {view.problem}"]
    training, transfer = snapshot.training, snapshot.transfer
    lines += [
        f"  peer {snapshot.node.peer_id}, {snapshot.node.role}, version {plain_text(snapshot.node.version)}",
        f"  round {snapshot.round.number}, last folded {snapshot.round.folded_round}, "
        f"{training.tokens_total:,} tokens by all, {snapshot.credit.tokens_accepted:,} accepted from here",
        f"  loss {show_loss(training.loss_train)}, held-out {show_loss(training.loss_heldout)}, "
        f"{show_speed(training.tokens_per_s)}, peers {count_alive(snapshot)}",
        *(
            [f"  trains on {plain_text(training.device)} in {plain_text(training.precision)}"]
            if training.device
            else []
        ),
        f"  sent {show_bytes(transfer.up_bytes)}, received {show_bytes(transfer.down_bytes)}",
    ]
    return lines + [f"  warning: {plain_text(warning)}" for warning in snapshot.warnings]


def _verdict(view: NodeView) -> str:
    age = "" if view.age_s is None else f", status from {show_seconds(view.age_s)} ago"
    if not view.running:
        return f"not running{age}"
    if view.stale:
        return f"running, but its status is old{age}"
    assert view.snapshot is not None  # not stale, so there is an age, so there is a snapshot
    reason = f" ({plain_text(view.snapshot.reason)})" if view.snapshot.reason else ""
    return f"running, {view.snapshot.activity}{reason}"
