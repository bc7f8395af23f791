"""The screen: its counts spelled out, the twins to the bit, who is left out, who is made smaller, and who stays."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import fsum, isfinite, sqrt

import numpy as np
import pytest

from tscale.kernels import screen_fast
from tscale.kernels.codec import CodecError, Decoded, Rung, decode, encode
from tscale.kernels.fold import FoldPart, OuterRule, fold, fold_reference
from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.screen import (
    LARGEST,
    PASSES,
    Screened,
    Share,
    Verdict,
    judge,
    mean_weights,
    screen,
    screen_reference,
    warm_up,
)

# one tensor of more than a block of chunks, lengths that are no multiples of a chunk or a byte, and a small one
LAYOUT = Layout(
    (TensorSpec("a", (331, 411), "matrix"), TensorSpec("n", (33,), "small"), TensorSpec("b", (5003,), "embedding")),
    small_numel=64,
)
SPARSE, DENSE, EXACT = Rung(64), Rung(4096), Rung(4096, 32)
GAIN = 1.75


def progress(seed: int, scale: float = 0.01) -> np.ndarray:
    """What an honest peer has done: a part that all have in common, and as much again of its own."""
    common = np.random.default_rng(0).standard_normal(LAYOUT.numel)
    own = np.random.default_rng(seed).standard_normal(LAYOUT.numel)
    return ((common + own) * scale).astype(np.float32)


def share(values: np.ndarray, rung: Rung = SPARSE, tokens: float = 1000.0) -> Share:
    return Share(encode(values.copy(), LAYOUT, rung), tokens, GAIN)


def honest(count: int) -> list[Share]:
    return [share(progress(1 + number), tokens=700.0 + 100 * number) for number in range(count)]


def weights(screened: Screened) -> list[float]:
    return [part.weight for part in screened.parts]


def left_out(screened: Screened) -> list[int]:
    return [place for place, verdict in enumerate(screened.verdicts) if verdict.is_left_out]


def mixed(seed: int) -> list[Share]:
    """Contributions of all kinds, sizes and shares, in a random order; some are bad."""
    draw = np.random.default_rng(seed)
    rungs = [SPARSE, Rung(256), Rung(1024), DENSE, EXACT, SPARSE, Rung(512)]
    kinds = [1.0, -1.0, 30.0, 1.0, 0.01, 0.0, 1.0]
    made = [
        share(np.float32(draw.choice(kinds)) * progress(100 * seed + i), rung, float(draw.integers(1, 4000)) / 2)
        for i, rung in enumerate(rungs)
    ]
    return [made[place] for place in draw.permutation(len(made))]


@pytest.mark.parametrize("seed", range(6))
def test_twins_and_threads_agree_to_the_bit(seed: int) -> None:
    shares = mixed(seed)
    expected = screen_reference(shares, LAYOUT)
    anchor = progress(9)
    state = fold_reference(anchor, None, expected.parts, LAYOUT, OuterRule(1.0, 0.0))[0]
    for threads in (1, 2, 5):
        found = screen(shares, LAYOUT, threads)
        assert found.verdicts == expected.verdicts and weights(found) == weights(expected)
        assert fold(anchor, None, found.parts, LAYOUT, OuterRule(1.0, 0.0))[0].tobytes() == state.tobytes()


def test_the_mixed_ones_try_every_verdict() -> None:
    verdicts = [verdict for seed in range(6) for verdict in screen(mixed(seed), LAYOUT).verdicts]
    assert any(v.is_left_out for v in verdicts) and any(v.is_shrunk for v in verdicts)
    assert any(v.factor == 1.0 for v in verdicts) and any(v.size == 0.0 for v in verdicts)


LAYOUTS = {
    "all small": Layout((TensorSpec("n", (7,), "small"), TensorSpec("q", (3, 3), "matrix"))),
    "one value": Layout((TensorSpec("z", (1,), "matrix"),), small_numel=0),
    "blocks and a rest": Layout(
        (TensorSpec("a", (33 * 4096 + 9,), "matrix"), TensorSpec("b", (2,), "matrix")), small_numel=0
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_twins_agree_where_numbers_are_at_their_ends(name: str) -> None:
    """Nothing sent, zeros with a sign, subnormals, the largest numbers, equal ones, shares far below one token."""
    layout = LAYOUTS[name]
    own = np.random.default_rng(3).standard_normal(layout.numel).astype(np.float32)
    ends = [np.zeros_like(own), np.copysign(np.float32(0), own), own * np.float32(1e-41)]
    ends += [np.sign(own) * np.float32(3e38), own, own, -own, np.abs(own)]
    for rungs in ([EXACT], [SPARSE, EXACT, DENSE]):
        shares = [
            Share(encode(one.copy(), layout, rungs[i % len(rungs)]), [1000.0, 2.5, 1e-9, 2.0**40][i % 4], GAIN)
            for i, one in enumerate(ends)
        ]
        expected = screen_reference(shares, layout)
        found = screen(shares, layout, 3)
        assert found.verdicts == expected.verdicts and weights(found) == weights(expected)
        assert screen(shares[::-1], layout).verdicts == expected.verdicts[::-1]
        assert all(0.0 <= verdict.factor <= 1.0 and isfinite(verdict.size) for verdict in found.verdicts)


def test_equals_the_definition_value_by_value() -> None:
    rungs = [SPARSE, Rung(256), Rung(1024), DENSE, EXACT, SPARSE]
    shares = [share((-1 if i == 3 else 1) * progress(i + 1), rung, 90.0 * i + 50.4) for i, rung in enumerate(rungs)]
    dense = [decode(s.blob, LAYOUT).dense().astype(np.float64) for s in shares if isinstance(s.blob, bytes)]
    votes = [round(s.tokens) for s in shares]
    signs = [np.sign(values).astype(np.int64) for values in dense]
    chunked = np.ones(LAYOUT.numel, bool)
    chunked[LAYOUT.slices[1]] = False
    for number, verdict in enumerate(screen(shares, LAYOUT).verdicts):
        voters = [k for k in range(len(shares)) if k != number and (number == 3 or k != 3)]  # 3 went before the others
        others = sum(votes[k] * signs[k] for k in voters)
        sides = np.sign(others) * signs[number] * chunked
        assert (verdict.agree, verdict.against) == (int((sides > 0).sum()), int((sides < 0).sum()))
        assert verdict.is_left_out == (number == 3)
        size = sqrt(fsum(np.square(dense[number])) / shares[number].tokens)
        assert verdict.size == pytest.approx(size, rel=1e-14)


def test_the_sum_of_squares_is_what_the_root_mean_squares_say() -> None:
    for rung in (SPARSE, Rung(1024), DENSE, EXACT):
        decoded = decode(encode(progress(3), LAYOUT, rung), LAYOUT)
        numels = [tensor.numel for tensor in LAYOUT.tensors]
        assert decoded.sum_of_squares() == pytest.approx(float(np.square(decoded.rms()) @ numels), rel=1e-14)


def test_the_order_changes_no_verdict() -> None:
    shares = mixed(2)
    forward, backward = screen(shares, LAYOUT), screen(shares[::-1], LAYOUT)
    assert forward.verdicts == backward.verdicts[::-1]


@pytest.mark.parametrize("count", [3, 5, 10])
def test_honest_contributions_keep_their_weights_to_the_bit(count: int) -> None:
    shares = [replace(s, tokens=s.tokens * 0.37) for s in honest(count)]
    screened = screen(shares, LAYOUT)
    assert weights(screened) == [GAIN * mean for mean in mean_weights([one.tokens for one in shares])]
    assert all(verdict.factor == 1.0 and verdict.agree > verdict.against for verdict in screened.verdicts)


@pytest.mark.parametrize("rung", [SPARSE, DENSE])
@pytest.mark.parametrize("count", [4, 7, 10])
def test_a_contribution_turned_round_is_left_out_and_the_others_share_its_weight(count: int, rung: Rung) -> None:
    """Also a dense one, which speaks against every value of the sparse ones where nobody else speaks for it."""
    shares = honest(count)
    shares[1] = share(-progress(2), rung, shares[1].tokens)
    screened = screen(shares, LAYOUT)
    assert left_out(screened) == [1]
    kept = [one.tokens for place, one in enumerate(shares) if place != 1]
    assert weights(screened) == [GAIN * mean for mean in mean_weights(kept)]
    assert all(verdict.against < 5 for place, verdict in enumerate(screened.verdicts) if place != 1)


@pytest.mark.parametrize("bad", [2, 3])
def test_several_turned_round_go_one_after_the_other(bad: int) -> None:
    shares = honest(9)
    for place in range(bad):
        shares[place] = share(-progress(1 + place), SPARSE, shares[place].tokens)
    assert left_out(screen(shares, LAYOUT)) == list(range(bad))


def test_several_dense_ones_that_agree_among_sparse_ones_are_a_majority() -> None:
    """Where they speak nearly nobody else does: a limit, and then nobody is left out."""
    shares = honest(9)
    for place in range(2):
        shares[place] = share(-progress(1 + place), DENSE, shares[place].tokens)
    assert left_out(screen(shares, LAYOUT)) == []


def test_of_three_one_that_is_not_larger_than_the_others_is_left_out() -> None:
    shares = [share(progress(1)), share(-progress(2)), share(progress(3))]
    assert left_out(screen(shares, LAYOUT)) == [1]


@pytest.mark.parametrize("rung", [SPARSE, DENSE])
def test_one_ten_times_as_large_is_brought_to_the_bound(rung: Rung) -> None:
    shares = [share(progress(1 + i), rung) for i in range(5)]
    plain = screen(shares, LAYOUT)
    shares[2] = share(10 * progress(3), rung)
    screened = screen(shares, LAYOUT)
    median = sorted(verdict.size for verdict in screened.verdicts)[2]
    large = screened.verdicts[2]
    assert large.is_shrunk and large.factor == LARGEST * median / large.size and 0.15 < large.factor < 0.25
    assert weights(screened) == [w * (large.factor if i == 2 else 1.0) for i, w in enumerate(weights(plain))]


def test_values_at_random_places_are_not_seen() -> None:
    moved = progress(7)
    for place in (LAYOUT.slices[0], LAYOUT.slices[2]):
        moved[place] = np.random.default_rng(5).permutation(moved[place])
    screened = screen([*honest(5), share(moved)], LAYOUT)
    assert all(verdict.factor == 1.0 for verdict in screened.verdicts)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_are_not_judged(count: int) -> None:
    shares = [share(progress(1)), share(-100 * progress(1))][:count]
    screened = screen(shares, LAYOUT)
    assert screened.verdicts == (Verdict(),) * count
    assert weights(screened) == [GAIN * 0.5 if count == 2 else GAIN] * count


@pytest.mark.parametrize(("flipped", "out"), [(1, [0]), (2, []), (3, [3])])
def test_nobody_is_left_out_against_half_of_the_shares(flipped: int, out: list[int]) -> None:
    shares = [share((-1 if number < flipped else 1) * progress(1 + number)) for number in range(4)]
    screened = screen(shares, LAYOUT)
    assert left_out(screened) == out
    assert len(weights(screened)) == 4 - len(out)


def test_half_of_the_shares_counts_shares_not_heads() -> None:
    shares = honest(4)
    shares[1] = share(-progress(2), tokens=sum(one.tokens for one in shares) - shares[1].tokens)
    assert left_out(screen(shares, LAYOUT)) == []


def counted(*pairs: tuple[int, int]) -> Callable[[Sequence[int]], np.ndarray]:
    """The same counts, whoever still votes."""
    return lambda places: np.array(pairs, np.int64)[list(places)]


@pytest.mark.parametrize(
    ("agree", "against", "factor"),
    [(0, 16, 1.0), (0, 17, 0.0), (17, 0, 1.0), (84, 124, 1.0), (84, 159, 0.0), (10**12, 10**12 + 5 * 10**6, 1.0)],
)
def test_four_deviations_are_counted_in_integers(agree: int, against: int, factor: float) -> None:
    verdicts = judge([1, 1, 1], [1.0, 1.0, 1.0], counted((agree, against), (9, 0), (9, 0)))
    assert [verdict.factor for verdict in verdicts] == [factor, 1.0, 1.0]


@pytest.mark.parametrize(
    ("agree", "against", "factor"),
    [(32_000, 33_100, 0.0), (63 * 10**6, 65 * 10**6, 1.0), (63 * 10**6 - 1, 65 * 10**6 + 1, 0.0)],
)
def test_among_many_values_more_than_a_64th_has_to_be_against(agree: int, against: int, factor: float) -> None:
    """Another text can be a hair's breadth against the others; a whole contribution turned round is not that alike."""
    verdicts = judge([1, 1, 1], [1.0, 1.0, 1.0], counted((agree, against), (9, 0), (9, 0)))
    assert [verdict.factor for verdict in verdicts] == [factor, 1.0, 1.0]


@pytest.mark.parametrize(
    ("sizes", "factors"),
    [
        ([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]),
        ([1.0, 2.0, 8.0], [1.0, 1.0, 0.5]),
        ([1.0, 2.0, 3.0, 8.0], [1.0, 1.0, 1.0, 0.5]),  # the lower median
        ([0.0, 0.0, 0.0, 1.0, 2.0, 8.0], [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]),  # who sends nothing sets no bound
        ([0.0, 1.0, 20.0], [1.0, 1.0, 1.0]),  # of two nobody knows which is wrong
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
    ],
)
def test_the_bound_is_two_lower_medians(sizes: list[float], factors: list[float]) -> None:
    verdicts = judge([1] * len(sizes), sizes, counted(*[(9, 0)] * len(sizes)))
    assert [verdict.factor for verdict in verdicts] == factors


def test_the_bound_is_that_of_the_kept_ones() -> None:
    counts = counted((0, 99), (9, 0), (9, 0), (9, 0))
    assert [v.factor for v in judge([1] * 4, [0.001, 1.0, 1.0, 8.0], counts)] == [0.0, 1.0, 1.0, 0.25]
    assert [v.factor for v in judge([1] * 3, [1.0, 1.0, 20.0], counts)] == [0.0, 1.0, 1.0], "two are left"


def test_many_small_ones_do_not_move_the_bound() -> None:
    sizes, votes = [1.0] * 4 + [0.001] * 20, [100] * 4 + [1] * 20
    verdicts = judge(votes, sizes, counted(*[(9, 0)] * len(sizes)))
    assert {verdict.factor for verdict in verdicts} == {1.0}
    assert judge([100] * 4 + [80] * 6, [1.0] * 4 + [0.001] * 6, counted(*[(9, 0)] * 10))[0].factor < 0.01


def test_what_has_a_64th_of_the_median_share_is_not_worth_a_pass() -> None:
    asked: list[int] = []

    def count(places: Sequence[int]) -> np.ndarray:
        asked.append(len(places))
        return np.array([(9, 0) if place < 5 else (0, 99) for place in places])

    assert {verdict.factor for verdict in judge([640] * 5 + [9] * 4, [1.0] * 9, count)} == {1.0}
    assert asked == [9]
    assert [v.factor for v in judge([640] * 5 + [10], [1.0] * 6, count)] == [1.0] * 5 + [0.0]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 49, 200])
@pytest.mark.parametrize("tokens", [1.0, 0.1, 2560.0, 5e-324, 1e15])
def test_the_weights_of_equal_shares_are_one_nth_to_the_bit(count: int, tokens: float) -> None:
    assert mean_weights([tokens] * count) == [1 / count] * count


def test_weights_are_as_the_roots_and_as_large_together_as_with_the_shares() -> None:
    shares = [16.0, 12.0, 8.0, 4.0, 0.25]
    means = mean_weights(shares)
    assert [mean / means[0] for mean in means] == pytest.approx([sqrt(share / 16) for share in shares], rel=1e-14)
    applied = sum(mean * share for mean, share in zip(means, shares, strict=True))
    assert applied == pytest.approx(sum(share * share for share in shares) / sum(shares), rel=1e-14)
    assert mean_weights([1024 * share for share in shares]) == means
    assert mean_weights([5e-324, 1e15]) == [0.0, 1.0] and mean_weights([]) == []


def test_of_two_that_are_left_nobody_goes() -> None:
    """The second one would make it half of the shares, and the first one would be back."""
    verdicts = judge([1] * 3, [1.0] * 3, counted((0, 99), (0, 50), (9, 0)))
    assert [verdict.factor for verdict in verdicts] == [0.0, 1.0, 1.0]


def test_where_no_majority_can_be_told_the_counts_are_those_among_all() -> None:
    among = {4: [(0, 99), (5, 3), (5, 2), (5, 1)], 3: [(0, 98), (9, 9), (9, 8)]}

    def count(places: Sequence[int]) -> np.ndarray:
        return np.array(among[len(places)], np.int64)

    verdicts = judge([1] * 4, [1.0] * 4, count)
    assert [(verdict.agree, verdict.against) for verdict in verdicts] == among[4]
    assert all(verdict.factor == 1.0 for verdict in verdicts)


def test_a_share_below_one_token_is_a_vote() -> None:
    shares = [share((-1 if number == 1 else 1) * progress(1 + number), tokens=0.25) for number in range(5)]
    screened = screen(shares, LAYOUT)
    assert left_out(screened) == [1]
    assert weights(screened) == [GAIN * 0.25] * 4


def test_the_number_of_passes_is_bounded() -> None:
    asked: list[int] = []

    def count(places: Sequence[int]) -> np.ndarray:
        asked.append(len(places))
        return np.array([(0, 100 + place) if place < 20 else (9, 0) for place in places])

    verdicts = judge([1] * 50, [1.0] * 50, count)
    assert asked == list(range(50, 50 - PASSES, -1))
    assert [place for place, verdict in enumerate(verdicts) if verdict.is_left_out] == list(range(20))


@pytest.mark.parametrize("wrong", [{"tokens": 0.0}, {"tokens": -1.0}, {"tokens": float("nan")}, {"gain": float("inf")}])
def test_shares_that_can_not_be_are_refused(wrong: dict[str, float]) -> None:
    shares = honest(2)
    with pytest.raises(ValueError, match="not a number"):
        screen([shares[0], replace(shares[1], **wrong)], LAYOUT)
    with pytest.raises(ValueError, match="too much"):
        screen([replace(shares[0], tokens=2.0**52), shares[1]], LAYOUT)


def test_a_malformed_contribution_is_refused() -> None:
    shares = honest(3)
    assert isinstance(shares[2].blob, bytes)
    with pytest.raises(CodecError):
        screen([*shares[:2], replace(shares[2], blob=shares[2].blob[:-1])], LAYOUT)


def test_decoded_contributions_and_blobs_are_the_same() -> None:
    shares = mixed(1)
    opened = [replace(one, blob=decode(one.blob, LAYOUT)) for one in shares if isinstance(one.blob, bytes)]
    found = screen(opened, LAYOUT)
    assert found.verdicts == screen(shares, LAYOUT).verdicts
    assert all(isinstance(part, FoldPart) and isinstance(part.blob, Decoded) for part in found.parts)


def test_warm_up_leaves_nothing_to_compile() -> None:
    warm_up()
    before = len(screen_fast._count.signatures)
    assert before
    screen(mixed(0), LAYOUT)
    assert len(screen_fast._count.signatures) == before
