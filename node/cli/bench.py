"""`tscale-node bench`: measurements of this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tscale.node.cli import options


def build_app() -> typer.Typer:
    """The command group."""
    app = typer.Typer(help="Measure the codec and the node's overhead.", no_args_is_help=True)
    app.command("codec")(codec)
    app.command("fold")(fold)
    app.command("overhead")(overhead)
    return app


def codec(
    parameters: Annotated[int, typer.Option("--parameters", min=1, help="The size of the delta.")] = 10_000_000,
    density: Annotated[float, typer.Option("--density", help="The share of values that is sent.")] = 1 / 64,
    as_json: options.Json = False,
) -> None:
    """Size and speed of the delta codec on one thread, beside torch.topk alone."""
    from tscale.node.bench.codec import run_codec_bench

    _show(run_codec_bench(parameters=parameters, density=density), as_json)


def fold(
    parameters: Annotated[int, typer.Option("--parameters", min=1, help="The size of the model.")] = 125_000_000,
    contributions: Annotated[int, typer.Option("--contributions", min=1, help="How many are folded.")] = 16,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads that share the tensors.")] = 2,
    as_json: options.Json = False,
) -> None:
    """Time and memory of decoding a round's contributions and folding them into a model."""
    from tscale.node.bench.fold import run_fold_bench

    _show(run_fold_bench(parameters, contributions, threads), as_json)


def overhead(as_json: options.Json = False) -> None:
    """Training speed of a node beside the bare worker loop."""
    from tscale.node.bench.overhead import run_overhead_bench

    _show(run_overhead_bench(), as_json)


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
        return
    for name, value in result.items():
        typer.echo(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}")
