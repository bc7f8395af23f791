"""Byte corpora: what is held out, batches that anyone can recompute, and files that can't be used."""

import hashlib
import os

import numpy as np
import pytest

from tscale.node.data.corpus import HELDOUT_BLOCK_BYTES, ByteCorpus, load_text_file, shipped_book
from tscale.protocol.errors import BadInput

KEY = bytes(range(32))


def numbered(blocks: int) -> bytes:
    """Each block holds its own number, so a byte tells where it came from."""
    return b"".join(bytes([i]) * HELDOUT_BLOCK_BYTES for i in range(blocks))


def test_a_share_of_the_blocks_is_held_out_and_never_trained_on():
    corpus = ByteCorpus(numbered(40), heldout_per_mille=100)
    trained = set(np.flatnonzero(corpus.counts))
    held = set(np.unique(corpus.heldout(64, 100)))
    assert held == {5, 15, 25, 35} and trained == set(range(40)) - held
    assert corpus.heldout_bytes == 4 * HELDOUT_BLOCK_BYTES
    assert corpus.counts.sum() == corpus.train_bytes == 36 * HELDOUT_BLOCK_BYTES
    drawn = np.concatenate([corpus.batch(KEY, step, 16, 100) for step in range(50)])
    assert set(np.unique(drawn)) == trained
    # no sequence crosses a hole: neighbours differ by one at most
    assert np.diff(drawn, axis=1).max() == 1


def test_batches_follow_key_and_step_and_nothing_else():
    corpus = ByteCorpus(shipped_book(), 100)
    first = corpus.batch(KEY, 7, 4, 32)
    assert first.shape == (4, 33) and first.dtype == np.int64
    assert np.array_equal(first, ByteCorpus(shipped_book(), 100).batch(KEY, 7, 4, 32))
    for other in (corpus.batch(KEY, 8, 4, 32), corpus.batch(KEY[::-1], 7, 4, 32)):
        assert not np.array_equal(first, other)
    assert bytes(first[0].astype(np.uint8)) in shipped_book()


def test_a_batch_is_pinned():
    # peers recompute each other's batches: this must never change
    batch = ByteCorpus(shipped_book(), 100).batch(KEY, 3, 2, 24)
    assert [bytes(row.astype(np.uint8)) for row in batch] == GOLDEN_BATCH


def test_heldout_windows_are_fixed_and_spread():
    corpus = ByteCorpus(numbered(40), 100)
    windows = corpus.heldout(8, 64)
    assert windows.shape == (8, 65) and windows.dtype == np.int64
    assert windows[:, 0].tolist() == [5, 5, 15, 15, 25, 25, 35, 35]
    assert np.array_equal(windows, ByteCorpus(numbered(40), 100).heldout(8, 64))


def test_a_short_text_loses_its_end():
    corpus = ByteCorpus(bytes(range(200)), 100)
    assert (corpus.train_bytes, corpus.heldout_bytes) == (180, 20)
    assert corpus.heldout(1, 10)[0, 0] == 180
    assert corpus.batch(KEY, 0, 50, 10).max() < 180


def test_no_heldout_share_trains_on_everything():
    corpus = ByteCorpus(numbered(3), 0)
    assert corpus.train_bytes == 3 * HELDOUT_BLOCK_BYTES
    with pytest.raises(BadInput, match="too short"):
        corpus.heldout(1, 8)


def test_a_text_that_just_fits_and_one_that_does_not():
    corpus = ByteCorpus(bytes(range(9)), 0)
    assert corpus.batch(KEY, 0, 3, 8).tolist() == [list(range(9))] * 3
    with pytest.raises(BadInput, match="too short for sequences of 10 bytes"):
        corpus.batch(KEY, 0, 3, 9)


def test_a_mapped_file_gives_the_same_as_bytes(tmp_path):
    path = tmp_path / "text.bin"
    path.write_bytes(numbered(20))
    mapped = ByteCorpus(np.memmap(path, np.uint8, "r"), 100)
    assert np.array_equal(mapped.batch(KEY, 1, 4, 16), ByteCorpus(numbered(20), 100).batch(KEY, 1, 4, 16))


def test_the_shipped_book():
    book = shipped_book()
    assert len(book) == 1_204_997
    assert hashlib.sha256(book).hexdigest() == "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240"
    assert "“" in book.decode("utf-8")


def test_text_files_are_read_as_they_are(tmp_path):
    for text in ("“Whale”, größer\r\n\f".encode(), "caf\xe9 cr\xe8me".encode("latin-1"), b"x"):
        path = tmp_path / "book.txt"
        path.write_bytes(text)
        assert load_text_file(path) == text


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "is empty"), (b"ab\0cd", "not a text file"), (b"\x01\x02ab" * 50, "not a text file")]
)
def test_files_that_hold_no_text_are_refused(tmp_path, content, reason):
    path = tmp_path / "book.txt"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=reason) as raised:
        load_text_file(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_paths_that_are_no_file_are_refused(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        load_text_file(tmp_path / "nothing.txt")
    with pytest.raises(BadInput, match="is a directory"):
        load_text_file(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("text")
    path.chmod(0)
    with pytest.raises(BadInput, match="cannot read"):
        load_text_file(path)


GOLDEN_BATCH = [b"ever make you one pint of", b"or?\xe2\x80\x9d muttered\nStubb, lo"]
