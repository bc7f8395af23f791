"""The bare side of the overhead benchmark, in a process of its own: `python -m tscale.node.bench.bare`.

Reads lines from standard input, each a number of seconds to train; answers each with a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys

from tscale.node.bench.overhead import BareLoop, benched_spec
from tscale.node.data.corpus import ByteCorpus, load_text_file
from tscale.node.specs import shipped_book_path


def main() -> None:
    """Serve until standard input ends; Ctrl-C is the other process's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(int(sys.argv[1]))
    spec = benched_spec(float(sys.argv[2]))
    loop = BareLoop(spec, ByteCorpus(load_text_file(shipped_book_path()), spec.data.heldout_per_mille))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(dataclasses.asdict(loop.run(float(line)))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
