"""Checkpoints: named arrays and a JSON note in one file that is either whole or not there.

Format (version 1): the 8 bytes `TSCKPT1\\n`; the header's length (4 bytes, little-endian); the header, JSON with
`meta` and `arrays` (name, dtype, shape, in file order); the arrays, raw, little-endian, without gaps; the BLAKE3 of
everything before (32 bytes). No pickle and nothing that runs.

A folder holds the newest good checkpoint and the one before it, `checkpoint-<number>.tsck`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from tscale.node.statedir import Opener, open_private, sync_folder, write_error
from tscale.protocol.errors import DamagedState

MAGIC = b"TSCKPT1\n"
MAX_HEADER_BYTES = 1 << 20
MAX_ARRAYS = 4096
MAX_DIMENSIONS = 8
DTYPES = frozenset({"<f4", "<f8", "<f2", "<i8", "<i4", "<u8", "<u4", "<u2", "|u1", "|i1", "|b1"})

_KEPT = 2
_BLOCK_BYTES = 1 << 24
_HASH_BYTES = 32
_NAME = re.compile(r"checkpoint-(\d{1,12})\.tsck")
_DAMAGED = "damaged.tsck"

Arrays = dict[str, NDArray[Any]]
NewArray = Callable[[tuple[int, ...], str], NDArray[Any]]
"""Makes an array of a shape and a dtype, with undefined contents."""


class Checkpoint(NamedTuple):
    """What was saved. `note` is None, or one line about a damaged file that was passed over."""

    arrays: Arrays
    meta: dict[str, Any]
    note: str | None


class _Damaged(Exception):
    """Why a file can't be used; never leaves this module."""


@dataclass(frozen=True)
class _ArraySpec:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


def save_checkpoint(folder: Path, arrays: Arrays, meta: dict[str, Any], opener: Opener | None = None) -> Path:
    """Write a new checkpoint, check what was written, and only then drop the oldest.

    `arrays` must not change during the call. `meta` is anything JSON can hold. Raises DiskFull or BadInput; what
    was saved before is intact then. `opener` is for tests.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        numbers = _numbers(folder)
        path = _path(folder, max(numbers, default=0) + 1)
        temporary = folder / f".{path.name}.tmp"
        _clear_temporaries(folder)
        try:
            with (opener or open_private)(temporary) as file:
                for piece in _pieces(arrays, meta):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            _check(temporary)
            os.replace(temporary, path)
            sync_folder(folder)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise write_error(folder, error) from error
    except _Damaged as error:
        raise DamagedState(f"the disk did not keep what was written to {folder} ({error}): check the disk") from error
    for number in sorted(numbers, reverse=True)[_KEPT - 1 :]:
        _path(folder, number).unlink(missing_ok=True)
    return path


def load_checkpoint(
    folder: Path, new_array: NewArray = np.empty, into: Mapping[str, NDArray[Any]] | None = None
) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None when none was ever saved; `new_array` makes its arrays.

    Those of `into` are read in place where shape and type are theirs; they hold anything after an error. A damaged
    newer one is set aside as `damaged.tsck` and named in `note`. Raises DamagedState when there are files and none is
    whole.
    """
    problems: list[str] = []
    for number in sorted(_numbers(folder), reverse=True):
        path = _path(folder, number)
        try:
            arrays, meta = _read(path, new_array, into or {})
        except (_Damaged, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(f"{path.name} is damaged ({reason})")
            continue
        note = None
        if problems:
            _set_aside(folder, number)
            note = f"{'; '.join(problems)}: using the one before it, {path.name}"
        return Checkpoint(arrays, meta, note)
    if problems:
        raise DamagedState(f"no checkpoint in {folder} is whole ({'; '.join(problems)}): starting anew without one")
    return None


def _pieces(arrays: Arrays, meta: dict[str, Any]) -> Iterator[bytes | memoryview]:
    flat = {name: _little_endian(array) for name, array in arrays.items()}
    specs = [{"name": name, "dtype": array.dtype.str, "shape": list(array.shape)} for name, array in flat.items()]
    header = json.dumps({"meta": meta, "arrays": specs}, allow_nan=True).encode()
    if len(header) > MAX_HEADER_BYTES or len(specs) > MAX_ARRAYS:
        raise ValueError(f"a checkpoint holds {MAX_ARRAYS} arrays and {MAX_HEADER_BYTES} bytes of header at most")
    hasher = blake3()
    head = MAGIC + len(header).to_bytes(4, "little") + header
    hasher.update(head)
    yield head
    for array in flat.values():
        for block in _blocks(array):
            hasher.update(block)
            yield block
    yield hasher.digest()


def _blocks(array: NDArray[Any]) -> Iterator[memoryview]:
    """The memory of a contiguous array, a block at a time."""
    raw: Any = array.reshape(-1).view(np.uint8)
    view = memoryview(raw)
    for start in range(0, len(view), _BLOCK_BYTES):
        yield view[start : start + _BLOCK_BYTES]


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    # ascontiguousarray makes a scalar one-dimensional
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(array.shape)
    if plain.dtype.str not in DTYPES:
        raise ValueError(f"arrays of {plain.dtype} can't be saved")
    return plain


def _read(path: Path, new_array: NewArray, into: Mapping[str, NDArray[Any]]) -> tuple[Arrays, dict[str, Any]]:
    with path.open("rb") as file:
        hasher = blake3()
        specs, meta = _read_header(file, hasher)
        arrays: Arrays = {}
        for spec in specs:
            mine = into.get(spec.name)
            fits = mine is not None and (mine.shape, mine.dtype.str) == (spec.shape, spec.dtype)
            array = mine if mine is not None and fits else new_array(spec.shape, spec.dtype)
            for block in _blocks(array):
                if file.readinto(block) != len(block):
                    raise _Damaged("it is too short")
                hasher.update(block)
            arrays[spec.name] = array
        if file.read(_HASH_BYTES) != hasher.digest():
            raise _Damaged("its hash is wrong")
    return arrays, meta


def _check(path: Path) -> None:
    """Read a file again and check its hash, without its arrays in memory."""
    with path.open("rb") as file:
        hasher = blake3()
        specs, _ = _read_header(file, hasher)
        left = sum(spec.size_bytes for spec in specs)
        while left:
            block = file.read(min(left, _BLOCK_BYTES))
            if not block:
                raise _Damaged("it is too short")
            hasher.update(block)
            left -= len(block)
        if file.read(_HASH_BYTES) != hasher.digest():
            raise _Damaged("its hash is wrong")


def _read_header(file: BufferedReader, hasher: Any) -> tuple[list[_ArraySpec], dict[str, Any]]:
    file_bytes = os.fstat(file.fileno()).st_size
    start = file.read(len(MAGIC) + 4)
    if len(start) != len(MAGIC) + 4 or not start.startswith(MAGIC):
        raise _Damaged("it does not start like a checkpoint")
    header_bytes = int.from_bytes(start[-4:], "little")
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes):
        raise _Damaged("its header is too long")
    header = file.read(header_bytes)
    hasher.update(start + header)
    specs, meta = _parse_header(header)
    # the declared sizes are bounded by the file's own before any array is made
    expected = len(start) + header_bytes + sum(spec.size_bytes for spec in specs) + _HASH_BYTES
    if expected != file_bytes:
        raise _Damaged(f"it has {file_bytes} bytes instead of {expected}")
    return specs, meta


def _parse_header(header: bytes) -> tuple[list[_ArraySpec], dict[str, Any]]:
    try:
        tree = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _Damaged("its header is not JSON") from error
    items = tree.get("arrays") if isinstance(tree, dict) else None
    meta = tree.get("meta") if isinstance(tree, dict) else None
    if not isinstance(items, list) or not isinstance(meta, dict) or len(items) > MAX_ARRAYS:
        raise _Damaged("its header is wrong")
    specs = [_array_spec(item) for item in items]
    if len({spec.name for spec in specs}) != len(specs):
        raise _Damaged("its header names an array twice")
    return specs, meta


def _array_spec(item: Any) -> _ArraySpec:
    if not isinstance(item, dict) or set(item) != {"name", "dtype", "shape"}:
        raise _Damaged("its header is wrong")
    name, dtype, shape = item["name"], item["dtype"], item["shape"]
    shape_ok = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
    shape_ok = shape_ok and all(type(size) is int and 0 <= size <= 1 << 40 for size in shape)
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES or not shape_ok:
        raise _Damaged("its header is wrong")
    return _ArraySpec(name, dtype, tuple(shape))


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return [int(match[1]) for match in matches if match is not None]


def _path(folder: Path, number: int) -> Path:
    return folder / f"checkpoint-{number:06d}.tsck"


def _clear_temporaries(folder: Path) -> None:
    for path in folder.glob(".checkpoint-*.tmp"):
        path.unlink(missing_ok=True)


def _set_aside(folder: Path, good: int) -> None:
    # otherwise the next save would count a damaged file as the one to fall back to
    for number in sorted(_numbers(folder)):
        if number > good:
            os.replace(_path(folder, number), folder / _DAMAGED)
