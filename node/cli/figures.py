"""What a measurement returned, as lines for people: names without their units, values with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tscale.node.live import show_bytes

WIDEST_VALUE = 28
"""Columns that are kept free for values; a longer one moves its meaning."""

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


def figure_lines(result: dict[str, Any], meanings: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """One line per value, the names and the values below each other, and what they mean where that is known."""
    rows = [(*_row(name, value), meanings.get(name, "")) for name, value in result.items()]
    name_width = max((len(name) for name, _, _ in rows), default=0)
    value_width = min(WIDEST_VALUE, max((len(value) for _, value, _ in rows), default=0))
    return [f"{name:<{name_width}}  {value:<{value_width}}  {meaning}".rstrip() for name, value, meaning in rows]


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
