"""`tscale-node doctor`: check this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from tscale.node.cli import options
from tscale.node.config import load_config
from tscale.node.doctor import DoctorOptions, Verdict, run_doctor
from tscale.node.instances import base_dir
from tscale.protocol.presets import PRESET_NAMES

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def doctor(
    state_dir: options.StateDir = None,
    host: options.Host = None,
    port: options.Port = None,
    model: Annotated[str, typer.Option("--model", help="The model to check for, as in `plan`.")] = PRESET_NAMES[0],
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Check this machine and say what to do. The exit code is 1 when a check failed."""
    from tscale.node.planning.models import wanted_model

    wanted_model(model, None)  # a wrong name is the person's, not the machine's
    loaded = load_config(config)
    wanted = DoctorOptions(
        state_dir=base_dir(state_dir, loaded),
        host=host if host is not None else loaded.network.host,
        port=port if port is not None else loaded.network.port,
        precision=loaded.training.precision,
        compute=loaded.compute,
        model=model,
    )
    verdicts: list[Verdict] = []
    for verdict in run_doctor(wanted):
        verdicts.append(verdict)
        if not as_json:
            typer.echo(as_line(verdict))
    failed = any(verdict.level == "fail" for verdict in verdicts)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [asdict(verdict) for verdict in verdicts]}))
    raise typer.Exit(1 if failed else 0)


def as_line(verdict: Verdict) -> str:
    """One verdict for people."""
    advice = f" -> {verdict.advice}" if verdict.advice else ""
    return f"{_MARKS[verdict.level]} {verdict.check}: {verdict.seen}{advice}"
