"""`create`: the same command finds its swarm again, and what it says and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.fake_daemon import FakeDaemon
from tscale.node.cli.app import run_command
from tscale.node.instances import find_folders

pytestmark = pytest.mark.usefixtures("own_places")


def test_create_resumes_the_same_swarm_and_new_makes_another(
    daemon: FakeDaemon, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["create", "--name", "ours", "--data", str(book)]
    assert run_command(argv) == 0
    first = daemon.options
    assert first.spec.name == "ours"
    assert first.dataset_files == (book,)
    assert first.spec.data.shards[0].size_bytes == book.stat().st_size
    assert run_command(argv) == 0
    assert daemon.options.spec == first.spec
    assert daemon.options.swarm_dir == first.swarm_dir
    out = capsys.readouterr().out
    assert f"created swarm {first.swarm_id}" in out
    assert f"resuming swarm {first.swarm_id}" in out
    assert run_command([*argv, "--new"]) == 0
    assert daemon.options.swarm_id != first.swarm_id
    assert run_command([*argv, "--round-seconds", "30"]) == 0
    assert daemon.options.spec.rounds.length_s == 30.0
    assert len(find_folders(tmp_path / "XDG_DATA_HOME" / "tscale", None)) == 3


def test_create_tells_why_a_name_gives_another_swarm_and_how_to_get_back(
    daemon: FakeDaemon, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["create", "--name", "ours", "--data", str(book)]
    assert run_command(argv) == 0
    first = daemon.options.swarm_id
    assert capsys.readouterr().err == ""
    before, text = first, book.read_text()
    book.write_text(text + "And one more line.")
    assert run_command(argv) == 0
    told = capsys.readouterr().err
    back = f"; to go on with the old one: tscale-node join --swarm {before}\n"
    assert told.startswith(f"another text makes another swarm: {book} (hash ") and told.endswith(back)
    assert told.count("\n") == 1 and daemon.options.swarm_id != first
    book.write_text(text)
    assert run_command(argv) == 0
    assert daemon.options.swarm_id == first and capsys.readouterr().err == ""
    assert run_command([*argv, "--round-seconds", "30"]) == 0
    assert capsys.readouterr().err.startswith("other settings than before make another swarm; ")
    (tmp_path / "more.txt").write_text(text[::-1])
    assert run_command([*argv, str(tmp_path / "more.txt")]) == 0
    assert capsys.readouterr().err.startswith("2 instead of 1 files make another swarm; ")
    assert run_command([*argv, "--new"]) == 0 and capsys.readouterr().err == ""
    assert run_command(["join", "--swarm", first]) == 0
    assert daemon.options.spec.data.shards[0].size_bytes == len(text)


def test_create_keeps_the_owners_key_private(daemon: FakeDaemon, book: Path) -> None:
    assert run_command(["create", "--name", "ours", "--data", str(book)]) == 0
    key = daemon.options.swarm_dir / "owner.key"
    assert key.stat().st_mode & 0o777 == 0o600


def test_create_no_run_prints_a_spec_file_that_join_takes(
    daemon: FakeDaemon, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("More text. " * 50)
    argv = ["create", "--name", "ours", "--data", str(book), str(other), "--preset", "nano", "--no-run", "--json"]
    assert run_command(argv) == 0
    made = json.loads(capsys.readouterr().out)
    assert daemon.options is None
    assert run_command(["join", "--swarm", made["spec_file"], "--data", str(book), "--data", str(other)]) == 0
    assert daemon.options.swarm_id == made["swarm_id"]
    assert daemon.options.dataset_files == (book, other)
    assert [shard.size_bytes for shard in daemon.options.spec.data.shards] == [
        book.stat().st_size,
        other.stat().st_size,
    ]
