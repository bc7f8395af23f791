"""`python -m tscale.node.cli` is `tscale-node`."""

from __future__ import annotations

from tscale.node.cli import main

if __name__ == "__main__":
    main()
