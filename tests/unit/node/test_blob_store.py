"""The blob store: only right bytes, resumable, within its quota, whole after kill -9."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tscale.node.blobs import BlobStore, QuotaFull
from tscale.protocol.errors import BadInput, DiskFull, RefuseFrame
from tscale.protocol.hashing import CHUNK_BYTES, BlobRef, blob_ref, chunk_hashes

_BIG = 1 << 40


def _data(number: int, size_bytes: int) -> bytes:
    return random.Random(number).randbytes(size_bytes)


def _chunk(data: bytes, index: int) -> bytes:
    return data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blobs ü"


def test_bytes_and_files_come_back_by_their_root(folder: Path, tmp_path: Path) -> None:
    store = BlobStore(folder, _BIG)
    data = _data(1, CHUNK_BYTES + 100)
    ref = store.add_bytes(data)
    assert ref == blob_ref(data) and store.is_whole(ref.root)
    assert store.have(ref.root) == {0, 1}
    assert store.read_chunk(ref.root, 1) == data[CHUNK_BYTES:]
    assert store.read_chunk(ref.root, 2) is None and store.read_chunk(bytes(32), 0) is None
    other = tmp_path / "snapshot"
    other.write_bytes(_data(2, 300))
    other_ref = store.add_file(other)
    assert other_ref == blob_ref(_data(2, 300)) and not other.exists()
    found = store.path(other_ref.root)
    assert found is not None and found.read_bytes() == _data(2, 300)
    assert store.used_bytes == CHUNK_BYTES + 400
    assert store.hashes(ref.root) == chunk_hashes(data) and store.hashes(bytes(32)) is None
    other.write_bytes(_data(2, 300))
    assert store.add_file(other) == other_ref and not other.exists()
    assert store.add_bytes(data) == ref
    assert sorted(BlobStore(folder, _BIG).refs(), key=lambda item: item.root) == sorted(
        store.refs(), key=lambda item: item.root
    )


def test_an_empty_blob_is_whole_at_once(folder: Path) -> None:
    store = BlobStore(folder, _BIG)
    store.begin(blob_ref(b""))
    assert store.is_whole(blob_ref(b"").root)
    assert store.add_bytes(b"") == blob_ref(b"")


@pytest.mark.parametrize("with_hashes", [True, False])
def test_chunks_in_any_order_make_the_blob(folder: Path, with_hashes: bool) -> None:
    store = BlobStore(folder, _BIG)
    data = _data(3, 3 * CHUNK_BYTES + 5)
    ref = blob_ref(data)
    if with_hashes:
        store.begin(ref, chunk_hashes(data))
    done = [store.put_chunk(ref, index, _chunk(data, index)) for index in (3, 0, 0, 2)]
    assert done == [False] * 4 and store.have(ref.root) == {0, 2, 3}
    assert not store.is_whole(ref.root) and store.path(ref.root) is None
    assert store.read_chunk(ref.root, 2) == _chunk(data, 2) and store.read_chunk(ref.root, 1) is None
    assert store.put_chunk(ref, 1, _chunk(data, 1))
    found = store.path(ref.root)
    assert found is not None and found.read_bytes() == data
    assert store.put_chunk(ref, 1, _chunk(data, 1))
    assert [path.name for path in folder.iterdir()] == [ref.root.hex()]


def test_wrong_sizes_indices_and_hashes_are_refused(folder: Path) -> None:
    store = BlobStore(folder, _BIG)
    data = _data(4, CHUNK_BYTES + 5)
    ref = blob_ref(data)
    store.begin(ref, chunk_hashes(data))
    for index, piece in ((0, b"short"), (1, bytes(6)), (2, b""), (-1, b"")):
        with pytest.raises(RefuseFrame):
            store.put_chunk(ref, index, piece)
    with pytest.raises(RefuseFrame, match="wrong hash"):
        store.put_chunk(ref, 1, b"wrong")
    with pytest.raises(RefuseFrame, match="not the blob's"):
        store.begin(ref, chunk_hashes(bytes(CHUNK_BYTES + 5)))
    with pytest.raises(RefuseFrame):
        store.put_chunk(BlobRef(ref.root, 5), 0, b"12345")
    with pytest.raises(RefuseFrame, match="not the reference"):
        store.begin(BlobRef(b"short", 5))
    with pytest.raises(RefuseFrame):
        store.begin(BlobRef(bytes(32), 1 << 60))
    assert store.have(ref.root) == set()
    assert store.put_chunk(ref, 0, _chunk(data, 0)) is False
    assert store.put_chunk(ref, 1, _chunk(data, 1)) is True


def test_without_hashes_a_wrong_blob_is_found_at_the_end_and_starts_anew(folder: Path) -> None:
    store = BlobStore(folder, _BIG)
    data = _data(5, CHUNK_BYTES + 5)
    ref = blob_ref(data)
    store.put_chunk(ref, 0, _chunk(data, 0))
    with pytest.raises(RefuseFrame, match="wrong"):
        store.put_chunk(ref, 1, b"wrong")
    assert store.have(ref.root) == set() and not store.is_whole(ref.root)
    store.put_chunk(ref, 0, _chunk(data, 0))
    assert store.put_chunk(ref, 1, _chunk(data, 1))


@pytest.mark.parametrize("with_hashes", [True, False])
def test_a_restart_resumes_and_checks_what_it_found(folder: Path, with_hashes: bool) -> None:
    data = _data(6, 3 * CHUNK_BYTES)
    ref = blob_ref(data)
    store = BlobStore(folder, _BIG)
    if with_hashes:
        store.begin(ref, chunk_hashes(data))
    store.put_chunk(ref, 0, _chunk(data, 0))
    store.put_chunk(ref, 2, _chunk(data, 2))
    again = BlobStore(folder, _BIG)
    assert again.have(ref.root) == {0, 2} and again.parts() == (ref,)
    # a power cut may leave what the map says is there unwritten
    part = folder / f"{ref.root.hex()}.part"
    with part.open("r+b") as file:
        file.write(bytes(50))
    with pytest.raises(RefuseFrame):
        again.put_chunk(ref, 1, _chunk(data, 1))
    missing = {0} if with_hashes else {0, 1, 2}
    assert again.have(ref.root) == {0, 1, 2} - missing
    assert [again.put_chunk(ref, index, _chunk(data, index)) for index in sorted(missing)][-1]
    found = again.path(ref.root)
    assert found is not None and found.read_bytes() == data


def test_a_restart_after_the_last_chunk_finishes_the_blob(folder: Path) -> None:
    data = _data(7, 10)
    ref = blob_ref(data)
    store = BlobStore(folder, _BIG)
    store.put_chunk(ref, 0, data)
    os.rename(folder / ref.root.hex(), folder / f"{ref.root.hex()}.part")
    (folder / f"{ref.root.hex()}.map").write_bytes(b"TSMAP1\n\n" + (10).to_bytes(8, "little") + b"\x01")
    assert BlobStore(folder, _BIG).is_whole(ref.root)


def test_a_whole_blob_that_rotted_is_dropped_at_its_first_use(folder: Path) -> None:
    ref = BlobStore(folder, _BIG).add_bytes(_data(8, 1000))
    (folder / ref.root.hex()).write_bytes(bytes(1000))
    again = BlobStore(folder, _BIG)
    assert again.read_chunk(ref.root, 0) is None
    assert not again.is_whole(ref.root) and again.used_bytes == 0


def test_garbage_in_the_folder_is_removed(folder: Path) -> None:
    ref = BlobStore(folder, _BIG).add_bytes(b"good")
    for name in ("noise", f".{ref.root.hex()}.1.tmp", f"{'a' * 64}.part", f"{'b' * 64}.map", f"{'c' * 64}.old"):
        (folder / name).write_bytes(b"junk")
    assert BlobStore(folder, _BIG).refs() == (ref,)
    assert [path.name for path in folder.iterdir()] == [ref.root.hex()]


def test_the_quota_holds_and_the_least_recently_used_goes_first(folder: Path) -> None:
    store = BlobStore(folder, 1000)
    refs = [store.add_bytes(_data(number, 300)) for number in range(3)]
    store.read_chunk(refs[0].root, 0)
    fourth = store.add_bytes(_data(9, 300))
    assert [store.is_whole(ref.root) for ref in refs] == [True, False, True] and store.is_whole(fourth.root)
    store.set_pins(ref.root for ref in (refs[0], refs[2], fourth))
    with pytest.raises(QuotaFull):
        store.add_bytes(_data(10, 300))
    with pytest.raises(QuotaFull):
        store.begin(blob_ref(_data(11, 200)))
    assert store.used_bytes == 900 and {path.stat().st_size for path in folder.iterdir()} == {300}
    store.set_pins([fourth.root])
    store.add_bytes(_data(12, 700))
    assert store.used_bytes == 1000 and store.is_whole(fourth.root)
    with pytest.raises(QuotaFull):
        store.add_bytes(_data(13, 1001))


def test_a_partial_blob_counts_in_full_and_gives_way(folder: Path) -> None:
    data = _data(14, 2 * CHUNK_BYTES)
    store = BlobStore(folder, 3 * CHUNK_BYTES)
    ref = blob_ref(data)
    store.put_chunk(ref, 0, _chunk(data, 0))
    assert store.used_bytes == 2 * CHUNK_BYTES
    store.set_pins([ref.root])
    with pytest.raises(QuotaFull):
        store.add_bytes(_data(15, 2 * CHUNK_BYTES))
    # a blob that arrives whole takes the place of its own part
    assert store.add_bytes(data) == ref and store.used_bytes == 2 * CHUNK_BYTES
    assert store.parts() == ()


def test_the_order_of_use_survives_a_restart(folder: Path) -> None:
    store = BlobStore(folder, _BIG)
    refs = [store.add_bytes(_data(number, 100)) for number in range(3)]
    for second, ref in enumerate((refs[1], refs[2], refs[0])):
        os.utime(folder / ref.root.hex(), (1000 + second, 1000 + second))
    again = BlobStore(folder, 300)
    again.add_bytes(_data(20, 100))
    assert not again.is_whole(refs[1].root) and again.is_whole(refs[0].root)


def test_dropping_forgets_everything(folder: Path) -> None:
    store = BlobStore(folder, _BIG)
    whole = store.add_bytes(b"whole")
    part = blob_ref(_data(16, 2 * CHUNK_BYTES))
    store.put_chunk(part, 0, _data(16, 2 * CHUNK_BYTES)[:CHUNK_BYTES])
    for root in (whole.root, part.root, bytes(32)):
        store.drop(root)
    assert list(folder.iterdir()) == [] and store.used_bytes == 0


def test_files_that_somebody_removed_are_noticed_and_come_back(folder: Path) -> None:
    store = BlobStore(folder, 300)
    kept, lost = store.add_bytes(_data(1, 100)), store.add_bytes(_data(2, 100))
    store.set_pins([lost.root])
    part_data = _data(3, 2 * CHUNK_BYTES)
    (folder / lost.root.hex()).unlink()
    assert store.find_lost() == (lost.root,)
    assert store.find_lost() == () and store.refs() == (kept,)
    # it is pinned again when it is back
    assert store.add_bytes(_data(2, 100)) == lost
    store.add_bytes(_data(4, 200))
    assert store.is_whole(lost.root) and not store.is_whole(kept.root)

    store = BlobStore(folder, _BIG)
    part = blob_ref(part_data)
    store.put_chunk(part, 0, _chunk(part_data, 0))
    shutil.rmtree(folder)
    assert set(store.find_lost()) >= {lost.root, part.root} and folder.is_dir()
    assert store.used_bytes == 0
    assert not store.put_chunk(part, 0, _chunk(part_data, 0)) and store.put_chunk(part, 1, _chunk(part_data, 1))
    assert store.read_chunk(part.root, 1) == _chunk(part_data, 1)


def test_a_removed_folder_is_made_again_by_what_is_written_next(folder: Path) -> None:
    def lose() -> BlobStore:
        store = BlobStore(folder, _BIG)
        shutil.rmtree(folder)
        return store

    data, made = _data(1, 100), folder.parent / "made"
    made.write_bytes(data)
    ref = BlobStore(folder, _BIG).add_bytes(data)
    assert lose().hashes(ref.root) is None and lose().path(ref.root) is None
    assert lose().add_file(made) == ref
    assert (folder / ref.root.hex()).read_bytes() == data
    assert lose().add_bytes(data) == ref
    assert lose().put_chunk(ref, 0, data)
    # what came before is gone with it: the blob must not be put together from a hole and the rest
    part_data = _data(3, 2 * CHUNK_BYTES)
    part, hashes = blob_ref(part_data), chunk_hashes(part_data)
    store = BlobStore(folder, _BIG)
    store.begin(part, hashes)
    store.put_chunk(part, 0, _chunk(part_data, 0))
    shutil.rmtree(folder)
    with pytest.raises(RefuseFrame, match="gone from the disk"):
        store.put_chunk(part, 1, _chunk(part_data, 1))


def test_a_removed_state_directory_is_named(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "state" / "blobs", _BIG)
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(BadInput, match=f"there is no folder {tmp_path / 'state'} "):
        store.add_bytes(b"more")


_FILL = """
import resource, sys
from pathlib import Path
from tscale.node.blobs import BlobStore
from tscale.protocol.errors import DiskFull
store = BlobStore(Path(sys.argv[1]), 1 << 40)
kept = store.add_bytes(bytes(1000))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    store.add_bytes(bytes(100_000))
except DiskFull as error:
    assert store.refs() == (kept,)
    sys.exit(error.exit_code)
"""


def test_a_full_disk_is_reported_and_keeps_what_is_there(folder: Path) -> None:
    if os.name != "posix":
        pytest.skip("needs setrlimit")
    assert subprocess.run([sys.executable, "-c", _FILL, str(folder)], check=False).returncode == DiskFull.exit_code
    assert BlobStore(folder, _BIG).refs() == (blob_ref(bytes(1000)),)


_GATHER = """
import sys
from pathlib import Path
from tscale.node.blobs import BlobStore
from tscale.protocol.hashing import CHUNK_BYTES, blob_ref, chunk_hashes
data = b"".join(bytes([number]) * CHUNK_BYTES for number in range(24))
ref = blob_ref(data)
store = BlobStore(Path(sys.argv[1]), 1 << 40)
store.begin(ref, chunk_hashes(data))
for index in range(24):
    if index not in store.have(ref.root):
        sys.stdin.read(1)
        store.put_chunk(ref, index, data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
        print(index, flush=True)
"""


def test_kill_9_while_gathering_loses_at_most_the_chunk_under_way(folder: Path) -> None:
    rng = random.Random(3)
    data = b"".join(bytes([number]) * CHUNK_BYTES for number in range(24))
    ref = blob_ref(data)
    said: set[int] = set()
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", _GATHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as run:
            assert run.stdin is not None and run.stdout is not None
            chunks = rng.randint(1, 4)
            # one more than is waited for: the kill comes while that one is being written
            run.stdin.write("." * (chunks + 1))
            run.stdin.flush()
            for _ in range(chunks):
                said.add(int(run.stdout.readline()))
            run.kill()
            said |= {int(line) for line in run.stdout.read().split()}
        have = BlobStore(folder, _BIG).have(ref.root)
        assert said <= have and len(have) <= len(said) + 1
        said |= have
    assert len(said) < 24
    subprocess.run([sys.executable, "-c", _GATHER, str(folder)], check=True, input=b"." * 24, stdout=subprocess.DEVNULL)
    found = BlobStore(folder, _BIG).path(ref.root)
    assert found is not None and found.read_bytes() == data
