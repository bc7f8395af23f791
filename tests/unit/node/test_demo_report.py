"""The demo's verdict from the nodes' own records: what counts as agreement, and what makes it fail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tscale.kernels.init import init_state
from tscale.node.checkpoint import save_checkpoint
from tscale.node.demo import Watch, fresh_spec
from tscale.node.demo_report import (
    DemoFacts,
    FoldLine,
    ModelFacts,
    build_report,
    compare_rounds,
    generate_sample,
    measure_model,
    read_rounds,
    settled,
)
from tscale.node.specs import file_ref, shipped_book_path
from tscale.node.worker.kernel_config import kernel_config
from tscale.protocol.errors import BadInput, DamagedState
from tscale.protocol.presets import preset
from tscale.protocol.spec import NO_OWNER, SwarmSpec

GOOD = ModelFacts(3.2, 1.7, 600_000, "The whale is a fish.")


def fold(number: int, manifest: str = "m", state: str = "s") -> FoldLine:
    return FoldLine(number, f"{manifest}{number}", f"{state}{number}", 1000 * (number + 1))


def folds(numbers: range, **kwargs: str) -> dict[int, FoldLine]:
    return {number: fold(number, **kwargs) for number in numbers}


def line(number: int, state: str) -> str:
    entry = {"round": number, "manifest": "m", "state": state, "parent": "p", "contributors": 3}
    return json.dumps({**entry, "tokens_total": 5, "unix_s": 1.0}) + "\n"


def facts(rounds: Mapping[str, Mapping[int, FoldLine]], problems: tuple[str, ...] = ()) -> DemoFacts:
    return DemoFacts(
        spec=fresh_spec(7, 1_800_000_000.0),
        rounds=rounds,
        live=("node-1", "node-2", "node-4"),
        killed="node-3",
        joiner="node-4",
        judged_round=11,
        peers_max=4,
        bits_per_parameter=0.47,
        seconds=61.23,
        problems=problems,
    )


def good_rounds() -> dict[str, dict[int, FoldLine]]:
    return {
        "node-1": folds(range(12)),
        "node-2": folds(range(12)),
        "node-3": folds(range(5)),
        "node-4": folds(range(7, 12)),
    }


def test_rounds_file_later_line_replaces_and_cut_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text(line(0, "aa") + line(1, "bb") + line(1, "cc") + line(2, "dd")[:-5])
    assert {number: found.state for number, found in read_rounds(path).items()} == {0: "aa", 1: "cc"}
    assert read_rounds(tmp_path / "missing.jsonl") == {}


def test_rounds_file_with_a_broken_line_inside_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text("{broken\n" + line(0, "aa"))
    with pytest.raises(ValueError, match="Expecting"):
        read_rounds(path)


def test_everything_held_is_ok() -> None:
    report = build_report(facts(good_rounds()), GOOD)
    assert report.ok
    assert report.failures == ()
    assert report.digests_equal
    # node-2 shares 12 rounds with node-1, node-3 4 (its last one may be on a dead branch), node-4 5
    assert report.digests_compared == 12 + 4 + 5
    assert (report.rounds, report.tokens, report.peers_max) == (12, 12_000, 4)
    parsed = json.loads(report.to_json())
    assert parsed["sample"] == "The whale is a fish."
    assert parsed["loss_last"] == 1.7


def test_one_different_state_is_found() -> None:
    rounds = good_rounds()
    rounds["node-4"][9] = fold(9, state="x")
    report = build_report(facts(rounds), GOOD)
    assert not report.ok
    assert not report.digests_equal
    assert report.failures == ("round 9: node-4 and node-1 have different states after the same manifest",)


def test_different_manifests_are_found_and_named() -> None:
    _, differences = compare_rounds({"a": folds(range(3)), "b": folds(range(3), manifest="n")})
    assert differences == [f"round {number}: b and a folded different manifests" for number in range(3)]


def test_rounds_that_were_not_settled_when_the_nodes_were_stopped_are_not_judged() -> None:
    rounds = good_rounds()
    rounds["node-1"][12] = fold(12, manifest="one side")
    rounds["node-2"][12] = fold(12, manifest="other side")
    report = build_report(facts(rounds), GOOD)
    assert report.ok
    assert report.rounds == 12


def test_rounds_that_only_one_node_folded_compare_nothing() -> None:
    compared, differences = compare_rounds({"a": folds(range(3)), "b": folds(range(3, 6))})
    assert (compared, differences) == (0, [])
    report = build_report(facts({name: {} for name in good_rounds()}), GOOD)
    assert not report.digests_equal
    assert not report.ok


def test_killed_node_may_differ_in_its_last_round_only() -> None:
    rounds = good_rounds()
    rounds["node-3"][4] = fold(4, manifest="other")
    assert build_report(facts(rounds), GOOD).ok
    rounds["node-3"][3] = fold(3, manifest="other")
    assert not build_report(facts(rounds), GOOD).ok
    assert settled({}) == {}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"node-3": {}}, "node-3 folded no round"),
        ({"node-4": {}}, "node-4 folded no round"),
        ({"node-2": {}}, "node-2 folded no round"),
        ({"node-2": folds(range(9))}, "node-2 stayed behind: its last fold is round 8, the newest one is round 11"),
    ],
)
def test_a_node_that_did_not_take_part_is_a_failure(change: dict[str, dict[int, FoldLine]], expected: str) -> None:
    report = build_report(facts({**good_rounds(), **change}), GOOD)
    assert expected in report.failures


@pytest.mark.parametrize("loss_last", [1.77, float("nan")])
def test_a_loss_that_did_not_fall_far_enough_is_a_failure(loss_last: float) -> None:
    report = build_report(facts(good_rounds()), ModelFacts(3.2, loss_last, 1, ""))
    assert len(report.failures) == 1
    assert report.failures[0].startswith("the held-out loss fell from 3.200")


def test_the_limit_itself_is_enough() -> None:
    assert build_report(facts(good_rounds()), ModelFacts(2.0, 1.1, 1, "")).ok


def test_no_checkpoint_and_problems_on_the_way_are_failures() -> None:
    report = build_report(facts(good_rounds(), problems=("process 17 is still there",)), None)
    assert report.failures == ("process 17 is still there", "no node left a checkpoint that can be read")
    assert report.loss_last is None


def test_fresh_spec_follows_its_seed_and_start() -> None:
    spec = fresh_spec(7, 1_800_000_000.4)
    assert (spec.seed, spec.rounds.t0_unix_s) == (7, 1_800_000_000.0)
    assert spec.swarm_id == fresh_spec(7, 1_800_000_000.0).swarm_id
    assert spec.swarm_id != fresh_spec(8, 1_800_000_000.0).swarm_id


@pytest.fixture(scope="module")
def tiny_spec() -> SwarmSpec:
    return preset("nano", data=(file_ref(shipped_book_path()),), owner=NO_OWNER, t0_unix_s=1_800_000_000.0)


def leave_checkpoint(swarm_dir: Path, spec: SwarmSpec, round_number: int, scale: float) -> np.ndarray:
    """What a node leaves behind: its spec, and a worker's checkpoint whose state is the initial one times `scale`."""
    anchor = init_state(kernel_config(spec).model, spec.seed) * np.float32(scale)
    swarm_dir.mkdir(exist_ok=True)
    (swarm_dir / "spec.bin").write_bytes(spec.to_bytes())
    save_checkpoint(swarm_dir / "checkpoint", {"head/anchor": anchor}, {"head": {"round": round_number}})
    return anchor


def test_newest_checkpoint_is_measured_against_the_initial_state(tmp_path: Path, tiny_spec: SwarmSpec) -> None:
    leave_checkpoint(tmp_path / "a", tiny_spec, 7, 0.5)
    leave_checkpoint(tmp_path / "b", tiny_spec, 9, 1.0)
    model = measure_model([tmp_path / "a", tmp_path / "b", tmp_path / "none"], tiny_spec)
    assert model is not None
    assert model.loss_last == model.loss_first
    assert 2.0 < model.loss_first < 8.0
    leave_checkpoint(tmp_path / "a", tiny_spec, 11, 0.5)
    newer = measure_model([tmp_path / "a", tmp_path / "b"], tiny_spec)
    assert newer is not None
    assert newer.loss_first == model.loss_first
    assert newer.loss_last != model.loss_first
    assert newer.parameters == model.parameters > 10_000


def test_damaged_and_missing_checkpoints_are_passed_over(tmp_path: Path, tiny_spec: SwarmSpec) -> None:
    leave_checkpoint(tmp_path / "a", tiny_spec, 7, 1.0)
    for path in (tmp_path / "a" / "checkpoint").iterdir():
        path.write_bytes(b"damaged")
    assert measure_model([tmp_path / "a", tmp_path / "none"], tiny_spec) is None
    with pytest.raises(DamagedState):
        generate_sample(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(BadInput, match="no checkpoint yet"):
        generate_sample(tmp_path / "b")


def test_sample_is_text_and_the_same_every_time(tmp_path: Path, tiny_spec: SwarmSpec) -> None:
    leave_checkpoint(tmp_path / "a", tiny_spec, 7, 1.0)
    sample = generate_sample(tmp_path / "a")
    assert sample.startswith("The whale ")
    assert len(sample) > 60
    assert generate_sample(tmp_path / "a") == sample


def test_bits_per_parameter_need_contributions_that_travelled() -> None:
    assert Watch().bits_per_parameter() is None
