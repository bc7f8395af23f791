"""The lab's table and plot, made from the results on disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from tests.bench.convergence.page import TABLE, fill
from tests.bench.convergence.results import Result, ResultStore
from tests.bench.convergence.variant import Variant
from tests.bench.convergence.variants import Question

HEADER = (
    "| variant | peers | rounds | bits/parameter | MB sent | nats/byte | against the first | seeds |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """A variant and its results by seed."""

    variant: Variant
    results: dict[int, Result]

    @property
    def loss(self) -> float:
        """Mean over the seeds, nats per byte."""
        return fmean(result.loss for result in self.results.values())

    @property
    def diverged(self) -> int:
        """How many of the runs have no finite loss."""
        return sum(not math.isfinite(result.loss) for result in self.results.values())

    def change(self, other: Row) -> list[float]:
        """Relative difference to another row's loss, for every seed that both have; none when a run diverged."""
        if self.diverged or other.diverged:
            return []
        both = sorted(self.results.keys() & other.results.keys())
        return [self.results[seed].loss / other.results[seed].loss - 1 for seed in both]


def rows_of(question: Question, store: ResultStore) -> list[Row]:
    """The variants of a question that have results (by any version of the code, the newest first)."""
    rows = []
    for variant in question.variants:
        found = {seed: store.find(variant.seeded(seed), None) for seed in question.seeds}
        results = {seed: result for seed, result in found.items() if result is not None}
        if results:
            rows.append(Row(variant, results))
    return rows


def render(questions: Iterable[Question], store: ResultStore, page: Path | None) -> str:
    """The tables as Markdown; with a page, they replace what is between its markers and the plot is drawn beside it."""
    parts, plotted, used, shown = [], [], [], set[str]()
    for question in questions:
        rows = rows_of(question, store)
        names = {row.variant.name for row in rows}
        if names <= shown:
            continue  # nothing of its own yet
        shown |= names
        parts.append(_table(question, rows))
        plotted = plotted or rows
        used += [result for row in rows for result in row.results.values()]
    if not used:
        return f"no results yet in {store.folder}"
    parts.append(_sources(used))
    text = "\n\n".join(parts)
    if page is not None:
        fill(page, TABLE, text)
        text += "\n" + plot(plotted, page.with_suffix(".png"))
    return text


def _table(question: Question, rows: Sequence[Row]) -> str:
    reference = next((row for row in rows if row.variant.name == question.against), None)
    ordered = sorted(rows, key=lambda row: row is not reference)
    lines = [_line(row, reference) for row in ordered]
    return "\n".join((f"**{question.title}** (first: {question.against})", "", HEADER, *lines))


def _line(row: Row, reference: Row | None) -> str:
    first = next(iter(row.results.values()))
    steps = row.variant.steps
    each = str(steps[0]) if len(set(steps)) == 1 else ", ".join(map(str, steps))
    losses, diverged = [result.loss for result in row.results.values()], row.diverged
    change = row.change(reference) if reference is not None and reference is not row else []
    sent_mb = first.curve[-1].bits / 8e6
    cells = (
        row.variant.name,
        f"{row.variant.peers} x {each}",
        str(first.rounds),
        f"{first.bits_per_parameter:.3g}" if row.variant.peers > 1 else "0",
        f"{sent_mb:.3g}" if row.variant.peers > 1 else "0",
        f"{diverged} of {len(losses)} diverged" if diverged else _with_spread(losses, "{:.3f}"),
        _with_spread([100 * x for x in change], "{:+.1f}") + " %" if change else "",
        str(len(losses)),
    )
    return f"| {' | '.join(cells)} |"


def _with_spread(values: Sequence[float], form: str) -> str:
    """The mean, and with two values or more their standard deviation."""
    mean = form.format(fmean(values))
    return mean if len(values) < 2 else f"{mean} ± {form.format(stdev(values)).lstrip('+')}"


def _sources(used: Sequence[Result]) -> str:
    days, codes = sorted({r.date[:10] for r in used}), sorted({r.code for r in used})
    runs = len({(r.run, r.code) for r in used})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{runs} runs, {span}, code {', '.join(codes)}; {used[0].parameters:,} parameters."


def plot(rows: Sequence[Row], path: Path) -> str:
    """Loss against tokens and against bytes sent, one line a variant (its lowest seed). Says what it did."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install -e '.[dev]')"
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    by_tokens, by_bytes = figure.subplots(1, 2, sharey=True)
    for row in rows:
        curve = row.results[min(row.results)].curve[1:-1]  # the last point is of another, larger set of windows
        losses = [point.loss for point in curve]
        by_tokens.plot([p.tokens / 1e6 for p in curve], losses, label=row.variant.name, linewidth=1.4)
        sent_mb = [p.bits / 8e6 if row.variant.peers > 1 else math.nan for p in curve]
        by_bytes.plot(sent_mb, losses, label=row.variant.name, linewidth=1.4)
    by_bytes.set_xscale("log")
    by_tokens.set_xlabel("million tokens of the swarm")
    by_bytes.set_xlabel("MB sent by one peer")
    by_tokens.set_ylabel("held-out loss, nats per byte")
    for axes in (by_tokens, by_bytes):
        axes.grid(alpha=0.3)
    figure.legend(*by_tokens.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    FigureCanvasAgg(figure).print_png(path)
    return f"plot: {path}"
