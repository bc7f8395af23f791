"""Signed records kept over restarts: an append-only file of length-prefixed records, rewritten when it has grown."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tscale.node.statedir import atomic_write, write_error
from tscale.protocol.records import MANIFEST_MAX_BYTES

MAX_FILE_BYTES = 1 << 28
_LENGTH_BYTES = 4


class RecordFile:
    """`append` is durable against a kill of the process; a torn last record is dropped at the next start."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[bytes]:
        """The records, oldest first; what follows a torn or impossible length is dropped."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise write_error(self._path, error) from error
        records: list[bytes] = []
        at = 0
        while at + _LENGTH_BYTES <= min(len(data), MAX_FILE_BYTES):
            size = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
            if size > MANIFEST_MAX_BYTES or at + _LENGTH_BYTES + size > len(data):
                break
            records.append(data[at + _LENGTH_BYTES : at + _LENGTH_BYTES + size])
            at += _LENGTH_BYTES + size
        if at < len(data):
            self.rewrite(records)
        return records

    def append(self, record: bytes) -> None:
        """Add one record. Raises DiskFull."""
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                file.write(len(record).to_bytes(_LENGTH_BYTES, "little") + record)
        except OSError as error:
            raise write_error(self._path, error) from error

    def rewrite(self, records: Iterable[bytes]) -> None:
        """Replace the file's contents. Raises DiskFull, with the old contents intact."""
        atomic_write(self._path, b"".join(len(r).to_bytes(_LENGTH_BYTES, "little") + r for r in records))
