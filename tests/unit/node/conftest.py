"""What the tests of several commands need."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_daemon import FakeDaemon


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    fake = FakeDaemon()
    monkeypatch.setitem(sys.modules, "tscale.node.daemon", fake.module())
    return fake


@pytest.fixture
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """All of the user's folders are in the test's own; handlers of the log are taken away again."""
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in [item for item in root.handlers if item not in before]:
        root.removeHandler(handler)
        handler.close()


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night. " * 100)
    return path
