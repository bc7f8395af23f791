"""The optimizer's state in a file instead of main memory: mapped, touched in the order of the layers, crash-safe.

The file has a header page, a page of marks, and the arrays `momentum`, `first`, `second` (float32, native order). The
header says which layout the file belongs to, whether it was closed in order, and, if so, the digest of its arrays. A
mark says that a layer's state is being changed.

A process that is killed leaves its writes with the kernel, so a file of the same boot is whole but for the layers that
are marked, and those begin again from zero. When the machine itself went down, nobody knows which pages reached the
disk: such a file, and a closed one whose arrays are not what their digest says, is torn.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from tscale.kernels.offload.pieces import TABLES, ModelPlaces
from tscale.kernels.offload.update import HostOptimizer

_MAGIC = b"tscale spill 1\0\0"
_PAGE_BYTES = 4096
# magic, layout's fingerprint, matrix values, moment values, units, closed, boot, digest of the arrays
_HEADER = struct.Struct("<16s16sQQQ?16s32s")
_CHECK_BYTES = 16
_MARKS_AT = _PAGE_BYTES
_STEPS = struct.Struct("<Q")
_SESSION_BYTES = 16


class SpillError(ValueError):
    """The file can't be used as it is."""


class SpillMismatch(SpillError):
    """The file belongs to something else: another model, or no spill file at all."""


class SpillTorn(SpillError):
    """What is in the file is not what was written. Start from a new one; only momentum is lost."""


@dataclass(frozen=True)
class _Header:
    fingerprint: bytes
    matrix_numel: int
    moment_numel: int
    units: int
    closed: bool
    session: bytes
    digest: bytes

    def encode(self) -> bytes:
        fixed = _HEADER.pack(
            _MAGIC,
            self.fingerprint,
            self.matrix_numel,
            self.moment_numel,
            self.units,
            self.closed,
            self.session,
            self.digest,
        )
        return fixed + blake3(fixed).digest(length=_CHECK_BYTES)

    @classmethod
    def decode(cls, raw: bytes) -> _Header:
        fixed, check = raw[: _HEADER.size], raw[_HEADER.size : _HEADER.size + _CHECK_BYTES]
        if not fixed.startswith(_MAGIC):
            raise SpillMismatch("not a spill file of this version")
        if len(fixed) < _HEADER.size or blake3(fixed).digest(length=_CHECK_BYTES) != check:
            raise SpillTorn("the header is damaged")
        return cls(*_HEADER.unpack(fixed)[1:])

    @property
    def data_at(self) -> int:
        """Where the arrays begin."""
        marks_bytes = _STEPS.size + self.units
        return _MARKS_AT + -(-marks_bytes // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        return self.data_at + 4 * (self.matrix_numel + 2 * self.moment_numel)


class SpilledOptimizer(HostOptimizer):
    """A HostOptimizer whose tensors are views of a file. Close it, or the next run has to trust the page cache.

    `restarted_units` are those whose state was lost halfway through a change and is zero now.
    """

    mapped = True

    def __init__(self, places: ModelPlaces, raw: mmap.mmap, header: _Header) -> None:
        self._places = places
        self._raw = raw
        self._header = header
        self._marks = np.frombuffer(raw, np.uint8, header.units, _MARKS_AT + _STEPS.size)
        arrays = np.frombuffer(raw, np.float32, offset=header.data_at)
        momentum, first, second = np.split(arrays, [header.matrix_numel, header.matrix_numel + header.moment_numel])
        self._arrays = arrays
        super().__init__(*(torch.from_numpy(array) for array in (momentum, first, second)))
        self.restarted_units = tuple(int(unit) for unit in np.flatnonzero(self._marks))
        for unit in self.restarted_units:
            self._forget(unit)

    @property
    def adam_steps(self) -> int:
        """AdamW's steps so far, kept in the file."""
        return int(_STEPS.unpack_from(self._raw, _MARKS_AT)[0])

    @adam_steps.setter
    def adam_steps(self, steps: int) -> None:
        _STEPS.pack_into(self._raw, _MARKS_AT, steps)

    def begin_update(self, unit: int) -> None:
        """As HostOptimizer."""
        self._marks[unit] = 1

    def end_update(self, unit: int) -> None:
        """As HostOptimizer."""
        self._marks[unit] = 0

    def reset(self) -> None:
        """As HostOptimizer."""
        self._marks[:] = 1
        super().reset()
        self._marks[:] = 0

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """As HostOptimizer."""
        self.check(arrays)
        self._marks[:] = 1
        super().load_state_arrays(arrays)
        self._marks[:] = 0

    def close(self) -> None:
        """Write everything to the disk and say so in the header. The tensors must not be used afterwards."""
        self._raw.flush()
        self._write_header(replace(self._header, closed=True, digest=self._digest()))

    def open_for_writing(self, session: bytes) -> None:
        """Say in the header that the arrays are about to change."""
        self._write_header(replace(self._header, closed=False, session=session, digest=bytes(32)))

    def is_whole(self) -> bool:
        """Whether the arrays are what the header of a closed file says."""
        return self._digest() == self._header.digest

    def _digest(self) -> bytes:
        hasher = blake3(_STEPS.pack(self.adam_steps), max_threads=blake3.AUTO)
        return hasher.update(self._arrays.view(np.uint8).data).digest()

    def _write_header(self, header: _Header) -> None:
        raw = header.encode()
        self._raw[: len(raw)] = raw
        self._raw.flush(0, _PAGE_BYTES)
        self._header = header

    def _forget(self, unit: int) -> None:
        layers = self._places.layers
        if unit < len(layers):
            for view in layers[unit].momentum_views(self.momentum):
                view.zero_()
        else:
            where = self._places.moments(TABLES[unit - len(layers)])
            self.first[where].zero_()
            self.second[where].zero_()
        self._marks[unit] = 0


def create_spill(path: Path, places: ModelPlaces, session: bytes) -> SpilledOptimizer:
    """A new file of zeros, in place of any that is there.

    `session` (16 bytes) is the same as long as what was written to files can't be lost: the boot's id.

    Raises:
        OSError: the disk is too full, or the file can't be made. Space is taken now: a mapped file that can't grow
            later would end the process.
    """
    header = _header_for(places, session)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            _take_space(file.fileno(), header.file_bytes)
            file.write(header.encode())
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return _mapped(path, places, header)


def scratch_spill(folder: Path, places: ModelPlaces) -> SpilledOptimizer:
    """As `create_spill`, in a file without a name in `folder`, which others may use too: nothing is left of it when
    the process ends, however it ends, and it can't be resumed.
    """
    header = _header_for(places, bytes(_SESSION_BYTES))
    with tempfile.TemporaryFile(dir=folder) as file:
        _take_space(file.fileno(), header.file_bytes)
        file.write(header.encode())
        file.flush()
        return SpilledOptimizer(places, mmap.mmap(file.fileno(), header.file_bytes), header)


def resume_spill(path: Path, places: ModelPlaces, session: bytes) -> SpilledOptimizer:
    """Go on with a file that is there.

    Raises:
        FileNotFoundError: it is not.
        SpillMismatch: it belongs to another layout.
        SpillTorn: its contents are not what was written.
    """
    with path.open("rb") as file:
        header = _Header.decode(file.read(_PAGE_BYTES))
    own = _header_for(places, session)
    if replace(header, closed=False, session=session, digest=bytes(32)) != own:
        raise SpillMismatch("the file belongs to a model with another layout")
    if path.stat().st_size != header.file_bytes:
        raise SpillTorn(f"the file has {path.stat().st_size} bytes instead of {header.file_bytes}")
    if not header.closed and header.session != session:
        raise SpillTorn("the machine went down while the file was in use")
    optimizer = _mapped(path, places, header)
    if header.closed and not optimizer.is_whole():
        raise SpillTorn("the arrays are not those that were written")
    optimizer.open_for_writing(session)
    return optimizer


def scratch_memory(folder: Path) -> Callable[[int], torch.Tensor]:
    """Makes float32 tensors [numel] in nameless files of `folder`, for what need not survive: boundary activations.

    Making one raises OSError when the disk is too full.
    """

    def make(numel: int) -> torch.Tensor:
        with tempfile.TemporaryFile(dir=folder) as file:
            _take_space(file.fileno(), 4 * numel)
            return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 4 * numel), np.float32))

    return make


def _header_for(places: ModelPlaces, session: bytes) -> _Header:
    if len(session) != _SESSION_BYTES:
        raise ValueError(f"a session is {_SESSION_BYTES} bytes")
    moments = 2 * places.table_numel
    units = len(places.layers) + len(TABLES)
    return _Header(places.layout.fingerprint, places.matrix_numel, moments, units, False, session, bytes(32))


def _mapped(path: Path, places: ModelPlaces, header: _Header) -> SpilledOptimizer:
    with path.open("r+b") as file:
        return SpilledOptimizer(places, mmap.mmap(file.fileno(), header.file_bytes), header)


def _take_space(descriptor: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
        return
    zeros = bytes(1 << 20)
    for start in range(0, size_bytes, len(zeros)):
        os.pwrite(descriptor, zeros[: size_bytes - start], start)
