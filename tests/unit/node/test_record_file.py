"""The file of signed records: torn ends, foreign bytes, and when it is worth a rewrite."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tscale.node import recordfile
from tscale.node.recordfile import RecordFile
from tscale.protocol.errors import BadInput, DiskFull
from tscale.protocol.records import MANIFEST_MAX_BYTES


def test_what_was_appended_comes_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "chain.bin"
    assert RecordFile(path).load() == []
    file = RecordFile(path)
    records = [b"one", b"", b"three" * 1000]
    for record in records:
        file.append(record)
    assert RecordFile(path).load() == records
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "tail", [b"\x05\x00\x00\x00abc", b"\x05\x00", (MANIFEST_MAX_BYTES + 1).to_bytes(4, "little") + b"x" * 100]
)
def test_a_torn_end_is_cut_off_once_and_for_all(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "chain.bin"
    RecordFile(path).append(b"good")
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    file = RecordFile(path)
    assert file.load() == [b"good"]
    assert path.read_bytes() == whole
    file.append(b"next")
    assert RecordFile(path).load() == [b"good", b"next"]


def test_a_file_that_has_doubled_is_worth_a_rewrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordfile, "GROWN_BYTES", 100)
    path = tmp_path / "chain.bin"
    file = RecordFile(path)
    for _ in range(10):
        assert not file.has_grown
        file.append(b"x" * 6)
    file.append(b"x")
    assert file.has_grown
    assert RecordFile(path).has_grown is False  # not read yet
    again = RecordFile(path)
    assert len(again.load()) == 11 and again.has_grown
    file.rewrite([b"y" * 196])
    for _ in range(20):
        assert not file.has_grown
        file.append(b"x" * 6)
    file.append(b"x")
    assert file.has_grown


def test_what_can_not_be_read_or_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match=r"can't read .*folder \(Is a directory\): check"):
        RecordFile(tmp_path / "folder").load()
    with pytest.raises(BadInput, match="can't write .*nowhere"):
        RecordFile(tmp_path / "nowhere" / "chain.bin").append(b"x")
    if Path("/dev/full").exists():
        with pytest.raises(DiskFull):
            RecordFile(Path("/dev/full")).append(b"x")


def test_of_a_file_that_is_too_long_the_newest_records_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chain.bin"
    file = RecordFile(path)
    for n in range(10):
        file.append(b"%06d" % n)  # 10 bytes each in the file
    monkeypatch.setattr(recordfile, "MAX_FILE_BYTES", 35)
    newest = [b"%06d" % n for n in (7, 8, 9)]
    assert RecordFile(path).load() == newest
    assert path.stat().st_size == 30, "what was not read is not read next time either"
    path.write_bytes((MANIFEST_MAX_BYTES + 1).to_bytes(4, "little") * 20)
    assert RecordFile(path).load() == []
