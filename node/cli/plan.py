"""`tscale-node plan`: what a machine can train."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tscale.node.cli import options
from tscale.node.config import load_config
from tscale.node.instances import base_dir

_MODELS = "125m, 350m, 1.5b, 7b, or a preset of `create`"


def plan(
    model: Annotated[str, typer.Option("--model", help=f"The model: {_MODELS}.")],
    vram: Annotated[str | None, typer.Option("--vram", help="Memory of the card, like 12GB.")] = None,
    ram: Annotated[str | None, typer.Option("--ram", help="Main memory, like 32GB.")] = None,
    upload: Annotated[str | None, typer.Option("--upload", help="The uplink, like 20Mbit.")] = None,
    peers: Annotated[int, typer.Option("--peers", min=1, help="How many contribute in a round.")] = 8,
    context: Annotated[int | None, typer.Option("--context", min=1, help="Tokens a sequence.")] = None,
    tflops: Annotated[float | None, typer.Option("--tflops", help="What the card computes, in TFLOP/s.")] = None,
    state_dir: options.StateDir = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Say whether a machine can train a model, with which settings, how fast, and what is missing if it can't.

    The exit code is 1 when something does not fit.
    """
    from tscale.node.planning import machine as machines
    from tscale.node.planning import report
    from tscale.node.planning.models import wanted_model
    from tscale.node.planning.planner import DoesNotFit, make_plan

    wanted = wanted_model(model, context)
    base = base_dir(state_dir, load_config(config))
    rate = machines.DEFAULT_UPLOAD_BITS_PER_S if upload is None else machines.parse_bits_per_s(upload, "--upload")
    vram_bytes = None if vram is None else machines.parse_bytes(vram, "--vram")
    ram_bytes = None if ram is None else machines.parse_bytes(ram, "--ram")
    here = machines.this_machine(_free_bytes(base), rate)
    machine = machines.with_given(here, vram_bytes, ram_bytes, tflops)
    made = make_plan(wanted.config, wanted.shape, machine)
    if isinstance(made, DoesNotFit):
        found = report.missing_as_json(made, machine)
        lines = [f"does not fit: {found['problem']}"]
    else:
        traffic = report.plan_traffic(wanted.spec, made, machine, peers)
        found = report.as_json(made, traffic, machine, wanted.shape)
        lines = report.as_lines(found, machine)
    typer.echo(json.dumps(found) if as_json else "\n".join(lines))
    raise typer.Exit(0 if found["fits"] else 1)


def _free_bytes(folder: Path) -> int:
    """Free space where the folder is, or would be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
