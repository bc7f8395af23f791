"""`tscale-node identity`: show, back up and bring back the key of a node."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tscale.node.cli import options
from tscale.node.cli.status import folder_name
from tscale.node.config import load_config
from tscale.node.instances import base_dir, find_folders, folder_of, shown_name, swarm_of
from tscale.node.statedir import StateDir, lock, open_state_dir, read_identity, write_identity
from tscale.protocol.errors import BadInput
from tscale.protocol.identity import Identity

_Swarm = Annotated[str, typer.Option("--swarm", help="A swarm id, `demo`, or the name of one node's folder.")]
_File = Annotated[Path, typer.Argument(help="The key file.")]


def build_app() -> typer.Typer:
    """The command group."""
    app = typer.Typer(help="Show, export and import the key of a node.", no_args_is_help=True)
    app.command("show")(show)
    app.command("export")(export)
    app.command("import")(import_key)
    return app


def show(swarm: options.AnySwarm = None, state_dir: options.StateDir = None, as_json: options.Json = False) -> None:
    """Show the peer ids of the nodes on this machine."""
    states = [
        state
        for state in find_folders(base_dir(state_dir, load_config()), folder_name(swarm))
        if state.identity_key.exists()
    ]
    rows = [(state, read_identity(state.identity_key).peer_id) for state in states]
    if as_json:
        typer.echo(json.dumps([{"folder": str(state.path), "peer_id": peer_id} for state, peer_id in rows]))
        return
    if not rows:
        typer.echo("no node has a key here yet")
    for state, peer_id in rows:
        typer.echo(f"{peer_id}  {state.path.name}")


def export(swarm: _Swarm, file: _File, state_dir: options.StateDir = None, as_json: options.Json = False) -> None:
    """Copy a node's key to FILE (mode 0600). Whoever has it can act as this node."""
    state = _one_folder(swarm, state_dir)
    identity = read_identity(state.identity_key)
    write_identity(file, identity)
    _say("exported", identity.peer_id, file, as_json)


def import_key(
    swarm: _Swarm,
    file: _File,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the key that is there.")] = False,
    state_dir: options.StateDir = None,
    as_json: options.Json = False,
) -> None:
    """Use the key in FILE for a swarm's node on this machine. Never run one key on two machines at once."""
    identity = read_identity(file)
    base, name = base_dir(state_dir, load_config()), folder_of(folder_name(swarm) or swarm)
    found = find_folders(base, folder_name(swarm))
    _refuse_twin(identity, _only_one(swarm, found) if found else StateDir(base / name), base)
    state = _only_one(swarm, found) if found else open_state_dir(base, name)
    with ExitStack() as stack:
        stack.enter_context(lock(state))
        if replace:
            state.identity_key.unlink(missing_ok=True)
        elif state.identity_key.exists():
            old = read_identity(state.identity_key)
            if old.public != identity.public:
                name = shown_name(state.path.name)
                raise BadInput(
                    f"{name} has the key of {old.peer_id}: keep that with  tscale-node identity export --swarm {name} "
                    "FILE , then add --replace"
                )
        if not state.identity_key.exists():
            write_identity(state.identity_key, identity)
    _say("imported", identity.peer_id, state.identity_key, as_json)


def _one_folder(swarm: str, state_dir: Path | None) -> StateDir:
    states = find_folders(base_dir(state_dir, load_config()), folder_name(swarm))
    if not states:
        raise BadInput(f"there is no node of {swarm} here: `tscale-node status` lists all of them")
    return _only_one(swarm, states)


def _only_one(swarm: str, states: list[StateDir]) -> StateDir:
    if len(states) > 1:
        names = ", ".join(shown_name(state.path.name) for state in states)
        raise BadInput(f"{swarm} has several nodes here: give one of {names} with --swarm")
    return states[0]


def _refuse_twin(identity: Identity, state: StateDir, base: Path) -> None:
    """Two nodes of a swarm with one key would each undo what the other says."""
    for other in find_folders(base, swarm_of(state.path.name)):
        if other.path == state.path or not other.identity_key.exists():
            continue
        if read_identity(other.identity_key).public == identity.public:
            raise BadInput(f"{shown_name(other.path.name)} has this key already: a key is for one node of a swarm")


def _say(done: str, peer_id: str, file: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"peer_id": peer_id, "file": str(file)}))
    else:
        typer.echo(f"{done} {peer_id}: {file}")
