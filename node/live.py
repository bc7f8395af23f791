"""What a running node shows: one live line on a terminal, a plain line per round elsewhere, JSON lines for scripts.

All three are a `NodeEvents` of the daemon and are built from the status snapshot alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tscale.protocol.status import StatusSnapshot

_UNITS = ("B", "kB", "MB", "GB", "TB")


class Display(Protocol):
    """`NodeEvents` that may hold the screen: use it as a context around the run."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def on_ready(self, link: str, addrs: list[str]) -> None: ...

    def on_status(self, snapshot: StatusSnapshot) -> None: ...

    def on_notice(self, line: str) -> None: ...


def choose_display(as_json: bool, stream: IO[str] | None = None, err: IO[str] | None = None) -> Display:
    """JSON lines when asked for, a live line on a terminal, plain lines elsewhere."""
    out = stream if stream is not None else sys.stdout
    if as_json:
        return JsonDisplay(out)
    if out.isatty():
        return TerminalDisplay(Console(file=out))
    return PlainDisplay(out, err if err is not None else sys.stderr)


class _Context:
    """A display that needs no screen."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class PlainDisplay(_Context):
    """One line per folded round; notices go to `err`."""

    def __init__(self, out: IO[str], err: IO[str]) -> None:
        self._out, self._err = out, err
        self._last_folded: int | None = None
        self._last_activity = ""

    def on_ready(self, link: str, addrs: list[str]) -> None:
        _write_line(self._out, "\n".join(ready_lines(link, addrs)))

    def on_status(self, snapshot: StatusSnapshot) -> None:
        activity = f"{snapshot.activity}: {snapshot.reason}" if snapshot.reason else snapshot.activity
        if activity != self._last_activity:
            self._last_activity = activity
            _write_line(self._out, plain_text(activity))
        folded = snapshot.round.folded_round
        if folded >= 0 and folded != self._last_folded:
            self._last_folded = folded
            _write_line(self._out, round_line(snapshot))

    def on_notice(self, line: str) -> None:
        _write_line(self._err, plain_text(line))


class JsonDisplay(_Context):
    """One JSON object a line: `ready`, `round` (once per folded round, with the whole snapshot) and `notice`."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._last_folded: int | None = None

    def on_ready(self, link: str, addrs: list[str]) -> None:
        _write_line(self._out, json.dumps({"event": "ready", "link": link, "addrs": addrs}))

    def on_status(self, snapshot: StatusSnapshot) -> None:
        folded = snapshot.round.folded_round
        if folded >= 0 and folded != self._last_folded:
            self._last_folded = folded
            _write_line(
                self._out, json.dumps({"event": "round", "round": folded, "status": json.loads(snapshot.to_json())})
            )

    def on_notice(self, line: str) -> None:
        _write_line(self._out, json.dumps({"event": "notice", "text": line}))


class TerminalDisplay:
    """A live line at the bottom of the terminal; everything else scrolls above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._console, self._clock = console, clock
        self._live = Live(Text("starting"), console=console, auto_refresh=False, transient=True)
        self._last_activity = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._live.stop()

    def on_ready(self, link: str, addrs: list[str]) -> None:
        for line in ready_lines(link, addrs):
            self._above(line)

    def on_status(self, snapshot: StatusSnapshot) -> None:
        if snapshot.activity != self._last_activity:
            self._last_activity = snapshot.activity
            self._above(f"{snapshot.activity}: {snapshot.reason}" if snapshot.reason else snapshot.activity)
        line = Text(live_line(snapshot, self._clock(), self._console.width), no_wrap=True, overflow="ellipsis")
        self._live.update(line, refresh=True)

    def on_notice(self, line: str) -> None:
        self._above(line)

    def _above(self, line: str) -> None:
        # soft_wrap: a link must stay one line that can be copied
        self._console.print(plain_text(line), markup=False, highlight=False, soft_wrap=True)


def ready_lines(link: str, addrs: list[str]) -> list[str]:
    """What is printed when the node can be reached: its addresses, and the link alone on its line."""
    listening = ", ".join(addrs) if addrs else "no address"
    return [f"listening on {listening}", "others join with this link (in quotes, for the shell):", link]


def live_line(snapshot: StatusSnapshot, now_unix_s: float, width: int | None = None) -> str:
    """The live line: round, time left, activity, speed, losses, peers, traffic.

    What does not fit into `width` columns is left out, the traffic first, round and activity last.
    """
    training, transfer = snapshot.training, snapshot.transfer
    heldout = "" if training.loss_heldout is None else f", held-out {show_loss(training.loss_heldout)}"
    loss = f"loss {show_loss(training.loss_train)}"
    left_s = max(0.0, snapshot.round.ends_unix_s - now_unix_s)
    fields = {
        "round": f"round {snapshot.round.number}, {show_seconds(left_s)} left",
        "activity": snapshot.activity,
        "speed": show_speed(training.tokens_per_s),
        "loss": loss + heldout,
        "peers": f"peers {count_alive(snapshot)}",
        "traffic": f"up {show_bytes(transfer.up_bps / 8)}/s down {show_bytes(transfer.down_bps / 8)}/s",
    }
    for shorter in ({"traffic": ""}, {"loss": loss}, {"speed": ""}, {"peers": ""}, {"loss": ""}):
        if width is None or len(_join_fields(fields)) <= width:
            break
        fields |= shorter
    return _join_fields(fields)


def _join_fields(fields: dict[str, str]) -> str:
    return " · ".join(field for field in fields.values() if field)


def round_line(snapshot: StatusSnapshot) -> str:
    """The line for a folded round."""
    folded, training, transfer = snapshot.round, snapshot.training, snapshot.transfer
    sent = f"sent {show_bytes(transfer.contribution_bytes)} ({transfer.bits_per_parameter:.3f} bits per parameter)"
    if not transfer.contribution_bytes:
        sent = "nothing sent yet"
    elif count_alive(snapshot) == 1:
        sent = "nobody to send to"
    return (
        f"round {folded.folded_round}: {plural(folded.contributors, 'contribution')}, "
        f"{training.tokens_total:,} tokens in all, "
        f"{show_speed(training.tokens_per_s)}, loss {show_loss(training.loss_train)} "
        f"(held-out {show_loss(training.loss_heldout)}), peers {count_alive(snapshot)}, "
        f"{sent}"
    )


def count_alive(snapshot: StatusSnapshot) -> int:
    """Live peers, this node included."""
    others = sum(1 for peer in snapshot.peers if peer.alive and not peer.this_node)
    return others + 1


def plural(count: int, word: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def show_loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def show_speed(tokens_per_s: float) -> str:
    """0 is not measured yet: nothing was trained, or the worker has just started."""
    return f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s > 0 else "- tokens/s"


def show_bytes(size_bytes: float) -> str:
    """`size_bytes` with three significant digits and a decimal unit."""
    value = float(size_bytes)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def show_seconds(seconds: float) -> str:
    """Seconds as `8s`, `2m 05s` or `3h 07m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def plain_text(text: str) -> str:
    """`text` without control characters: names and reasons of other peers must not steer a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def _write_line(stream: IO[str], line: str) -> None:
    stream.write(line + "\n")
    stream.flush()
