"""The tscale-node command line."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script: run the command in `sys.argv` and end the process with its exit code."""
    try:
        from tscale.node.cli.app import run_command
    except KeyboardInterrupt:  # the imports take a second
        sys.stderr.write("tscale-node: interrupted\n")
        sys.exit(130)

    sys.exit(run_command(sys.argv[1:]))
