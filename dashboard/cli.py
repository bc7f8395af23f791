"""The `tscale-dashboard` command."""

import os
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from tscale.dashboard.app import DEFAULT_HOST, DEFAULT_PORT, is_loopback_host, serve
from tscale.dashboard.source import STATUS_FILE_NAME, find_status_files
from tscale.protocol.errors import BadInput, StopNode

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def _write_port_file(path: Path, url: str) -> None:
    """Write the port of `url`, complete from the first moment the file exists."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(f"{urlsplit(url).port}\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise BadInput(f"can't write --port-file {path}: {error.strerror}") from None


def awaited(paths: list[Path]) -> list[str]:
    """What the page waits for: a line for each path that has no node's status yet."""
    lines = []
    for path in paths:
        if find_status_files([path]) and path.exists():
            continue
        if path.is_dir():
            lines.append(
                f"there is no status in {path} yet: the page waits for a node there to write its {STATUS_FILE_NAME} "
                "(`tscale-node status` shows the folders of nodes)"
            )
        else:
            lines.append(f"nothing is at {path} yet: the page waits for a node's status there")
    return lines


@app.command()
def dashboard(
    status: Annotated[
        list[Path],
        typer.Option(help="A status.json, a node's folder, or a state directory; may be given several times."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. The default is reachable from this machine only.")
    ] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = DEFAULT_PORT,
    port_file: Annotated[Path | None, typer.Option(help="Write the port into this file when the port is open.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name the page may be asked for by, such as a reverse proxy's.")
    ] = None,
) -> None:
    """A read-only web page over the status of one or several nodes. Exit codes: 0 ended, 2 bad input, 4 port in use."""

    def ready(url: str) -> None:
        if port_file is not None:
            _write_port_file(port_file, url)
        typer.echo(f"dashboard: {url}  (Ctrl-C ends it)")
        for line in awaited(status):
            typer.echo(line, err=True)
        sys.stdout.flush()

    for path in status:
        if path.is_file() and path.suffix != ".json":
            raise BadInput(f"{path} is no status: give a node's status.json, its folder, or a state directory")
    if not is_loopback_host(host):
        typer.echo(
            f"warning: --host {host} shows this page to every machine that can reach this one; "
            "it has no password and no encryption",
            err=True,
        )
    serve(status, host, port, tuple(allow_host or ()), ready)


def main() -> None:
    """Run the command; what stops it is one line on stderr and the error's exit code."""
    try:
        app()
    except StopNode as error:
        typer.echo(f"tscale-dashboard: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
