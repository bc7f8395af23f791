"""Status files: missing, old, half-written, hostile, several; and which node the page shows by itself."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tscale.dashboard.source import MAX_SOURCES, STALE_AFTER_S, SourceSet, SourceState, StatusFile
from tscale.protocol.status import MAX_STATUS_BYTES

EXAMPLE = json.loads((Path(__file__).parents[2] / "helpers" / "status_example.json").read_text(encoding="utf-8"))
NOW = float(EXAMPLE["updated_unix_s"])


def write(path: Path, **changes: Any) -> dict[str, Any]:
    """Write the example with `changes` (`node__role` is a field of a field) by renaming, as a node does."""
    plain = copy.deepcopy(EXAMPLE)
    for name, value in changes.items():
        *parents, last = name.split("__")
        target = plain
        for parent in parents:
            target = target[parent]
        target[last] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(plain), encoding="utf-8")
    part.replace(path)
    return plain


def poll_once(path: Path, now: float = NOW) -> SourceState:
    return StatusFile(path).poll(now, 100.0)


def test_a_good_file_is_shown_without_addresses_and_paths(tmp_path: Path) -> None:
    write(tmp_path / "status.json")
    state = poll_once(tmp_path / "status.json", NOW + 1.5)
    assert state.snapshot is not None
    assert (state.problem, state.fresh, state.label) == ("", True, "ahab")
    assert state.age_s == pytest.approx(1.5)
    assert state.snapshot.node.addrs == ()
    assert state.snapshot.node.state_dir == ""
    assert state.snapshot.node.pid == 0
    assert len(state.snapshot.training.history) == len(EXAMPLE["training"]["history"])
    assert "192.0.2.7" not in state.snapshot.to_json()


def test_a_missing_file_is_a_plain_sentence_and_is_picked_up_later(tmp_path: Path) -> None:
    file = StatusFile(tmp_path / "status.json")
    before = file.poll(NOW, 0.0)
    assert before.snapshot is None
    assert before.problem == "There is no status file. Is the node running?"
    write(tmp_path / "status.json")
    after = file.poll(NOW, 1.0)
    assert after.problem == ""
    assert after.revision > before.revision


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b'{"schema": 1}',
        b'{"schema": 2}',
        b"[" * 100_000,
        b'{"a": ' * 50_000,
        b'{"schema": ' + b"9" * 5_000 + b"}",
        b'{"schema": NaN}',
    ],
)
def test_hostile_content_never_raises_and_says_what_is_wrong(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(content)
    state = poll_once(path)
    assert state.snapshot is None
    assert state.problem.startswith("The status file can't be used: ")
    assert len(state.problem) < 250


def test_an_example_with_any_one_byte_cut_off_is_refused_or_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    whole = json.dumps(EXAMPLE).encode()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        assert poll_once(path).snapshot is None


def test_a_half_written_file_leaves_the_last_good_one_in_view(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    plain = write(path)
    file = StatusFile(path)
    good = file.poll(NOW, 0.0)
    path.write_text(json.dumps(plain)[:500], encoding="utf-8")
    bad = file.poll(NOW + 1, 1.0)
    assert bad.snapshot == good.snapshot
    assert bad.problem.endswith("Showing the last good one.")
    assert file.poll(NOW + 2, 2.0).problem == bad.problem
    write(path)
    assert file.poll(NOW + 3, 3.0).problem == ""


def test_an_oversized_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_bytes(b" " * (MAX_STATUS_BYTES + 1))
    file = StatusFile(path)
    assert file.poll(NOW, 0.0).problem == "The status file is longer than 4 MiB and was not read."
    assert file.poll(NOW, 1.0).problem == "The status file is longer than 4 MiB and was not read."


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_or_a_folder_in_its_place_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "status.json")
    assert poll_once(tmp_path / "status.json").problem == "The status file is not a regular file."
    (tmp_path / "folder.json").mkdir()
    assert poll_once(tmp_path / "folder.json").problem == "The status file is not a regular file."


def test_an_old_status_is_not_fresh(tmp_path: Path) -> None:
    write(tmp_path / "status.json")
    file = StatusFile(tmp_path / "status.json")
    assert file.poll(NOW + STALE_AFTER_S, 0.0).fresh
    late = file.poll(NOW + STALE_AFTER_S + 2, 12.0)
    assert not late.fresh
    assert late.age_s == pytest.approx(12.0)


def test_a_writer_with_a_fast_clock_does_not_look_fresh_for_ever(tmp_path: Path) -> None:
    write(tmp_path / "status.json", updated_unix_s=NOW + 10_000)
    file = StatusFile(tmp_path / "status.json")
    assert file.poll(NOW, 50.0).age_s == pytest.approx(0.0)
    later = file.poll(NOW + 60, 110.0)
    assert later.age_s == pytest.approx(60.0)
    assert not later.fresh


def test_only_a_changed_history_counts_as_one(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write(path)
    file = StatusFile(path)
    first = file.poll(NOW, 0.0)
    write(path, updated_unix_s=NOW + 1)
    second = file.poll(NOW + 1, 1.0)
    assert second.revision == first.revision + 1
    assert second.history_revision == first.history_revision
    write(path, training__history=EXAMPLE["training"]["history"][:-1])
    assert file.poll(NOW + 2, 2.0).history_revision == first.history_revision + 1
    assert file.poll(NOW + 3, 3.0).revision == second.revision + 1


def test_folders_are_searched_at_every_depth_a_node_may_have(tmp_path: Path) -> None:
    own = tmp_path / "own"
    write(own / "status.json", swarm_id="a")
    write(own / "blobs" / "status.json", swarm_id="not a node's")
    write(tmp_path / "state" / "swarm-b" / "status.json", swarm_id="b")
    write(tmp_path / "demo" / "node0" / "swarm-c" / "status.json", swarm_id="c")
    write(tmp_path / "demo" / "node1" / "swarm-c" / "status.json", swarm_id="c")
    states = SourceSet([own, tmp_path / "state", tmp_path / "demo", tmp_path / "none"]).poll(NOW, 0.0)
    assert [state.snapshot.swarm_id for state in states if state.snapshot] == ["a", "b", "c", "c"]
    assert len({state.source_id for state in states}) == 4
    assert states[0].label == "whales / ahab"


def test_a_node_that_starts_later_is_found(tmp_path: Path) -> None:
    sources = SourceSet([tmp_path / "demo"])
    assert sources.poll(NOW, 0.0) == ()
    write(tmp_path / "demo" / "node0" / "swarm" / "status.json")
    assert sources.poll(NOW, 1.0) == ()
    assert len(sources.poll(NOW, 2.0)) == 1


def test_the_number_of_sources_is_capped(tmp_path: Path) -> None:
    for number in range(MAX_SOURCES + 6):
        write(tmp_path / f"n{number:03}" / "status.json")
    assert len(SourceSet([tmp_path]).poll(NOW, 0.0)) == MAX_SOURCES


def test_the_page_shows_a_fresh_trainer_and_stays_with_it(tmp_path: Path) -> None:
    paths = [tmp_path / name / "status.json" for name in ("seed", "first", "second")]
    write(paths[0], node__role="seed")
    sources = SourceSet([tmp_path / name for name in ("seed", "first", "second")])

    def chosen(now: float, mono: float) -> int:
        state = sources.choose(sources.poll(now, mono))
        assert state is not None
        return [StatusFile(path).source_id for path in paths].index(state.source_id)

    assert chosen(NOW, 0.0) == 0
    write(paths[2])
    assert chosen(NOW, 3.0) == 2
    write(paths[1])
    assert chosen(NOW, 6.0) == 2
    write(paths[2], activity="stopped")
    assert chosen(NOW, 7.0) == 1
    assert SourceSet([]).choose(()) is None
