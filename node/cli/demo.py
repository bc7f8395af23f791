"""`tscale-node demo`: the whole thing on one machine, judged."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from tscale.node.cli import options
from tscale.node.demo import DEFAULT_TOKENS, DemoOptions, run_demo

_SeedValue = Annotated[
    int | None, typer.Option("--seed-value", min=0, max=(1 << 63) - 1, help="The swarm's random seed.")
]


def demo(
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes that train from the start.")] = 3,
    rounds: Annotated[int | None, typer.Option("--rounds", help="End after this many rounds.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="End after this many accepted tokens.")] = DEFAULT_TOKENS,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The dashboard's port; 0 is any.")] = 0,
    seed_value: _SeedValue = None,
    as_json: options.Json = False,
) -> None:
    """Run a seed and some nodes here; one is killed, one joins. The last line is a JSON report.

    The exit code is 0 only if all nodes agreed on every round, the model learned and nothing was left running.
    `--json` prints the report alone; progress goes to stderr.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    wanted = DemoOptions(nodes, tokens, rounds, port, seed_value)
    report = run_demo(wanted, lambda line: _say(line, as_json))
    if not as_json:
        for failure in report.failures:
            _say(f"FAILED: {failure}", as_json)
        if report.ok:
            _say(
                f"all nodes agreed on all {report.rounds} rounds up to {report.tokens:,} tokens; with the rounds after "
                f"them the held-out loss fell from {report.loss_first:.2f} to {report.loss_last:.2f} nats per byte. "
                "The model writes:",
                as_json,
            )
        typer.echo(f"\n{report.sample}\n")
    typer.echo(report.to_json())
    raise typer.Exit(0 if report.ok else 1)


def _say(line: str, as_json: bool) -> None:
    typer.echo(line, err=as_json)
    sys.stdout.flush()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
