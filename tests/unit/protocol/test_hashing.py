"""Digests are separated by domain and by part; blobs are addressed by size and chunk hashes."""

from __future__ import annotations

import pytest
from blake3 import blake3

from tscale.protocol.errors import RefuseFrame
from tscale.protocol.hashing import (
    CHUNK_BYTES,
    BlobRef,
    blob_ref,
    blob_root,
    chunk_count,
    chunk_hash,
    chunk_hashes,
    digest,
)


def test_digest_is_blake3_of_the_length_prefixed_parts() -> None:
    head = b"tscale/1/chunk"
    expected = blake3(len(head).to_bytes(8, "little") + head + (3).to_bytes(8, "little") + b"abc").digest()
    assert digest("chunk", b"abc") == expected


def test_parts_and_domains_do_not_run_into_each_other() -> None:
    assert len({digest("a", b"bc"), digest("ab", b"c"), digest("a", b"b", b"c"), digest("a", b"bc", b"")}) == 4


@pytest.mark.parametrize(
    ("size_bytes", "chunks"), [(0, 0), (1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (5 * CHUNK_BYTES, 5)]
)
def test_chunk_count(size_bytes: int, chunks: int) -> None:
    assert chunk_count(size_bytes) == chunks


def test_a_blob_is_the_list_of_its_chunks() -> None:
    data = b"x" * CHUNK_BYTES + b"tail"
    hashes = chunk_hashes(data)
    assert hashes == (chunk_hash(b"x" * CHUNK_BYTES), chunk_hash(b"tail"))
    ref = blob_ref(data)
    assert ref == BlobRef(blob_root(len(data), hashes), CHUNK_BYTES + 4)
    assert [ref.chunk_bytes(index) for index in range(ref.chunks)] == [CHUNK_BYTES, 4]
    assert blob_root(CHUNK_BYTES + 5, hashes) != ref.root, "the size is part of the address"
    assert blob_root(len(data), hashes[::-1]) != ref.root, "so is the order"


@pytest.mark.parametrize("index", [-1, 2, 1 << 40])
def test_a_chunk_outside_the_blob_is_refused(index: int) -> None:
    with pytest.raises(RefuseFrame, match="no chunk"):
        BlobRef(bytes(32), CHUNK_BYTES + 1).chunk_bytes(index)


@pytest.mark.parametrize(
    ("size_bytes", "hashes"),
    [(1, ()), (0, (bytes(32),)), (CHUNK_BYTES + 1, (bytes(32),)), (1, (bytes(31),)), (-1, ()), (1 << 43, ())],
)
def test_hashes_that_do_not_fit_the_size_are_refused(size_bytes: int, hashes: tuple[bytes, ...]) -> None:
    with pytest.raises(RefuseFrame):
        blob_root(size_bytes, hashes)
