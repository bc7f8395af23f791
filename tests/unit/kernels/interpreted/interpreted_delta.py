"""The delta encoder's kernels against the plain chunk coder, in Triton's interpreter: equal streams, equal bytes."""

import numpy as np
import pytest

from tscale.kernels.codec import CodecError, Rung, encode, reference
from tscale.kernels.codec.plan import plan_chunks
from tscale.kernels.codec.streams import Streams
from tscale.kernels.gpu import delta, encode_delta
from tscale.kernels.layout import Layout, TensorSpec

LARGE = Layout(
    (
        TensorSpec("first", (4097,), "matrix"),
        TensorSpec("gain", (70,), "small"),
        TensorSpec("rest", (9, 400), "matrix"),
    ),
    small_numel=64,
)
TINY = Layout((TensorSpec("a", (101,), "matrix"), TensorSpec("b", (75,), "matrix")), small_numel=64)
SHORT = Layout((TensorSpec("a", (300,), "matrix"), TensorSpec("b", (257,), "matrix")), small_numel=64)


def streams_equal(ours: Streams, theirs: Streams) -> bool:
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in Streams.__dataclass_fields__]
    return all(a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b) for a, b in pairs)


def check(original: np.ndarray, layout: Layout, rung: Rung) -> Streams:
    plan = plan_chunks(layout, rung)
    ours, theirs = original.copy(), original.copy()
    streams = delta.encode_chunks(ours, plan)
    assert streams_equal(streams, reference.encode_chunks(theirs, plan))
    assert ours.tobytes() == theirs.tobytes()
    return streams


def gaussian(numel: int) -> np.ndarray:
    return (np.random.default_rng(1).standard_normal(numel) * 0.01).astype(np.float32)


def heavy_tailed(numel: int) -> np.ndarray:
    """Sums whose float64 bits depend on the order of adding."""
    generator = np.random.default_rng(2)
    return (generator.standard_t(2, numel) * 10.0 ** generator.integers(-12, 12, numel)).astype(np.float32)


def any_finite_bits(numel: int) -> np.ndarray:
    values = np.random.default_rng(3).integers(0, 2**32, numel, dtype=np.uint32).view(np.float32).copy()
    values[~np.isfinite(values)] = 0
    return values


def ties(numel: int) -> np.ndarray:
    """Of values whose last bit is one, so that a limit that is off by that bit takes too many."""
    values = np.random.default_rng(5).integers(-2, 3, numel).astype(np.float32) * np.float32(0.1)
    assert np.abs(values).max().view(np.int32) % 2
    return values


def few(numel: int) -> np.ndarray:
    """Fewer non-zeros than are kept, and a chunk of zeros."""
    values = np.zeros(numel, dtype=np.float32)
    values[[3, 90, 95, -1]] = [1, -2, -1e-9, 5]
    return values


INPUTS = [gaussian, heavy_tailed, any_finite_bits, ties, few]


@pytest.mark.parametrize("make", INPUTS)
def test_streams_and_residual_equal_the_references(make):
    check(make(LARGE.numel), LARGE, Rung(64))


@pytest.mark.parametrize("rung", [Rung(1024), Rung(4096)])
@pytest.mark.parametrize("make", INPUTS)
def test_masked_rungs_too(make, rung):
    check(make(TINY.numel), TINY, rung)


def test_of_equal_values_the_lower_positions_are_taken_and_the_largest_before_them():
    values = np.full(SHORT.numel, 0.25, dtype=np.float32)
    values[100:103] = -0.5
    streams = check(values, SHORT, Rung(64))
    assert streams.counts_C.tolist() == [5, 5]  # a short chunk's share, rounded up
    assert streams.places.tolist() == [0, 0, 98, 0, 0, 0, 0, 0, 0, 0]


def test_order_of_adding_matters_in_the_heavy_tail():
    """Else the test above could not tell a parallel sum from a sequential one."""
    values = np.abs(heavy_tailed(LARGE.numel)).astype(np.float64)
    assert np.add.accumulate(values)[-1] != np.add.accumulate(values[::-1])[-1]


@pytest.mark.parametrize(("bad", "rung"), [(np.nan, Rung(64)), (np.inf, Rung(64)), (-np.inf, Rung(1024))])
def test_a_value_that_is_not_finite_is_refused_and_nothing_is_taken(bad, rung, monkeypatch):
    monkeypatch.setattr(delta, "GROUP_VALUES", 1)  # a group per chunk: those before the bad one are done by then
    values = gaussian(SHORT.numel)
    values[-1] = bad
    before = values.tobytes()
    with pytest.raises(CodecError, match="finite"):
        delta.encode_chunks(values, plan_chunks(SHORT, rung))
    assert values.tobytes() == before


def test_groups_give_the_same_as_one_piece(monkeypatch):
    monkeypatch.setattr(delta, "GROUP_VALUES", 4500)
    plan = plan_chunks(LARGE, Rung(64))
    assert [(group.start, group.stop) for group in delta._groups(plan)] == [(0, 2), (2, 3)]
    check(gaussian(LARGE.numel), LARGE, Rung(64))


def test_a_contribution_has_the_same_bytes_and_leaves_the_same_residual():
    ours = heavy_tailed(LARGE.numel)
    theirs = ours.copy()
    assert encode_delta(ours, LARGE, Rung(64)) == encode(theirs, LARGE, Rung(64))
    assert ours.tobytes() == theirs.tobytes()


def test_small_tensors_are_left_alone_and_no_chunk_is_no_work():
    layout = Layout((TensorSpec("gain", (70,), "small"),))
    streams = check(gaussian(70), layout, Rung(64))
    assert streams.counts_C.shape == (0,) and streams.codes_C2.shape == (0, 2)
