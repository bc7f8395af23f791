"""The fold: its arithmetic spelled out, the twins bit for bit, order, and what it leaves alone."""

import tracemalloc

import numpy as np
import pytest

from tscale.kernels.codec import CodecError, Rung, decode, encode
from tscale.kernels.feedback import accumulate, feed_back
from tscale.kernels.fold import FoldOptions, FoldPart, OuterRule, fold, fold_reference, warm_up
from tscale.kernels.layout import Layout, TensorSpec

LAYOUT = Layout(
    (TensorSpec("a", (90, 100), "matrix"), TensorSpec("g", (33,), "small"), TensorSpec("b", (5000,), "embedding")),
    small_numel=64,
)
PLAIN, NESTEROV = OuterRule(1.7, 0.0), OuterRule(0.7, 0.6)


def values(seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(LAYOUT.numel) * scale).astype(np.float32)


def some_parts() -> list[FoldPart]:
    rungs = [Rung(64), Rung(4096), Rung(512), Rung(4096, 32)]
    weights = np.random.default_rng(9).random(len(rungs))
    return [
        FoldPart(encode(values(10 + i, 0.01), LAYOUT, rung), float(weight))
        for i, (rung, weight) in enumerate(zip(rungs, weights, strict=True))
    ]


def momentum_for(rule: OuterRule) -> np.ndarray | None:
    return values(2, 0.1) if rule.mu else None


@pytest.mark.parametrize("rule", [PLAIN, NESTEROV])
def test_equals_the_formula_value_by_value(rule):
    anchor, momentum, parts = values(1), momentum_for(rule), some_parts()
    new_anchor, new_momentum = fold(anchor, momentum, parts, LAYOUT, rule)
    dense = [decode(part.blob, LAYOUT).dense() for part in parts]
    eta, mu = np.float32(rule.eta), np.float32(rule.mu)
    for i in [*range(0, LAYOUT.numel, 37), LAYOUT.numel - 1]:
        total = 0.0  # python floats: float64, nothing fused
        for part, sent in zip(parts, dense, strict=True):
            total = total + part.weight * float(sent[i])
        direction = np.float32(total)
        if momentum is not None:
            u = np.float32(np.float32(mu * momentum[i]) + direction)
            assert new_momentum[i] == u
            direction = np.float32(direction + np.float32(mu * u))
        assert new_anchor[i] == np.float32(anchor[i] - np.float32(eta * direction))


@pytest.mark.parametrize("rule", [PLAIN, NESTEROV])
def test_numba_twin_and_reference_are_bit_equal_and_inputs_stay(rule):
    anchor, momentum, parts = values(1), momentum_for(rule), some_parts()
    before = anchor.tobytes(), None if momentum is None else momentum.tobytes()
    fast, plain = fold(anchor, momentum, parts, LAYOUT, rule), fold_reference(anchor, momentum, parts, LAYOUT, rule)
    assert fast[0].tobytes() == plain[0].tobytes()
    assert (fast[1] is None) == (plain[1] is None) == (rule.mu == 0)
    if momentum is not None:
        assert fast[1].tobytes() == plain[1].tobytes()
        assert momentum.tobytes() == before[1]
    assert anchor.tobytes() == before[0]


# three tensors of more than one block of chunks (32) whose lengths are no multiples of a chunk or a byte, so that runs
# of chunks and streams of bits begin anywhere
LARGE = Layout(
    (
        TensorSpec("a", (331, 811), "matrix"),
        TensorSpec("b", (150_001,), "matrix"),
        TensorSpec("c", (77, 2111), "matrix"),
    )
)
RUNGS = [Rung(64), Rung(256), Rung(1024), Rung(4096), Rung(4096, 32)]


def large_residual(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(4, LARGE.numel) * 0.01).astype(np.float32)


@pytest.mark.parametrize("rule", [PLAIN, NESTEROV])
def test_blocks_and_threads_fold_to_the_bits_of_the_reference(rule):
    anchor = large_residual(7)
    momentum = large_residual(8) if rule.mu else None
    parts = [FoldPart(encode(large_residual(20 + i), LARGE, rung), 0.3 + i) for i, rung in enumerate(RUNGS)]
    parts.insert(1, FoldPart(encode(np.zeros(LARGE.numel, np.float32), LARGE, Rung(64)), 1.0))  # its streams are empty
    expected = fold_reference(anchor, momentum, parts, LARGE, rule)
    for threads in (1, 2, 5):
        result = fold(anchor, momentum, parts, LARGE, rule, FoldOptions(threads))
        assert [a.tobytes() for a in result if a is not None] == [a.tobytes() for a in expected if a is not None]


def test_a_fold_needs_the_state_and_a_little_more_than_its_blobs():
    layout = Layout((TensorSpec("a", (2000, 1024), "matrix"), TensorSpec("b", (1000, 1024), "matrix")))
    anchor = np.zeros(layout.numel, np.float32)
    generator = np.random.default_rng(3)
    blobs = [encode(generator.standard_normal(layout.numel, np.float32), layout, Rung(64)) for _ in range(8)]
    warm_up()
    fold(anchor, None, [FoldPart(blob, 0.1) for blob in blobs], layout, PLAIN)
    tracemalloc.start()
    fold(anchor, None, [FoldPart(blob, 0.1) for blob in blobs], layout, PLAIN)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest_bytes = 8 * layout.tensors[0].numel
    assert anchor.nbytes < peak_bytes < anchor.nbytes + largest_bytes + 2 * sum(map(len, blobs))


def test_decoded_parts_and_blobs_are_the_same():
    parts = some_parts()
    opened = [FoldPart(decode(part.blob, LAYOUT), part.weight) for part in parts]
    assert (
        fold(values(1), None, parts, LAYOUT, PLAIN)[0].tobytes()
        == fold(values(1), None, opened, LAYOUT, PLAIN)[0].tobytes()
    )


def test_the_order_of_parts_is_the_order_of_addition():
    blobs = [encode(np.full(LAYOUT.numel, value, np.float32), LAYOUT, Rung(4096, 32)) for value in (1.0, 1e17, -1e17)]
    forward = fold(values(1), None, [FoldPart(blob, 1.0) for blob in blobs], LAYOUT, PLAIN)[0]
    backward = fold(values(1), None, [FoldPart(blob, 1.0) for blob in reversed(blobs)], LAYOUT, PLAIN)[0]
    assert forward.tobytes() == values(1).tobytes()  # 1 drowned in 1e17
    assert backward.tobytes() != forward.tobytes()


def test_no_contributions_leave_the_anchor_and_decay_the_momentum():
    anchor, momentum = values(1), values(2)
    assert fold(anchor, None, [], LAYOUT, PLAIN)[0].tobytes() == anchor.tobytes()
    new_momentum = fold(anchor, momentum, [], LAYOUT, NESTEROV)[1]
    assert new_momentum.tobytes() == (np.float32(0.6) * momentum + np.float32(0)).tobytes()


def test_one_exact_contribution_with_rate_one_gives_the_peers_own_parameters_back():
    anchor = np.float32(1) + values(3, 1e-3)
    local = anchor - values(4, 1e-3)
    blob = encode(anchor - local, LAYOUT, Rung(4096, 32))
    folded = fold(anchor, None, [FoldPart(blob, 1.0)], LAYOUT, OuterRule(1.0, 0.0))[0]
    assert folded.tobytes() == (anchor - (anchor - local)).tobytes()


def test_refusals():
    anchor, parts = values(1), some_parts()
    with pytest.raises(ValueError, match="momentum"):
        fold(anchor, None, parts, LAYOUT, NESTEROV)
    with pytest.raises(ValueError, match="momentum"):
        fold(anchor, values(2), parts, LAYOUT, PLAIN)
    with pytest.raises(ValueError, match="weight"):
        fold(anchor, None, [FoldPart(parts[0].blob, float("nan"))], LAYOUT, PLAIN)
    with pytest.raises(CodecError):
        fold(anchor, None, [parts[0], FoldPart(parts[1].blob[:-1], 1.0)], LAYOUT, PLAIN)
    with pytest.raises(ValueError, match="float32"):
        fold(anchor.astype(np.float64), None, parts, LAYOUT, PLAIN)


def test_feedback_keeps_what_was_not_sent():
    residual, delta = values(5, 0.01), values(6, 0.01)
    expected = np.float32(0.9) * residual + delta
    blob = feed_back(residual, delta, 0.9, LAYOUT, Rung(64))
    np.testing.assert_array_equal(decode(blob, LAYOUT).dense() + residual, expected)
    other = values(5, 0.01)
    accumulate(other, delta, 0.9)
    assert other.tobytes() == expected.tobytes()


def test_warm_up_leaves_nothing_to_compile():
    from tscale.kernels import fold_fast
    from tscale.kernels.codec import fast

    warm_up()
    folding = [fold_fast._fold_plain, fold_fast._fold_nesterov, fold_fast._plain, fold_fast._nesterov]
    compiled = [fast._encode, fast._expand, *folding]
    before = [len(function.signatures) for function in compiled]
    assert all(before)
    for rule in (PLAIN, NESTEROV):
        fold(values(1), momentum_for(rule), some_parts(), LAYOUT, rule)
    assert [len(function.signatures) for function in compiled] == before
