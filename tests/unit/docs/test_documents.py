"""What the documentation names exists: files, tests, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
ROOMS = "kernels|protocol|node|dashboard|tests|docs|deploy"


def names(text: str, pattern: str) -> list[str]:
    return sorted(set(re.findall(pattern, text)))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = [name for name in names(text, rf"`((?:{ROOMS})/[\w./-]*)") if not (ROOT / name.rstrip(".")).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


def test_every_invariant_has_a_test() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split("## Invariants")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "| test |" not in line]
    assert len(rows) >= 10
    assert all(re.search(r"`tests/[\w/]+\.py::\w+`", row) for row in rows)


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(names(document.read_text(encoding="utf-8"), r"`?make ([a-z][\w-]*)`"))
        assert named <= targets, (document.name, named - targets)
