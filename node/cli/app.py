"""The command tree, and the boundary that turns every error into one line and an exit code."""

from __future__ import annotations

import importlib.metadata
import os
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from tscale.node.cli.bench import build_app as build_bench
from tscale.node.cli.create import create
from tscale.node.cli.demo import demo
from tscale.node.cli.doctor import doctor
from tscale.node.cli.identity import build_app as build_identity
from tscale.node.cli.join import JOIN_HELP, SEED_HELP, command_as
from tscale.node.cli.leave import leave
from tscale.node.cli.logfile import log_unexpected
from tscale.node.cli.plan import plan
from tscale.node.cli.running import EXIT_INTERRUPTED
from tscale.node.cli.status import status
from tscale.node.statedir import write_error
from tscale.protocol.errors import BadInput, DiskFull, StopNode, TscaleError

EXIT_UNEXPECTED = 1
EXIT_USAGE = 2


def run_command(argv: list[str]) -> int:
    """Run one command; what goes wrong is one line on stderr. Returns the exit code."""
    try:
        result = build_app()(args=argv, prog_name="tscale-node", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        return code if code != EXIT_INTERRUPTED else _fail("interrupted", code)  # typer makes a code of Ctrl-C
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        return EXIT_UNEXPECTED
    except Exception as error:  # noqa: BLE001 - the boundary: the traceback goes to the log file
        return _report(error, argv)


def build_app() -> typer.Typer:
    """The typer application with all commands."""
    app = typer.Typer(
        name="tscale-node",
        help="Train a language model together with other computers.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        epilog="Exit codes: 0 done, 1 unexpected error, 2 bad input, 3 state directory in use, 4 port in use, "
        "5 disk full, 6 damaged state, 7 version refused, 130 interrupted.",
    )
    app.callback()(_show_version)
    app.command("create")(create)
    app.command("join", help=JOIN_HELP)(command_as("trainer"))
    app.command("seed", help=SEED_HELP)(command_as("seed"))
    app.command("status")(status)
    app.command("leave")(leave)
    app.command("doctor")(doctor)
    app.command("plan")(plan)
    app.command("demo")(demo)
    app.add_typer(build_identity(), name="identity")
    app.add_typer(build_bench(), name="bench")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tscale-node {importlib.metadata.version('tscale-node')}")
        raise typer.Exit


def _show_version(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train a language model together with other computers."""


def _report(error: Exception, argv: list[str]) -> int:
    known = find_known(error)
    if known is not None:
        return _fail(str(known), known.exit_code if isinstance(known, StopNode) else EXIT_UNEXPECTED)
    describe = getattr(error, "format_message", None)
    if describe is not None:  # typer's own errors: an unknown option, a missing argument
        message = describe() or "a command is missing."
        return _fail(f"{message} (see {_help_of(error, argv)})", getattr(error, "exit_code", EXIT_USAGE))
    path = log_unexpected(error)
    where = f"details in {path}" if path is not None else "and no log file could be written"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return _fail(f"there is not enough memory for this: use smaller sizes, or end other programs; {where}", 1)
    told = _of_the_disk(error)
    if told is not None:
        return _fail(f"{told}; {where}", told.exit_code)
    return _fail(f"unexpected error: {type(error).__name__}: {error}; {where}", EXIT_UNEXPECTED)


def _of_the_disk(error: Exception) -> StopNode | None:
    """A full disk or a place that may not be used, met where nobody knew more about it; None for anything else."""
    if not isinstance(error, OSError):
        return None
    place = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    if isinstance(error, PermissionError) and place is not None:
        return BadInput(f"can't use {place} ({error.strerror}): check its owner and mode")
    known = write_error(place or Path("a file"), error)
    return known if isinstance(known, DiskFull) else None


def _help_of(error: Exception, argv: list[str]) -> str:
    """The command that explains what was typed wrong: the error's own, else what stands before the first option."""
    words = " ".join(takewhile(lambda word: not word.startswith("-"), argv))
    command = getattr(getattr(error, "ctx", None), "command_path", None) or f"tscale-node {words}"
    return f"{command.strip()} --help"


def find_known(error: BaseException) -> TscaleError | None:
    """The tscale error in `error`; out of a group the one that stops the node, if there is one."""
    if isinstance(error, TscaleError):
        return error
    if isinstance(error, BaseExceptionGroup):
        known = [found for inner in error.exceptions if (found := find_known(inner)) is not None]
        return next((found for found in known if isinstance(found, StopNode)), known[0] if known else None)
    return None


def _fail(message: str, exit_code: int) -> int:
    line = " ".join(message.split())
    typer.echo(f"tscale-node: {line}", err=True)
    return exit_code
