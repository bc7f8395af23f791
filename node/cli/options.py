"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Swarm = Annotated[str, typer.Option("--swarm", help="A swarm id, a tscale:// link, a spec file, or `demo`.")]
AnySwarm = Annotated[str | None, typer.Option("--swarm", help="A swarm id, or `demo`; without it all of them.")]
StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="Where nodes keep their files; the default is a folder of yours.")
]
Host = Annotated[str | None, typer.Option("--host", help="The address to listen on.")]
Port = Annotated[int | None, typer.Option("--port", min=0, max=65535, help="The TCP port to listen on; 0 is any.")]
Name = Annotated[str | None, typer.Option("--name", help="The public name of this node; empty by default.")]
Config = Annotated[Path | None, typer.Option("--config", help="The configuration file (TOML).")]
Seeds = Annotated[list[str] | None, typer.Option("--seed", help="The address of a peer that knows the swarm.")]
Data = Annotated[list[Path] | None, typer.Option("--data", help="A text file of the dataset, if you have it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
