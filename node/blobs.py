"""Blobs on disk, by content: whole ones are always right, partial ones resume, and a quota holds.

A blob with root R is the file `R` (hex) once whole; until then its bytes are in `R.part` and `R.map` says which chunks
are there. `R` appears by a rename after every chunk was checked, so a kill at any point leaves a whole blob, a part
to resume, or garbage that the next start removes. One owner (the locked state directory), one thread.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tscale.node.statedir import atomic_write, write_error
from tscale.protocol.errors import RefuseFrame, SkipRound
from tscale.protocol.hashing import (
    CHUNK_BYTES,
    HASH_BYTES,
    MAX_BLOB_BYTES,
    BlobRef,
    blob_root,
    chunk_count,
    chunk_hash,
    chunk_hashes,
)

_MAP_HEAD = b"TSMAP1\n\n"
_ROOT_NAME = re.compile(r"[0-9a-f]{64}")
_CACHED_HASH_LISTS = 64


class QuotaFull(SkipRound):
    """The blob does not fit beside those in use; nothing was stored."""


@dataclass
class _Part:
    """A blob being gathered. `checked` are the chunks known to match `hashes` in this run."""

    ref: BlobRef
    hashes: tuple[bytes, ...] | None
    have: set[int]
    checked: set[int] = field(default_factory=set)


class BlobStore:
    """Blobs in one folder, at most `quota_bytes` of them; the least recently used whole ones go first.

    Pinned blobs stay. Errors: RefuseFrame for bytes that are not the blob's, QuotaFull, DiskFull.
    """

    def __init__(self, folder: Path, quota_bytes: int) -> None:
        self._folder = folder
        self._quota_bytes = quota_bytes
        self._whole: dict[bytes, int] = {}
        self._parts: dict[bytes, _Part] = {}
        self._pins: set[bytes] = set()
        self._hash_lists: dict[bytes, tuple[bytes, ...]] = {}
        # whole blobs of an earlier run: a power cut may have damaged them, so they are read once before use
        self._unproven: set[bytes] = set()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._load()
        except OSError as error:
            raise write_error(folder, error) from error

    @property
    def used_bytes(self) -> int:
        """What the blobs take, partial ones at their full size."""
        return sum(self._whole.values()) + sum(part.ref.size_bytes for part in self._parts.values())

    def refs(self) -> tuple[BlobRef, ...]:
        """The whole blobs, least recently used first."""
        return tuple(BlobRef(root, size_bytes) for root, size_bytes in self._whole.items())

    def parts(self) -> tuple[BlobRef, ...]:
        """The blobs of which only some chunks are here."""
        return tuple(part.ref for part in self._parts.values())

    def is_whole(self, root: bytes) -> bool:
        """Whether all of a blob is here. The first call for a blob of an earlier run reads it and checks its hash."""
        if root in self._unproven:
            self._unproven.discard(root)
            hashes = self._read_hashes(root)
            if hashes is None or blob_root(self._whole[root], hashes) != root:
                self.drop(root)
            else:
                self._keep_hashes(root, hashes)
        return root in self._whole

    def have(self, root: bytes) -> frozenset[int]:
        """The chunks of a blob that are here; all of them for a whole one."""
        if self.is_whole(root):
            return frozenset(range(chunk_count(self._whole[root])))
        return frozenset(self._parts[root].have) if root in self._parts else frozenset()

    def path(self, root: bytes) -> Path | None:
        """The file of a whole blob, or None."""
        if not self.is_whole(root):
            return None
        self._touch(root)
        return self._folder / root.hex()

    def find_lost(self) -> tuple[bytes, ...]:
        """The blobs whose files somebody else has removed. They are forgotten, and the folder is made if it is gone.

        Raises BadInput when the folder can't be made or read.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            here = set(os.listdir(self._folder))
        except OSError as error:
            raise write_error(self._folder, error) from error
        lost = [root for root in self._whole if root.hex() not in here]
        lost += [root for root, part in self._parts.items() if part.have and f"{root.hex()}.part" not in here]
        for root in lost:
            self.drop(root)
        return tuple(lost)

    def hashes(self, root: bytes) -> tuple[bytes, ...] | None:
        """The chunk hashes of a blob that is whole or was begun with them, or None."""
        if root in self._parts:
            return self._parts[root].hashes
        if not self.is_whole(root):
            return None
        if root not in self._hash_lists and (found := self._read_hashes(root)) is not None:
            self._keep_hashes(root, found)
        return self._hash_lists.get(root)

    def begin(self, ref: BlobRef, hashes: tuple[bytes, ...] | None = None) -> None:
        """Expect a blob. With its chunk hashes each chunk is checked on arrival and not only at the end.

        Raises RefuseFrame for hashes that are not the blob's and QuotaFull when there is no room for it.
        """
        if hashes is not None and blob_root(ref.size_bytes, hashes) != ref.root:
            raise RefuseFrame("these chunk hashes are not the blob's")
        if self.is_whole(ref.root):
            self._require_size(ref, self._whole[ref.root])
            return
        part = self._parts.get(ref.root)
        if part is None:
            if not 0 <= ref.size_bytes <= MAX_BLOB_BYTES or len(ref.root) != HASH_BYTES:
                raise RefuseFrame("this is not the reference of a blob")
            self._make_room(ref.size_bytes)
            part = self._parts[ref.root] = _Part(ref, hashes, set())
        self._require_size(ref, part.ref.size_bytes)
        part.hashes = part.hashes or hashes
        self._write_map(part)
        if not part.ref.chunks:
            self._finish(part)

    def put_chunk(self, ref: BlobRef, index: int, data: bytes) -> bool:
        """Store one chunk; returns whether the blob is whole now. A chunk that is here already is not written again.

        Raises RefuseFrame for a wrong index, size or hash; at the last chunk also when the blob as a whole is wrong:
        then the chunks found wrong are forgotten, all of them when their hashes were never given.
        """
        if len(data) != ref.chunk_bytes(index):
            raise RefuseFrame(f"chunk {index} has {len(data)} bytes instead of {ref.chunk_bytes(index)}")
        if not self.is_whole(ref.root) and ref.root not in self._parts:
            self.begin(ref)
        if ref.root in self._whole:
            self._require_size(ref, self._whole[ref.root])
            return True
        part = self._parts[ref.root]
        self._require_size(ref, part.ref.size_bytes)
        if part.hashes is not None and chunk_hash(data) != part.hashes[index]:
            raise RefuseFrame(f"chunk {index} of the blob has a wrong hash")
        if index not in part.have or index not in part.checked:
            self._write_chunk(part, index, data)
        if part.hashes is not None:
            part.checked.add(index)
        return self._finish(part) if len(part.have) == ref.chunks else False

    def read_chunk(self, root: bytes, index: int) -> bytes | None:
        """One chunk, or None when it is not here."""
        if index not in self.have(root):
            return None
        whole = root in self._whole
        size_bytes = self._whole[root] if whole else self._parts[root].ref.size_bytes
        path = self._folder / (root.hex() if whole else f"{root.hex()}.part")
        expected = BlobRef(root, size_bytes).chunk_bytes(index)
        try:
            with path.open("rb") as file:
                file.seek(index * CHUNK_BYTES)
                data = file.read(expected)
        except OSError:
            return None
        if whole:
            self._touch(root)
        return data if len(data) == expected else None

    def add_bytes(self, data: bytes) -> BlobRef:
        """Store a blob held in memory."""
        hashes = chunk_hashes(data)
        ref = BlobRef(blob_root(len(data), hashes), len(data))
        if not self.is_whole(ref.root):
            self._make_room(ref.size_bytes, besides=ref.root)
            self._forget_part(ref.root)
            atomic_write(self._place(ref.root.hex()), data)
            self._add_whole(ref, hashes)
        self._touch(ref.root)
        return ref

    def add_file(self, path: Path) -> BlobRef:
        """Take over a file on the same disk as a blob; `path` is gone afterwards. It must not change any more."""
        try:
            hashes, size_bytes = _file_hashes(path), path.stat().st_size
            ref = BlobRef(blob_root(size_bytes, hashes), size_bytes)
            if self.is_whole(ref.root):
                path.unlink()
            else:
                self._make_room(size_bytes, besides=ref.root)
                self._forget_part(ref.root)
                os.replace(path, self._place(ref.root.hex()))
                self._add_whole(ref, hashes)
        except OSError as error:
            raise write_error(path, error) from error
        self._touch(ref.root)
        return ref

    def drop(self, root: bytes) -> None:
        """Forget a blob, whole or partial, pinned or not; when it comes back it is pinned as before."""
        self._unproven.discard(root)
        self._hash_lists.pop(root, None)
        if self._whole.pop(root, None) is not None:
            (self._folder / root.hex()).unlink(missing_ok=True)
        self._forget_part(root)

    def set_pins(self, roots: Iterable[bytes]) -> None:
        """The blobs that must not make room for others; replaces the earlier ones."""
        self._pins = set(roots)

    def _finish(self, part: _Part) -> bool:
        path = self._folder / f"{part.ref.root.hex()}.part"
        if part.hashes is None or len(part.checked) < part.ref.chunks:
            found = _file_hashes(path) if part.ref.chunks else ()
            wrong = self._wrong_chunks(part, found)
            if wrong:
                part.have -= wrong
                part.checked -= wrong
                self._write_map(part)
                raise RefuseFrame(f"{len(wrong)} chunks of the blob are wrong and are asked for again")
            part.hashes = found
        try:
            with path.open("ab") as file:
                os.fsync(file.fileno())
            os.replace(path, self._folder / part.ref.root.hex())
        except OSError as error:
            raise write_error(path, error) from error
        del self._parts[part.ref.root]
        (self._folder / f"{part.ref.root.hex()}.map").unlink(missing_ok=True)
        self._add_whole(part.ref, part.hashes)
        return True

    def _wrong_chunks(self, part: _Part, found: tuple[bytes, ...]) -> set[int]:
        if len(found) != part.ref.chunks:
            return set(part.have)
        if part.hashes is not None:
            return {index for index, pair in enumerate(zip(found, part.hashes, strict=True)) if pair[0] != pair[1]}
        return set() if blob_root(part.ref.size_bytes, found) == part.ref.root else set(part.have)

    def _place(self, name: str) -> Path:
        """Where to write a file. Somebody may have removed the folder of a running node: it is made again."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise write_error(self._folder, error) from error
        return self._folder / name

    def _write_chunk(self, part: _Part, index: int, data: bytes) -> None:
        path = self._place(f"{part.ref.root.hex()}.part")
        if part.have and not path.exists():
            raise RefuseFrame("the chunks of the blob that came before are gone from the disk")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.seek(index * CHUNK_BYTES)
                file.write(data)
        except OSError as error:
            raise write_error(path, error) from error
        part.have.add(index)
        self._write_map(part)

    def _write_map(self, part: _Part) -> None:
        bits = bytearray((part.ref.chunks + 7) // 8)
        for index in part.have:
            bits[index // 8] |= 1 << index % 8
        hashes = b"".join(part.hashes or ())
        data = _MAP_HEAD + part.ref.size_bytes.to_bytes(8, "little") + bytes(bits) + hashes
        atomic_write(self._place(f"{part.ref.root.hex()}.map"), data, durable=False)

    def _make_room(self, size_bytes: int, besides: bytes | None = None) -> None:
        reserved = self._parts[besides].ref.size_bytes if besides in self._parts else 0
        need_bytes = self.used_bytes - reserved + size_bytes - self._quota_bytes
        idle = [root for root in [*self._whole, *self._parts] if root not in self._pins and root != besides]
        chosen: list[bytes] = []
        for root in idle:
            if need_bytes <= 0:
                break
            chosen.append(root)
            need_bytes -= self._whole[root] if root in self._whole else self._parts[root].ref.size_bytes
        if need_bytes > 0:
            raise QuotaFull(f"a blob of {size_bytes} bytes does not fit the quota of {self._quota_bytes} bytes")
        for root in chosen:
            self.drop(root)

    def _add_whole(self, ref: BlobRef, hashes: tuple[bytes, ...]) -> None:
        self._whole[ref.root] = ref.size_bytes
        self._keep_hashes(ref.root, hashes)

    def _keep_hashes(self, root: bytes, hashes: tuple[bytes, ...]) -> None:
        self._hash_lists[root] = hashes
        while len(self._hash_lists) > _CACHED_HASH_LISTS:
            del self._hash_lists[next(iter(self._hash_lists))]

    def _read_hashes(self, root: bytes) -> tuple[bytes, ...] | None:
        """The chunk hashes of a whole blob as it is on the disk; None when it was removed or became shorter."""
        try:
            hashes = _file_hashes(self._folder / root.hex())
        except OSError:
            return None
        return hashes if len(hashes) == chunk_count(self._whole[root]) else None

    def _touch(self, root: bytes) -> None:
        self._whole[root] = self._whole.pop(root)
        with contextlib.suppress(OSError):
            os.utime(self._folder / root.hex())

    def _forget_part(self, root: bytes) -> None:
        self._parts.pop(root, None)
        for ending in ("part", "map"):
            (self._folder / f"{root.hex()}.{ending}").unlink(missing_ok=True)

    def _require_size(self, ref: BlobRef, size_bytes: int) -> None:
        if ref.size_bytes != size_bytes:
            raise RefuseFrame(f"the blob has {size_bytes} bytes, not {ref.size_bytes}")

    def _load(self) -> None:
        """Find what an earlier run left; whole blobs by age, parts with a good map, and remove the rest."""
        whole: list[tuple[float, bytes, int]] = []
        for path in sorted(self._folder.iterdir()):
            stem, _, ending = path.name.partition(".")
            if _ROOT_NAME.fullmatch(stem) is None or ending not in ("", "part", "map"):
                path.unlink(missing_ok=True)
            elif ending == "":
                status = path.stat()
                whole.append((status.st_mtime, bytes.fromhex(stem), status.st_size))
            elif ending == "map":
                self._load_part(path, bytes.fromhex(stem))
        self._whole = {root: size_bytes for _, root, size_bytes in sorted(whole)}
        self._unproven = set(self._whole)
        for root in [root for root in self._parts if root in self._whole]:
            self._forget_part(root)
        for path in self._folder.glob("*.part"):
            if bytes.fromhex(path.name.partition(".")[0]) not in self._parts:
                path.unlink(missing_ok=True)
        for part in [part for part in self._parts.values() if len(part.have) == part.ref.chunks]:
            # killed between the last chunk and the rename
            with contextlib.suppress(RefuseFrame):
                self._finish(part)

    def _load_part(self, path: Path, root: bytes) -> None:
        part = _parse_map(root, path.read_bytes())
        if part is None:
            path.unlink(missing_ok=True)
            return
        data_path = path.with_suffix(".part")
        present_bytes = data_path.stat().st_size if data_path.exists() else 0
        ends = {index: index * CHUNK_BYTES + part.ref.chunk_bytes(index) for index in part.have}
        part.have = {index for index, end in ends.items() if end <= present_bytes}
        self._parts[root] = part


def _parse_map(root: bytes, data: bytes) -> _Part | None:
    head_bytes = len(_MAP_HEAD) + 8
    size_bytes = int.from_bytes(data[len(_MAP_HEAD) : head_bytes], "little")
    if not data.startswith(_MAP_HEAD) or len(data) < head_bytes or size_bytes > MAX_BLOB_BYTES:
        return None
    chunks = chunk_count(size_bytes)
    bits = data[head_bytes : head_bytes + (chunks + 7) // 8]
    raw = data[head_bytes + (chunks + 7) // 8 :]
    if len(bits) != (chunks + 7) // 8 or len(raw) not in (0, chunks * HASH_BYTES):
        return None
    hashes = tuple(raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES))
    if raw and blob_root(size_bytes, hashes) != root:
        return None
    have = {index for index in range(chunks) if bits[index // 8] >> index % 8 & 1}
    return _Part(BlobRef(root, size_bytes), hashes if raw else None, have)


def _file_hashes(path: Path) -> tuple[bytes, ...]:
    with path.open("rb") as file:
        return tuple(chunk_hash(chunk) for chunk in iter(lambda: file.read(CHUNK_BYTES), b""))
