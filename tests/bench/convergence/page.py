"""The parts of a Markdown page that are made from results, between two markers each."""

from __future__ import annotations

import os
from pathlib import Path

from tscale.protocol.errors import BadInput

TABLE = ("<!-- table: made by tests/bench/convergence -->", "<!-- end of table -->")
BYTES = ("<!-- bytes: made by tests/bench/convergence -->", "<!-- end of bytes -->")


def check_page(page: Path) -> None:
    """Raises BadInput when a page has no place for a table, or can't be written."""
    if not has_place(page, TABLE):
        raise BadInput(f"{page} has no place for the table: write the lines {TABLE[0]} and {TABLE[1]} into it")
    if not os.access(page, os.W_OK) or not os.access(page.parent, os.W_OK):
        raise BadInput(f"{page} can't be written, or no plot beside it")


def has_place(page: Path, markers: tuple[str, str]) -> bool:
    """Whether both markers are there, once each and in order. Raises BadInput when the page can't be read."""
    text = _read(page)
    return [text.count(marker) for marker in markers] == [1, 1] and text.index(markers[0]) < text.index(markers[1])


def fill(page: Path, markers: tuple[str, str], made: str) -> None:
    """Replace what is between the markers, which are there. The page is never half of one."""
    text, (begin, end) = _read(page), markers
    before, after = text.split(begin)[0], text.split(end)[1]
    part = page.with_suffix(".part")
    part.write_text(f"{before}{begin}\n{made}\n{end}{after}", encoding="utf-8")
    part.replace(page)


def _read(page: Path) -> str:
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"can't read {page}: {error}") from None
