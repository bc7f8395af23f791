"""Content addressing: BLAKE3 with domain separation, and blobs as lists of 1 MiB chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from tscale.protocol.errors import RefuseFrame

CHUNK_BYTES = 1 << 20
HASH_BYTES = 32
MAX_BLOB_BYTES = 1 << 42
"""No blob of any kind is larger (4 TiB); the spec's caps are far below."""

_PREFIX = b"tscale/1/"


def digest(domain: str, *parts: bytes | memoryview) -> bytes:
    """BLAKE3 of `tscale/1/<domain>` and the parts, each after its length as 8 little-endian bytes. 32 bytes."""
    head = _PREFIX + domain.encode("ascii")
    hasher = blake3(len(head).to_bytes(8, "little") + head)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob by its content: `root` is `blob_root` of its size and chunk hashes."""

    root: bytes
    size_bytes: int

    @property
    def chunks(self) -> int:
        """How many chunks the blob has."""
        return chunk_count(self.size_bytes)

    def chunk_bytes(self, index: int) -> int:
        """The length of chunk `index`; the last one is the rest. Raises RefuseFrame outside the blob."""
        if not 0 <= index < self.chunks:
            raise RefuseFrame(f"the blob has {self.chunks} chunks, there is no chunk {index}")
        return min(CHUNK_BYTES, self.size_bytes - index * CHUNK_BYTES)


def chunk_count(size_bytes: int) -> int:
    """How many chunks a blob of this size has; an empty blob has none."""
    return -(-size_bytes // CHUNK_BYTES)


def chunk_hash(chunk: bytes | memoryview) -> bytes:
    """The hash of one chunk. 32 bytes."""
    return digest("chunk", chunk)


def chunk_hashes(data: bytes | memoryview) -> tuple[bytes, ...]:
    """The hash of every 1 MiB chunk of `data`, in order."""
    return tuple(chunk_hash(chunk) for chunk in split_chunks(data))


def split_chunks(data: bytes | memoryview) -> Iterator[memoryview]:
    """The 1 MiB chunks of `data` without copying; the last one is shorter."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def blob_root(size_bytes: int, hashes: tuple[bytes, ...]) -> bytes:
    """The content address of a blob: its size and the hashes of its chunks.

    Raises RefuseFrame when the number or the length of the hashes does not fit the size.
    """
    if not 0 <= size_bytes <= MAX_BLOB_BYTES or len(hashes) != chunk_count(size_bytes):
        raise RefuseFrame(f"{len(hashes)} chunk hashes do not fit a blob of {size_bytes} bytes")
    if any(len(item) != HASH_BYTES for item in hashes):
        raise RefuseFrame("a chunk hash is not 32 bytes")
    return digest("blob", size_bytes.to_bytes(8, "little"), b"".join(hashes))


def blob_ref(data: bytes | memoryview) -> BlobRef:
    """The reference of a blob held in memory."""
    size_bytes = len(memoryview(data))
    return BlobRef(blob_root(size_bytes, chunk_hashes(data)), size_bytes)
