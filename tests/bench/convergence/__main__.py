"""The convergence lab's command: `python -m tests.bench.convergence quick|small|gates`.

Runs what has no result by the present code yet, then renders the table and the plot from the results on disk.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from tests.bench.convergence.lists import LISTS
from tests.bench.convergence.report import render
from tests.bench.convergence.results import ROOT, ResultStore, code_version
from tests.bench.convergence.running import run_all
from tests.bench.convergence.swarm import PACKAGES
from tests.bench.convergence.texts import FETCH, is_there
from tests.bench.convergence.wire import write_into

RESULTS = ROOT / "docs" / "results" / "convergence"
PAGE = ROOT / "docs" / "results" / "convergence.md"


def arguments(argv: list[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.convergence", description=__doc__)
    parser.add_argument("list", choices=sorted(LISTS), help="which variants")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each (default 2)")
    parser.add_argument("--seeds", default="", help="only these seeds, such as 1,2")
    parser.add_argument("--match", default="", help="only variants whose name this regular expression finds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--page", type=Path, help="Markdown file whose table between the markers is replaced")
    parser.add_argument("--any-code", action="store_true", help="don't repeat what an older version of the code ran")
    parser.add_argument("--render-only", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit status 0 when everything that was asked for has a result."""
    args = arguments(argv)
    store, questions = ResultStore(args.results), LISTS[args.list]
    if not args.render_only:
        seeds = {int(seed) for seed in args.seeds.split(",") if seed}
        runs = [run for question in questions for run in question.runs]
        wanted = [run for run in runs if re.search(args.match, run.name) and (not seeds or run.seed in seeds)]
        ready = [run for run in wanted if is_there(run.corpus, PACKAGES)]
        if len(ready) < len(wanted):
            say(f"{len(wanted) - len(ready)} runs are left out, their text is not here: {FETCH}")
        missing = store.missing(ready, None if args.any_code else code_version())
        say(f"{len(missing)} runs to do, results in {args.results}")
        run_all(missing, store, args.jobs, say)
    say(render(questions, store, args.page))
    if args.page is not None:
        write_into(args.page)
    return 0


def say(line: str) -> None:
    """One line for the person who waits."""
    print(line, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
