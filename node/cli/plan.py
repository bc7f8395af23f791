"""`tscale-node plan`: what a machine can train."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tscale.node.cli import options
from tscale.node.config import load_config
from tscale.node.instances import base_dir
from tscale.node.statedir import nearest_folder

if TYPE_CHECKING:
    from tscale.node.planning.machine import Machine
    from tscale.node.planning.models import WantedModel

_MODELS = "125m, 350m, 1.5b, 7b, or a preset of `create`"


def plan(
    model: Annotated[str, typer.Option("--model", help=f"The model: {_MODELS}.")],
    vram: Annotated[str | None, typer.Option("--vram", help="Memory of the card, like 12GB.")] = None,
    ram: Annotated[str | None, typer.Option("--ram", help="Main memory, like 32GB.")] = None,
    disk: Annotated[str | None, typer.Option("--disk", help="Free space for the node's files, like 200GB.")] = None,
    upload: Annotated[str | None, typer.Option("--upload", help="The uplink, like 20Mbit.")] = None,
    peers: Annotated[int, typer.Option("--peers", min=1, max=10_000, help="How many contribute in a round.")] = 8,
    context: Annotated[int | None, typer.Option("--context", min=1, max=8192, help="Tokens a sequence.")] = None,
    tflops: Annotated[float | None, typer.Option("--tflops", help="What the card computes, in TFLOP/s.")] = None,
    state_dir: options.StateDir = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Say whether a machine can train a model, with which settings, how fast, and what is missing if it can't.

    Without --vram, --ram, --disk and --tflops it is about this machine; with any of them the disk is only checked when
    --disk is given. The exit code is 1 when something does not fit.
    """
    from tscale.node.planning import machine as machines
    from tscale.node.planning.models import wanted_model

    wanted = wanted_model(model, context)
    base = base_dir(state_dir, load_config(config))
    given = machines.Given(
        vram_bytes=None if vram is None else machines.parse_bytes(vram, "--vram"),
        ram_bytes=None if ram is None else machines.parse_bytes(ram, "--ram"),
        disk_bytes=None if disk is None else machines.parse_bytes(disk, "--disk"),
        tflops=tflops,
    )
    rate = machines.DEFAULT_UPLOAD_BITS_PER_S if upload is None else machines.parse_bits_per_s(upload, "--upload")
    machine = machines.with_given(machines.this_machine(_free_bytes(base), rate), given)
    found, lines = _work_out(wanted, machine, peers, base if given.is_here and context is None else None)
    typer.echo(json.dumps(found) if as_json else "\n".join(lines))
    raise typer.Exit(0 if found["fits"] else 1)


def _work_out(
    wanted: WantedModel, machine: Machine, peers: int, measured_in: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """The plan for scripts and for people; with the rate of a node below `measured_in`, if there was one."""
    from tscale.node.planning import report
    from tscale.node.planning.measured import find_rate, with_rate
    from tscale.node.planning.planner import make_plan
    from tscale.node.planning.storage import DoesNotFit

    made = make_plan(wanted.config, wanted.shape, machine)
    if isinstance(made, DoesNotFit):
        found = report.missing_as_json(made, machine)
        return found, [f"does not fit: {found['problem']}"]
    rate = None if measured_in is None else find_rate(measured_in, made.parameters)
    if rate is not None:
        made = with_rate(made, wanted.shape, rate)
        machine = replace(machine, rates=f"measured by the node here in the swarm {rate.swarm_name}")
    traffic = report.plan_traffic(wanted.spec, made, machine, peers)
    found = report.as_json(made, traffic, machine, wanted.shape)
    return found, report.as_lines(found, machine)


def _free_bytes(folder: Path) -> int:
    """Free space where the folder is, or would be."""
    return shutil.disk_usage(nearest_folder(folder)).free
