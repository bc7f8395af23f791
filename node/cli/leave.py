"""`tscale-node leave`: end the nodes of a swarm on this machine, and forget them if asked."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Annotated

import typer

from tscale.node.cli import options
from tscale.node.cli.status import folder_name
from tscale.node.config import load_config
from tscale.node.instances import base_dir, find_folders, is_running
from tscale.node.statedir import StateDir, atomic_write
from tscale.protocol.errors import BadInput, StopNode

LEAVE_REQUEST = "leave.request"
TIMEOUT_S = 30.0
_POLL_S = 0.1


def leave(
    swarm: Annotated[str, typer.Option("--swarm", help="A swarm id, `demo`, or the name of one node's folder.")],
    state_dir: options.StateDir = None,
    forget: Annotated[bool, typer.Option("--forget", help="Remove the node's files, its key included.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask before removing files.")] = False,
    as_json: options.Json = False,
) -> None:
    """Leave a swarm: its nodes here say goodbye, save and end."""
    states = find_folders(base_dir(state_dir, load_config()), folder_name(swarm))
    if not states:
        raise BadInput(f"there is no node of {swarm} here: `tscale-node status` lists all of them")
    if forget and not yes:
        _confirm(states, ask=not as_json)
    left = [state for state in states if is_running(state)]
    for state in left:
        atomic_write(state.path / LEAVE_REQUEST, b"", durable=False)
    for state in left:
        wait_until_free(state, TIMEOUT_S)
    if forget:
        for state in states:
            shutil.rmtree(state.path)
    if as_json:
        names = [state.path.name for state in states]
        report = {
            "left": [state.path.name for state in left],
            "not_running": [state.path.name for state in states if state not in left],
            "forgotten": names if forget else [],
        }
        typer.echo(json.dumps(report))
        return
    for state in states:
        ended = "left" if state in left else "was not running"
        typer.echo(f"{state.path.name}: {ended}{', files removed' if forget else ''}")


def wait_until_free(state: StateDir, timeout_s: float) -> None:
    """Wait for the node's lock. Raises StopNode when the node does not end in time."""
    deadline = time.monotonic() + timeout_s
    try:
        while is_running(state):
            if time.monotonic() > deadline:
                raise StopNode(
                    f"the node in {state.path} did not end within {timeout_s:.0f} s: see its log in {state.log}"
                )
            time.sleep(_POLL_S)
    finally:
        (state.path / LEAVE_REQUEST).unlink(missing_ok=True)


def _confirm(states: list[StateDir], ask: bool) -> None:
    names = ", ".join(state.path.name for state in states)
    if not ask or not sys.stdin.isatty():
        raise BadInput(f"--forget removes the keys of {names} for good: add --yes to do it")
    typer.confirm(f"Remove all files of {names}, keys included?", abort=True)
