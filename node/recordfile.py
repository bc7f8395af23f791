"""Signed records kept over restarts: an append-only file of length-prefixed records, rewritten when it has grown."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from tscale.node.statedir import atomic_write, write_error
from tscale.protocol.errors import BadInput
from tscale.protocol.records import MANIFEST_MAX_BYTES

MAX_FILE_BYTES = 1 << 28
GROWN_BYTES = 4 << 20
"""Appended since the last rewrite: more than this, and more than what the rewrite kept, is worth another one."""
_LENGTH_BYTES = 4


def split_records(data: bytes) -> tuple[list[bytes], int]:
    """The whole records at the start of `data`, and where the first torn or impossible one begins."""
    records: list[bytes] = []
    at = 0
    while at + _LENGTH_BYTES <= len(data):
        size = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        if size > MANIFEST_MAX_BYTES or at + _LENGTH_BYTES + size > len(data):
            break
        records.append(data[at + _LENGTH_BYTES : at + _LENGTH_BYTES + size])
        at += _LENGTH_BYTES + size
    return records, at


def _skip_oldest(file: BinaryIO, excess_bytes: int) -> int:
    """Where the first record begins that is not within the first `excess_bytes`; lengths alone are read."""
    at = 0
    while at < excess_bytes:
        file.seek(at)
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size > MANIFEST_MAX_BYTES:
            break  # what follows can't be read anyway
        at += _LENGTH_BYTES + size
    return at


class RecordFile:
    """`append` is durable against a kill of the process; a torn last record is dropped at the next start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept_bytes = 0
        self._appended_bytes = 0

    @property
    def has_grown(self) -> bool:
        """Whether a rewrite would make the file much shorter."""
        return self._appended_bytes > max(GROWN_BYTES, self._kept_bytes)

    def load(self) -> list[bytes]:
        """The records, oldest first, as many of the newest as MAX_FILE_BYTES hold; what follows a torn or impossible
        length is dropped.

        Raises BadInput when the file can't be read.
        """
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(_skip_oldest(file, size - MAX_FILE_BYTES))
                data = file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadInput(f"can't read {self._path} ({error.strerror or error}): check its owner and mode") from error
        records, end = split_records(data)
        self._appended_bytes = end
        if end < size:
            self.rewrite(records)
        return records

    def append(self, record: bytes) -> None:
        """Add one record. Raises DiskFull, or BadInput when the place can't be written."""
        framed = len(record).to_bytes(_LENGTH_BYTES, "little") + record
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "ab") as file:
                file.write(framed)
        except OSError as error:
            raise write_error(self._path, error) from error
        self._appended_bytes += len(framed)

    def rewrite(self, records: Iterable[bytes]) -> None:
        """Replace the file's contents. Raises DiskFull, with the old contents intact."""
        data = b"".join(len(r).to_bytes(_LENGTH_BYTES, "little") + r for r in records)
        atomic_write(self._path, data)
        self._kept_bytes, self._appended_bytes = len(data), 0
