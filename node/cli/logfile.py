"""The log file of a command: bounded in size, with repeated lines counted instead of repeated."""

from __future__ import annotations

import logging
import logging.handlers
import time
from pathlib import Path

import platformdirs

MAX_LOG_BYTES = 8 << 20
KEPT_FILES = 3
REPEAT_WINDOW_S = 60.0
MAX_REMEMBERED = 256


class CountRepeats(logging.Filter):
    """Lets a message template of one logger through once per window; the next one says how many were left out."""

    def __init__(self, window_s: float = REPEAT_WINDOW_S) -> None:
        super().__init__()
        self._window_s = window_s
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, record.levelno, str(record.msg))
        first_unix_s, dropped = self._seen.get(key, (float("-inf"), 0))
        if record.created - first_unix_s < self._window_s:
            self._seen[key] = (first_unix_s, dropped + 1)
            return False
        if len(self._seen) >= MAX_REMEMBERED:
            self._seen.clear()
        self._seen[key] = (record.created, 0)
        if dropped:
            record.msg, record.args = f"{record.getMessage()} (and {dropped} more like it before)", ()
        return True


class QuietHandler(logging.handlers.RotatingFileHandler):
    """A log that can't be written (the disk is full) is no reason to print tracebacks or to stop."""

    def handleError(self, record: logging.LogRecord) -> None:
        return None


def log_to_folder(folder: Path) -> None:
    """Log into `node.log` of a node's log folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_to(folder / "node.log")


def log_to(path: Path) -> None:
    """Send everything that is logged from INFO on to `path` (rotated), and nothing to the screen."""
    handler = QuietHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_FILES, encoding="utf-8", delay=True)
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.addFilter(CountRepeats())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def current_path() -> Path | None:
    """The file that `log_to` set up, if any."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QuietHandler):
            return Path(handler.baseFilename)
    return None


def log_unexpected(error: BaseException) -> Path | None:
    """Write the traceback to the log file (the user's own one when no node runs). Returns its path, if it worked."""
    try:
        path = current_path()
        if path is None:
            path = Path(platformdirs.user_log_dir("tscale")) / "tscale-node.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            log_to(path)
        logging.getLogger("tscale.node.cli").error("unexpected error", exc_info=error)
    except OSError:
        return None
    return path if path.exists() else None
