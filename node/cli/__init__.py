"""The tscale-node command line."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script: run the command in `sys.argv` and end the process with its exit code."""
    from tscale.node.cli.app import run_command

    sys.exit(run_command(sys.argv[1:]))
