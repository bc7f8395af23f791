"""`tscale-node create`: make a swarm, print its link, and train."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from tscale.node.cli import options
from tscale.node.cli.running import NodeRequest, check_machine, run_here
from tscale.node.config import load_config
from tscale.node.created import CreatedSwarm, CreateOptions, create_swarm
from tscale.node.instances import base_dir
from tscale.node.specs import random_seed
from tscale.node.swarm_argument import SwarmTarget
from tscale.protocol.presets import PRESET_NAMES
from tscale.protocol.spec import SwarmSpec

_START_LEAD_S = 5.0


def create(
    name: Annotated[str, typer.Option("--name", help="The swarm's name: 1 to 32 of a-z, 0-9 and -.")],
    data: Annotated[list[Path], typer.Option("--data", help="A text file to train on; more may follow it.")],
    more_data: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More text files.")] = None,
    preset: Annotated[str, typer.Option("--preset", help=f"The model: {' or '.join(PRESET_NAMES)}.")] = PRESET_NAMES[0],
    round_seconds: Annotated[float | None, typer.Option("--round-seconds", help="The length of a round.")] = None,
    new: Annotated[bool, typer.Option("--new", help="A new swarm even if this command made one before.")] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Write the spec and stop.")] = False,
    host: options.Host = None,
    port: options.Port = None,
    state_dir: options.StateDir = None,
    node_name: Annotated[str | None, typer.Option("--node-name", help="The public name of this node.")] = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Create a swarm over text files, print its link, and train. The same command later resumes the same swarm.

    The files are shared with everybody who has the link.
    """
    files = (*data, *(more_data or ()))
    wanted = CreateOptions(
        name, preset, files, round_seconds, float(round(time.time() + _START_LEAD_S)), random_seed(), fresh=new
    )
    loaded = load_config(config)
    base = base_dir(state_dir, loaded)

    def check(spec: SwarmSpec) -> None:
        if not no_run:
            check_machine(spec, loaded, base / spec.swarm_id)

    created = create_swarm(wanted, base, check)
    if created.notice:
        typer.echo(created.notice, err=True)
    if no_run:
        _show(created, as_json)
        return
    if not as_json:
        typer.echo(f"{'resuming' if created.resumed else 'created'} swarm {created.spec.swarm_id}")
    request = NodeRequest(
        target=SwarmTarget(created.spec.swarm_id, created.spec, created.spec.seeds),
        role="trainer",
        state_dir=state_dir,
        host=host,
        port=port,
        name=node_name,
        config=config,
        dataset_files=files,
        as_json=as_json,
        checked=True,
    )
    raise typer.Exit(run_here(request))


def _show(created: CreatedSwarm, as_json: bool) -> None:
    swarm_id, spec_file = created.spec.swarm_id, created.state.spec
    if as_json:
        typer.echo(json.dumps({"swarm_id": swarm_id, "spec_file": str(spec_file), "resumed": created.resumed}))
        return
    typer.echo(f"swarm {swarm_id}\nspec file {spec_file}")
