"""`tscale-node bench`: measurements of this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tscale.node.bench.meanings import MEANINGS
from tscale.node.cli import options
from tscale.node.cli.figures import figure_lines
from tscale.protocol.errors import BadInput


def build_app() -> typer.Typer:
    """The command group."""
    app = typer.Typer(
        help="Measure this machine: compression, folding, training, precision, a node's overhead.", no_args_is_help=True
    )
    app.command("attention")(attention)
    app.command("codec")(codec)
    app.command("fold")(fold)
    app.command("overhead")(overhead)
    app.command("precision")(precision)
    app.command("step")(step)
    return app


def attention(
    model: Annotated[str, typer.Option("--model", help="Whose heads and layers.")] = "125m",
    context: Annotated[int, typer.Option("--context", min=65, help="Tokens in the sequence.")] = 2048,
    as_json: options.Json = False,
) -> None:
    """Time of attention with the layers' windows, beside full attention in every layer."""
    from tscale.node.bench.attention import run_attention_bench

    _show(run_attention_bench(model, context), as_json)


def codec(
    parameters: Annotated[int, typer.Option("--parameters", min=1, help="The size of the delta.")] = 10_000_000,
    density: Annotated[float, typer.Option("--density", help="The share of values that is sent.")] = 1 / 64,
    as_json: options.Json = False,
) -> None:
    """Size and speed of the delta codec on one thread, beside torch.topk alone."""
    from tscale.node.bench.codec import run_codec_bench

    if not 1 / 4096 <= density <= 1.0:
        raise BadInput(f"--density is {density}, it must be from 1/4096 (0.00025) to 1")
    _say(f"making a delta of {parameters:,} parameters, then measuring for about 10 s")
    _show(run_codec_bench(parameters=parameters, density=density), as_json)


def fold(
    parameters: Annotated[int, typer.Option("--parameters", min=1, help="The size of the model.")] = 125_000_000,
    contributions: Annotated[int, typer.Option("--contributions", min=1, help="How many are folded.")] = 16,
    threads: Annotated[int, typer.Option("--threads", min=1, max=256, help="Threads that share the tensors.")] = 2,
    as_json: options.Json = False,
) -> None:
    """Time and memory of decoding a round's contributions and folding them into a model."""
    from tscale.node.bench.fold import run_fold_bench

    _say(f"making {contributions} contributions to {parameters:,} parameters, then folding them four times")
    _show(run_fold_bench(parameters, contributions, threads), as_json)


def overhead(as_json: options.Json = False) -> None:
    """Training speed of a node beside the bare worker loop."""
    from tscale.node.bench.overhead import run_overhead_bench

    _show(run_overhead_bench(say=_say), as_json)


def precision(as_json: options.Json = False) -> None:
    """What bf16, fp8 and int8 cost in held-out loss beside float32, on a small trained model: some minutes."""
    from tscale.node.bench.precision import run_precision_bench, table

    result = run_precision_bench(say=_say)
    if as_json:
        typer.echo(json.dumps(result))
        return
    for line in table(result):
        typer.echo(line)


def step(
    model: Annotated[str, typer.Option("--model", help="What is trained.")] = "tiny",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences in a step.")] = 8,
    context: Annotated[int, typer.Option("--context", min=2, help="Tokens in a sequence.")] = 256,
    as_json: options.Json = False,
) -> None:
    """Time of a training step, beside the same model in a plain PyTorch loop, and of the layer-major path."""
    from tscale.node.bench.step import StepSize, run_step_bench

    _show(run_step_bench(StepSize(model, batch, context)), as_json)


def _show(result: dict[str, Any], as_json: bool) -> None:
    for line in [json.dumps(result)] if as_json else figure_lines(result, MEANINGS):
        typer.echo(line)


def _say(line: str) -> None:
    """Progress, beside the result on stdout."""
    typer.echo(line, err=True)
