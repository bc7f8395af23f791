"""What a measurement returned, as lines for people: names without their units, values with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tscale.node.live import show_bytes

# by the end of a name, the longest first
_UNITS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_params_per_s", lambda value: f"{value / 1e6:,.3g} million parameters/s"),
    ("_tokens_per_s", lambda value: f"{value:,.0f} tokens/s"),
    ("_bytes_per_s", lambda value: f"{show_bytes(value)}/s"),
    ("_bytes", show_bytes),
    ("_tokens", lambda value: f"{value:,.0f}"),
    ("_bps", lambda value: f"{show_bytes(value / 8)}/s"),
    ("_s", lambda value: f"{value:,.3g} s"),
)


def figure_lines(result: dict[str, Any]) -> list[str]:
    """One line per value, the names and the values below each other."""
    rows = [_row(name, value) for name, value in result.items()]
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _row(name: str, value: Any) -> tuple[str, str]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    for ending, show in _UNITS:
        if name.endswith(ending) and (number or value is None):
            return _words(name.removesuffix(ending)), "-" if value is None else show(float(value))
    return _words(name), _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")
