"""The convergence lab's command: `python -m tests.bench.convergence quick|small|gates`.

Runs what has no result by the present code yet, then renders the table and the plot from the results on disk.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from tests.bench.convergence.lists import LISTS
from tests.bench.convergence.page import check_page
from tests.bench.convergence.report import render
from tests.bench.convergence.results import ROOT, ResultStore, code_version
from tests.bench.convergence.running import run_all
from tests.bench.convergence.swarm import PACKAGES
from tests.bench.convergence.texts import FETCH, is_there, read_text
from tests.bench.convergence.variant import Variant
from tests.bench.convergence.wire import write_into
from tscale.protocol.errors import BadInput, StopNode

PROG = "python -m tests.bench.convergence"
RESULTS = ROOT / "docs" / "results" / "convergence"
PAGE = ROOT / "docs" / "results" / "convergence.md"


def arguments(argv: list[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument("list", choices=sorted(LISTS), help="which variants")
    parser.add_argument("--jobs", type=_jobs, default=2, help="processes, one thread each (default 2)")
    parser.add_argument("--seeds", type=_seeds, default=frozenset(), help="only these seeds, such as 1,2")
    parser.add_argument("--match", type=_pattern, default="", help="only names in which this regular expression is")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--page", type=Path, help="Markdown file whose table between the markers is replaced")
    parser.add_argument("--any-code", action="store_true", help="don't repeat what an older version of the code ran")
    parser.add_argument("--render-only", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit status 0 when every run that was asked for, and whose text is here, has its result."""
    args = arguments(argv)
    try:
        return lab(args)
    except StopNode as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{PROG}: stopped; the same command goes on where it was", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def lab(args: argparse.Namespace) -> int:
    """What the command line asks for. Returns the exit status, or raises StopNode."""
    store, questions = ResultStore(args.results), LISTS[args.list]
    store.check()
    if args.page is not None:
        check_page(args.page)
    failed = 0
    if not args.render_only:
        store.make_ready()
        missing = store.missing(wanted(args), None if args.any_code else code_version())
        _check_texts(missing)
        jobs = min(args.jobs, os.cpu_count() or 1)
        say(f"{len(missing)} runs to do, {jobs} at a time, results in {args.results}")
        failed = run_all(missing, store, jobs, say)
    say(render(questions, store, args.page))
    if args.page is not None:
        write_into(args.page)
    if failed:
        raise StopNode(f"{failed} runs failed")
    return 0


def wanted(args: argparse.Namespace) -> list[Variant]:
    """The runs that were asked for and can be done here. Raises BadInput when the list has no such run."""
    runs = [run for question in LISTS[args.list] for run in question.runs]
    known = sorted({run.seed for run in runs})
    if not args.seeds <= set(known):
        raise BadInput(f"the list {args.list} has the seeds {', '.join(map(str, known))} only")
    chosen = [run for run in runs if re.search(args.match, run.name) and (not args.seeds or run.seed in args.seeds)]
    if not chosen:
        raise BadInput(f"the list {args.list} has no run with these seeds whose name matches {args.match!r}")
    ready = [run for run in chosen if is_there(run.corpus, PACKAGES)]
    if len(ready) < len(chosen):
        say(f"{len(chosen) - len(ready)} runs are left out, their text is not here: {FETCH}")
    return ready


def _check_texts(runs: Sequence[Variant]) -> None:
    for corpus in sorted({run.corpus for run in runs}):
        try:
            read_text(corpus, PACKAGES)
        except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
            raise BadInput(f"can't read the text {corpus} ({error}), fetch it again: {FETCH}") from None


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes, 1 or more")
    return int(text)


def _seeds(text: str) -> frozenset[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of seeds such as 1,2")
    return frozenset(map(int, text.split(",")))


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def say(line: str) -> None:
    """One line for the person who waits."""
    print(line, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
