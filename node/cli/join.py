"""`tscale-node join` and `tscale-node seed`: take part in a swarm."""

from __future__ import annotations

from collections.abc import Callable

import typer

from tscale.node.cli import options
from tscale.node.cli.running import NodeRequest, run_here
from tscale.node.swarm_argument import parse_seeds, resolve_swarm

JOIN_HELP = "Train with a swarm until Ctrl-C. `--swarm demo` needs nothing else."
SEED_HELP = "Store and serve for a swarm, without training, until Ctrl-C."


def command_as(role: str) -> Callable[..., None]:
    """The command that runs a node of this role."""

    def take_part(
        swarm: options.Swarm,
        seed: options.Seeds = None,
        state_dir: options.StateDir = None,
        host: options.Host = None,
        port: options.Port = None,
        name: options.Name = None,
        config: options.Config = None,
        data: options.Data = None,
        as_json: options.Json = False,
    ) -> None:
        request = NodeRequest(
            target=resolve_swarm(swarm),
            role=role,
            state_dir=state_dir,
            host=host,
            port=port,
            name=name,
            config=config,
            seeds=parse_seeds(seed or ()),
            dataset_files=tuple(data or ()),
            as_json=as_json,
        )
        raise typer.Exit(run_here(request))

    return take_part
