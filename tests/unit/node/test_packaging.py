"""What is in the tree is what gets installed: packages, their folders, and the files that are not Python."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("kernels", "protocol", "node", "dashboard")


@pytest.fixture(scope="module")
def setuptools() -> dict[str, Any]:
    parsed: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return parsed


def folders() -> list[Path]:
    return [path.parent.relative_to(ROOT) for room in ROOMS for path in sorted((ROOT / room).rglob("__init__.py"))]


def test_every_package_is_installed_from_its_folder(setuptools: dict[str, Any]) -> None:
    expected = {"tscale." + ".".join(folder.parts): folder.as_posix() for folder in folders()}
    assert setuptools["package-dir"] == expected
    assert sorted(setuptools["packages"]) == sorted(expected)


def test_every_file_that_is_not_python_is_installed(setuptools: dict[str, Any]) -> None:
    patterns = {
        f"{setuptools['package-dir'][package]}/{pattern}"
        for package, found in setuptools["package-data"].items()
        for pattern in found
    }
    missing = [
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".pyc", ".nbi", ".nbc")
        and not any(
            fnmatch.fnmatch(path.name, Path(pattern).name) and (ROOT / pattern).parent == path.parent
            for pattern in patterns
        )
    ]
    assert missing == []


def test_there_is_no_package_above_the_rooms() -> None:
    assert not (ROOT / "tscale").exists()
    assert not (ROOT / "__init__.py").exists()
