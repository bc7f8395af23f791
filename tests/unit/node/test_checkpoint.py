"""Checkpoints: exact, atomic, and the previous good one when the newest is damaged."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from tscale.node.checkpoint import MAGIC, Arrays, load_checkpoint, save_checkpoint
from tscale.node.statedir import open_private
from tscale.protocol.errors import DamagedState, DiskFull


def _arrays(number: int) -> Arrays:
    rng = np.random.default_rng(number)
    return {
        "anchor": rng.standard_normal(5000).astype(np.float32),
        "momentum/ü": rng.standard_normal((3, 7)),
        "counts": rng.integers(0, 1 << 40, 256),
        "half": rng.standard_normal(9).astype(np.float16),
        "flags": rng.integers(0, 2, 5).astype(bool),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 4), np.float32),
        "odd": np.array([np.nan, -0.0, np.inf], np.float32),
    }


def _assert_same(got: Arrays, number: int) -> None:
    expected = _arrays(number)
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes()


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "Jörg 測試"
    assert load_checkpoint(folder) is None
    save_checkpoint(folder, _arrays(1), {"round": 7, "manifest": "ab" * 32, "nested": {"x": [1.5, None]}})
    arrays, meta, note = load_checkpoint(folder) or pytest.fail("nothing there")
    _assert_same(arrays, 1)
    assert meta == {"round": 7, "manifest": "ab" * 32, "nested": {"x": [1.5, None]}} and note is None
    arrays["anchor"][0] = 1.0


def test_big_endian_and_strided_arrays_are_saved_by_value(tmp_path: Path) -> None:
    wide = np.arange(20, dtype=">f4").reshape(4, 5)
    save_checkpoint(tmp_path, {"wide": wide, "column": wide[:, 2]}, {})
    arrays, _, _ = load_checkpoint(tmp_path) or pytest.fail("nothing there")
    assert np.array_equal(arrays["wide"], wide) and arrays["wide"].dtype == np.dtype("<f4")
    assert arrays["column"].tolist() == [2.0, 7.0, 12.0, 17.0]


def test_two_are_kept_and_the_newest_is_used(tmp_path: Path) -> None:
    for number in range(5):
        save_checkpoint(tmp_path, _arrays(number), {"number": number})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checkpoint-000004.tsck", "checkpoint-000005.tsck"]
    arrays, meta, _ = load_checkpoint(tmp_path) or pytest.fail("nothing there")
    assert meta == {"number": 4}
    _assert_same(arrays, 4)


def _damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[len(data) // 2] ^= 1
    elif kind == "flip header":
        data[20] ^= 1
    elif kind == "flip hash":
        data[-1] ^= 1
    elif kind == "cut":
        del data[-100:]
    elif kind == "empty":
        data.clear()
    elif kind == "longer":
        data += b"\0"
    elif kind == "zeros":
        data[:] = bytes(len(data))
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["flip", "flip header", "flip hash", "cut", "empty", "longer", "zeros"])
def test_a_damaged_newest_gives_the_one_before_and_says_so(tmp_path: Path, kind: str) -> None:
    save_checkpoint(tmp_path, _arrays(1), {"number": 1})
    newest = save_checkpoint(tmp_path, _arrays(2), {"number": 2})
    _damage(newest, kind)
    arrays, meta, note = load_checkpoint(tmp_path) or pytest.fail("nothing there")
    _assert_same(arrays, 1)
    assert meta == {"number": 1}
    assert note is not None and newest.name in note and "checkpoint-000001.tsck" in note and "\n" not in note
    # the good one survives the next saves as the one to fall back to
    again = save_checkpoint(tmp_path, _arrays(3), {"number": 3})
    _damage(again, kind)
    fallen_back = load_checkpoint(tmp_path) or pytest.fail("nothing there")
    assert fallen_back.meta == {"number": 1}


def test_nothing_good_left_is_an_error_and_deletes_nothing(tmp_path: Path) -> None:
    for number in range(2):
        _damage(save_checkpoint(tmp_path, _arrays(number), {}), "flip")
    with pytest.raises(DamagedState) as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 6
    assert len(list(tmp_path.glob("checkpoint-*.tsck"))) == 2


@pytest.mark.parametrize(
    "header",
    [
        b'{"meta":{},"arrays":[{"name":"a","dtype":"<f4","shape":[1000000000000]}]}',
        b'{"meta":{},"arrays":[{"name":"a","dtype":"<f4","shape":[-1]}]}',
        b'{"meta":{},"arrays":[{"name":"a","dtype":"O","shape":[1]}]}',
        b'{"meta":{},"arrays":[{"name":"a","dtype":"<f4","shape":[true]}]}',
        b'{"meta":[],"arrays":[]}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_made_up_header_is_refused_before_anything_is_allocated(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "checkpoint-000001.tsck"
    path.write_bytes(MAGIC + len(header).to_bytes(4, "little") + header + bytes(36))
    with pytest.raises(DamagedState):
        load_checkpoint(tmp_path)
    path.write_bytes(MAGIC + b"\xff\xff\xff\xff" + header)
    with pytest.raises(DamagedState, match="header is too long"):
        load_checkpoint(tmp_path)


def test_arrays_that_would_need_pickle_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be saved"):
        save_checkpoint(tmp_path, {"a": np.array([object()])}, {})
    assert list(tmp_path.iterdir()) == []


class _Quota:
    """A disk with room for a number of bytes."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    def open(self, path: Path) -> BinaryIO:
        file = path.open("wb", buffering=0)
        real_write = file.write

        def write(data: bytes) -> int:
            if len(data) > self.room_bytes:
                real_write(data[: self.room_bytes])
                raise OSError(28, "No space left on device")
            self.room_bytes -= len(data)
            return real_write(data)

        class File:
            def __enter__(self) -> File:
                return self

            def __exit__(self, *unused: object) -> None:
                file.close()

            def flush(self) -> None:
                file.flush()

            def fileno(self) -> int:
                return file.fileno()

        opened = File()
        opened.write = write  # type: ignore[attr-defined]
        return opened  # type: ignore[return-value]


@pytest.mark.parametrize("room_bytes", [0, 100, 5_000, 20_000])
def test_a_full_disk_leaves_the_old_one_as_it_was(tmp_path: Path, room_bytes: int) -> None:
    save_checkpoint(tmp_path, _arrays(1), {"number": 1})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DiskFull) as caught:
        save_checkpoint(tmp_path, _arrays(2), {"number": 2}, opener=_Quota(room_bytes).open)
    assert caught.value.exit_code == 5 and "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save_checkpoint(tmp_path, _arrays(3), {"number": 3}, opener=_Quota(1 << 20).open)
    arrays, _, _ = load_checkpoint(tmp_path) or pytest.fail("nothing there")
    _assert_same(arrays, 3)


def test_dev_full_is_a_full_disk(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    save_checkpoint(tmp_path, _arrays(1), {})
    with pytest.raises(DiskFull):
        save_checkpoint(tmp_path, _arrays(2), {}, opener=lambda path: open_private(Path("/dev/full")))
    assert load_checkpoint(tmp_path) is not None


def test_a_disk_that_forgets_what_was_written_is_noticed_before_the_old_one_goes(tmp_path: Path) -> None:
    class Forgetful:
        def __init__(self, path: Path) -> None:
            self._file = path.open("wb")

        def __enter__(self) -> Forgetful:
            return self

        def __exit__(self, *unused: object) -> None:
            self._file.close()

        def write(self, data: bytes) -> int:
            return self._file.write(bytes(len(data)) if len(data) > 10_000 else data)

        def flush(self) -> None:
            self._file.flush()

        def fileno(self) -> int:
            return self._file.fileno()

    save_checkpoint(tmp_path, _arrays(1), {"number": 1})
    with pytest.raises(DamagedState, match="check the disk"):
        save_checkpoint(tmp_path, _arrays(2), {"number": 2}, opener=Forgetful)  # type: ignore[arg-type]
    found = load_checkpoint(tmp_path) or pytest.fail("nothing there")
    assert found.meta == {"number": 1} and found.note is None


_LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from tscale.node.checkpoint import save_checkpoint
from tscale.protocol.errors import DiskFull
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save_checkpoint(Path(sys.argv[1]), {"a": np.ones(100_000)}, {})
except DiskFull as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_real_limit_of_the_system_is_a_full_disk(tmp_path: Path) -> None:
    if os.name != "posix":
        pytest.skip("needs setrlimit")
    save_checkpoint(tmp_path, {"a": np.ones(3)}, {"number": 1})
    done = subprocess.run([sys.executable, "-c", _LIMITED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "no space left" in done.stdout
    found = load_checkpoint(tmp_path) or pytest.fail("nothing there")
    assert found.meta == {"number": 1} and found.note is None
    assert len(list(tmp_path.iterdir())) == 1


_SAVE_FOREVER = """
import sys
from pathlib import Path
import numpy as np
from tscale.node.checkpoint import save_checkpoint
number = int(sys.argv[2])
while True:
    number += 1
    save_checkpoint(Path(sys.argv[1]), {"a": np.full(200_000, number, np.float32)}, {"number": number})
    print(number, flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(5)
    number = 0
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", _SAVE_FOREVER, str(tmp_path), str(number)], stdout=subprocess.PIPE, text=True
        ) as saver:
            assert saver.stdout is not None
            for _ in range(rng.randint(1, 20)):
                number = int(saver.stdout.readline())
            saver.kill()
            rest = saver.stdout.read().split()
        number = int(rest[-1]) if rest else number
        arrays, meta, note = load_checkpoint(tmp_path) or pytest.fail("nothing there")
        # the saver may have finished one more without getting to say so
        assert meta["number"] in (number, number + 1) and note is None
        assert np.all(arrays["a"] == meta["number"])
        number = meta["number"]
