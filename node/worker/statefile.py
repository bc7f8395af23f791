"""Files that a worker leaves for its node: contributions and snapshots, written whole or not at all.

A snapshot is the outer state as raw little-endian float32: the anchor, then (when the swarm has outer momentum) the
momentum, both in layout order.
"""

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tscale.kernels.fold import NewVector
from tscale.kernels.replica import OuterState
from tscale.node.statedir import write_error
from tscale.protocol.errors import RefuseFrame, SkipRound


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> int:
    """Write `pieces` one after the other to a temporary file and rename it to `path`. Returns the size in bytes.

    Raises:
        DiskFull: it does not fit; `path` is as before and the temporary file is gone.
        BadInput: the place can't be written.
    """
    partial = path.with_name(path.name + ".part")
    size_bytes = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            for piece in pieces:
                size_bytes += file.write(piece)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise write_error(path, error) from error
    return size_bytes


def state_bytes(parameters: int, *, has_momentum: bool) -> int:
    """The size of a snapshot file."""
    return 4 * parameters * (2 if has_momentum else 1)


def write_snapshot(path: Path, state: OuterState) -> int:
    """Write an outer state. Returns the size in bytes; raises DiskFull."""
    arrays = [state.anchor] if state.momentum is None else [state.anchor, state.momentum]
    return write_whole(path, (np.ascontiguousarray(array, "<f4").data.cast("B") for array in arrays))


def read_snapshot(
    path: Path, parameters: int, *, has_momentum: bool, new_vector: NewVector | None = None
) -> OuterState:
    """Read an outer state of `parameters` values per vector. `new_vector` makes them (None: in main memory).

    Raises:
        RefuseFrame: the file is missing, has another size, or holds values that are not finite.
        DiskFull: as `new_vector` raises.
    """
    expected = state_bytes(parameters, has_momentum=has_momentum)
    try:
        size_bytes = path.stat().st_size
        if size_bytes != expected:
            raise RefuseFrame(f"the snapshot has {size_bytes} bytes, this swarm's state has {expected}")
        make = new_vector or (lambda: np.empty(parameters, np.float32))
        vectors = [make() for _ in range(2 if has_momentum else 1)]
        with path.open("rb") as file:
            whole = all(file.readinto(vector.data.cast("B")) == vector.nbytes for vector in vectors)
    except OSError as error:
        raise RefuseFrame(f"the snapshot can't be read: {error}") from error
    if sys.byteorder == "big":
        for vector in vectors:
            vector.byteswap(inplace=True)
    if not whole or not all(np.isfinite(vector).all() for vector in vectors):
        raise RefuseFrame("the snapshot is cut short or holds values that are not finite")
    return OuterState(vectors[0], vectors[1] if has_momentum else None)


def read_blob(path: str, max_bytes: int) -> bytes:
    """The whole of a contribution's file.

    Raises:
        RefuseFrame: it is over the cap; nothing was allocated.
        SkipRound: it is missing or can't be read, which is nobody's fault but this disk's.
    """
    try:
        size_bytes = os.stat(path).st_size
        if size_bytes > max_bytes:
            raise RefuseFrame(f"a contribution of {size_bytes} bytes is over the cap of {max_bytes}")
        return Path(path).read_bytes()
    except OSError as error:
        raise SkipRound(f"a contribution can't be read: {error}") from error
