"""The delta codec: exactness, ties, equal bytes of the twins, what every rung costs and sends."""

import numpy as np
import pytest

from tscale.kernels.codec import CHUNK, CodecError, Rung, contribution_bits_per_parameter, decode, encode, verify
from tscale.kernels.codec.magnitudes import magnitude_code, magnitude_table
from tscale.kernels.layout import Layout, LayoutError, TensorSpec

LADDER = [Rung(64), Rung(128), Rung(256), Rung(512), Rung(1024), Rung(4096), Rung(4096, 32)]
IMPLS = ["reference", "numba"]
LAYOUT = Layout(
    (
        TensorSpec("embedding", (3, 5000), "embedding"),
        TensorSpec("gain", (70,), "small"),
        TensorSpec("matrix", (97, 103), "matrix"),
        TensorSpec("tiny", (5, 7), "matrix"),
        TensorSpec("last", (4097,), "matrix"),
    ),
    small_numel=64,
)


def gaussian(layout: Layout, seed: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(layout.numel) * 0.01).astype(np.float32)


def heavy_tailed(layout: Layout) -> np.ndarray:
    generator = np.random.default_rng(2)
    return (generator.standard_t(2, layout.numel) * 10.0 ** generator.integers(-6, 1, layout.numel)).astype(np.float32)


def any_finite_bits(layout: Layout) -> np.ndarray:
    """Float32 of random bits: every exponent, denormals, huge values."""
    values = np.random.default_rng(3).integers(0, 2**32, layout.numel, dtype=np.uint32).view(np.float32).copy()
    values[~np.isfinite(values)] = 0
    return values


def sparse_few(layout: Layout) -> np.ndarray:
    """Fewer non-zeros than any rung keeps, and whole chunks of zeros."""
    values = np.zeros(layout.numel, dtype=np.float32)
    values[[3, 900, 4095, 4096, -1]] = [1, -2, 3e-3, -1e-9, 5]
    return values


def two_scales(layout: Layout) -> np.ndarray:
    """A top-k set whose members no two magnitudes can serve."""
    values = gaussian(layout) * np.float32(1e-6)
    values[::97] *= np.float32(1e5)
    values[::1009] *= np.float32(1e5)
    return values


def huge(layout: Layout) -> np.ndarray:
    values = gaussian(layout)
    values[::10] = np.float32(3.4e38)
    values[5::50] = np.float32(-6e8)
    return values


def denormal(layout: Layout) -> np.ndarray:
    return (np.random.default_rng(4).integers(-999, 1000, layout.numel) * 1e-45).astype(np.float32)


def quantized(layout: Layout) -> np.ndarray:
    """Ties everywhere."""
    return (np.random.default_rng(5).integers(-3, 4, layout.numel) / 8).astype(np.float32)


def constant(layout: Layout) -> np.ndarray:
    return np.full(layout.numel, -0.3, dtype=np.float32)


INPUTS = [
    gaussian,
    heavy_tailed,
    any_finite_bits,
    sparse_few,
    two_scales,
    huge,
    denormal,
    quantized,
    constant,
    lambda layout: np.zeros(layout.numel, dtype=np.float32),
    lambda layout: np.where(gaussian(layout) > 0, np.float32(0.0), np.float32(-0.0)),
    lambda layout: np.linspace(-1, 1, layout.numel).astype(np.float32),
]


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize("rung", LADDER)
def test_decoded_plus_residual_is_the_input_and_the_twins_agree_bit_for_bit(rung, make):
    original = make(LAYOUT)
    blobs, residuals = [], []
    for impl in IMPLS:
        residual = original.copy()
        blob = encode(residual, LAYOUT, rung, impl)
        for reader in IMPLS:
            sent = decode(blob, LAYOUT, rung, reader).dense()
            np.testing.assert_array_equal(sent + residual, original)
        blobs.append(blob)
        residuals.append(residual.tobytes())
    assert blobs[0] == blobs[1]
    assert residuals[0] == residuals[1]


@pytest.mark.parametrize("rung", LADDER)
def test_exactness_over_many_rounds_of_one_residual(rung):
    residual = np.zeros(LAYOUT.numel, dtype=np.float32)
    for round_number in range(5):
        residual = residual * np.float32(0.9) + gaussian(LAYOUT, round_number)
        before = residual.copy()
        blob = encode(residual, LAYOUT, rung)
        np.testing.assert_array_equal(decode(blob, LAYOUT).dense() + residual, before)


@pytest.mark.parametrize("impl", IMPLS)
def test_top_k_takes_the_largest_and_the_lower_index_of_equal_ones(impl):
    layout = Layout((TensorSpec("one", (CHUNK,), "matrix"),))
    values = np.full(CHUNK, 0.25, dtype=np.float32)
    values[1000:1010] = -0.5
    sent = decode(encode(values.copy(), layout, Rung(64), impl), layout).dense()
    expected = [*range(54), *range(1000, 1010)]
    assert np.flatnonzero(sent).tolist() == expected
    assert sent[0] == 0.25 and sent[1005] == -0.5  # both are in the table, and two magnitudes are there


@pytest.mark.parametrize("impl", IMPLS)
def test_a_short_chunk_keeps_its_share_rounded_up(impl):
    layout = Layout((TensorSpec("short", (CHUNK + 100,), "matrix"),))
    sent = decode(encode(np.linspace(1, 1.5, CHUNK + 100).astype(np.float32), layout, Rung(64), impl), layout).dense()
    assert np.flatnonzero(sent[:CHUNK]).tolist() == list(range(CHUNK - 64, CHUNK))
    assert np.flatnonzero(sent[CHUNK:]).tolist() == [98, 99]


def test_a_gap_over_254_and_one_of_exactly_255_survive():
    layout = Layout((TensorSpec("one", (CHUNK,), "matrix"),))
    for positions in ([255], [254], [256], [0, 256, 511, 767], [4095], [0, 4095], [510], [511]):
        values = np.zeros(CHUNK, dtype=np.float32)
        values[positions] = 1
        for impl in IMPLS:
            assert (
                np.flatnonzero(decode(encode(values.copy(), layout, Rung(64), impl), layout).dense()).tolist()
                == positions
            )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 15_030, 20_000, -1])
def test_a_value_that_is_not_finite_is_refused_and_the_residual_untouched(impl, bad, where):
    for rung in (Rung(64), Rung(4096), Rung(4096, 32)):
        residual = gaussian(LAYOUT)
        residual[where] = bad
        before = residual.tobytes()
        with pytest.raises(CodecError, match="finite"):
            encode(residual, LAYOUT, rung, impl)
        assert residual.tobytes() == before


@pytest.mark.parametrize("make", [gaussian, sparse_few, huge])
@pytest.mark.parametrize("rung", [Rung(64), Rung(256), Rung(1024), Rung(4096)])
@pytest.mark.parametrize("threads", [2, 3, 64])  # there are 10 chunks
def test_bytes_and_residual_do_not_depend_on_the_number_of_threads(rung, make, threads):
    alone, shared = make(LAYOUT), make(LAYOUT)
    assert encode(shared, LAYOUT, rung, threads=threads) == encode(alone, LAYOUT, rung)
    assert np.array_equal(shared.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("rung", [Rung(64), Rung(1024)])
@pytest.mark.parametrize("where", [0, 15_030, 20_000, -1])  # in the first thread's chunks and in the second's
def test_what_either_thread_took_is_put_back_when_a_value_is_not_finite(rung, where):
    residual = gaussian(LAYOUT)
    residual[where] = np.inf
    before = residual.copy()
    with pytest.raises(CodecError):
        encode(residual, LAYOUT, rung, threads=2)
    assert np.array_equal(residual, before)


def test_quality_of_what_is_sent():
    layout = Layout((TensorSpec("m", (512, 512), "matrix"),))
    original = gaussian(layout)
    left = {}
    for rung in (Rung(64), Rung(256), Rung(4096)):
        residual = original.copy()
        encode(residual, layout, rung)
        left[rung.kept_per_chunk] = (
            np.square(residual, dtype=np.float64).sum() / np.square(original, dtype=np.float64).sum()
        )
    # exact values of the same coordinates would leave 0.876, 0.665 and 0; the best five-level quantizer leaves 0.080
    assert left[64] < 0.885
    assert left[256] < 0.685
    assert left[4096] < 0.083


def test_cost_on_gaussian_values():
    layout = Layout((TensorSpec("m", (1024, 1024), "matrix"),))
    costs = [contribution_bits_per_parameter(encode(gaussian(layout), layout, rung), layout) for rung in LADDER]
    limits = [0.149, 0.263, 0.456, 0.78, 1.27, 2.25, 32.01]
    assert all(cost <= limit for cost, limit in zip(costs, limits, strict=True)), costs
    assert costs == sorted(costs)


def test_small_tensors_travel_as_float16_that_saturates():
    layout = Layout((TensorSpec("gain", (6,), "small"),))
    residual = np.array([1.0, 1 + 2**-12, 70000, -1e6, 1e-9, 2.0**29], dtype=np.float32)
    sent = decode(encode(residual, layout, Rung(64)), layout).dense()
    assert sent.tolist() == [1.0, 1.0, 65504.0, -65504.0, 0.0, 0.0]
    assert residual.tolist() == [0.0, 2**-12, 70000 - 65504, -1e6 + 65504, float(np.float32(1e-9)), 2.0**29]


def test_exact_rung_sends_everything():
    residual = any_finite_bits(LAYOUT)
    original = residual.copy()
    decoded = decode(encode(residual, LAYOUT, Rung(4096, 32)), LAYOUT)
    assert decoded.dense().tobytes() == original.tobytes()
    assert not residual.any()


def test_add_to_rounds_product_and_sum_apart():
    original = gaussian(LAYOUT)
    decoded = decode(encode(original, LAYOUT, Rung(512)), LAYOUT)
    for index, place in enumerate(LAYOUT.slices):
        total = np.linspace(1, 2, LAYOUT.tensors[index].numel)
        expected = total + 0.3 * decoded.dense()[place].astype(np.float64)
        decoded.add_to(total, index, 0.3)
        assert total.tobytes() == expected.tobytes()


@pytest.mark.parametrize("rung", [Rung(64), Rung(4096), Rung(4096, 32)])
def test_rms_and_verify(rung):
    decoded = decode(encode(gaussian(LAYOUT), LAYOUT, rung), LAYOUT)
    expected = [np.sqrt(np.mean(np.square(decoded.values(i).astype(np.float64)))) for i in range(len(LAYOUT.tensors))]
    np.testing.assert_allclose(decoded.rms(), expected, rtol=1e-12)
    blob = encode(gaussian(LAYOUT), LAYOUT, rung)
    verify(blob, LAYOUT, float(max(expected)) * 1.001)
    with pytest.raises(CodecError, match="root mean square"):
        verify(blob, LAYOUT, float(max(expected)) * 0.999)
    with pytest.raises(CodecError, match="allow"):
        verify(blob, LAYOUT, 1.0, rung_allowed=[Rung(100), Rung(200)])


def test_a_blob_for_another_layout_is_refused():
    blob = encode(gaussian(LAYOUT), LAYOUT, Rung(64))
    swapped = Layout((*LAYOUT.tensors[1:], LAYOUT.tensors[0]), small_numel=64)
    for other in (swapped, LAYOUT.with_small_numel(65), Layout(LAYOUT.tensors[:-1], small_numel=64)):
        with pytest.raises(CodecError, match="another model"):
            decode(blob, other)


def test_residual_of_the_wrong_kind_is_refused():
    for residual in (np.zeros(3, np.float32), np.zeros(LAYOUT.numel), np.zeros(2 * LAYOUT.numel, np.float32)[::2]):
        with pytest.raises(CodecError):
            encode(residual, LAYOUT, Rung(64))


@pytest.mark.parametrize("kept,bits", [(0, 2), (4097, 2), (64, 3), (64, 32), (-1, 2)])
def test_impossible_rungs(kept, bits):
    with pytest.raises(CodecError):
        Rung(kept, bits)


def test_magnitude_table():
    table = magnitude_table()
    assert table[0] == 0 and table[1] == 2.0**-24 and table[255] == 1.75 * 2.0**7
    assert np.all(np.diff(table) > 0)
    assert all(magnitude_code(float(value)) == code for code, value in enumerate(table))
    assert magnitude_code(1.06) == magnitude_code(1.0) and magnitude_code(1.07) == magnitude_code(1.125)
    assert magnitude_code(1e30) == 255 and magnitude_code(1e-30) == 0


def test_layout_refuses_what_cannot_be():
    with pytest.raises(LayoutError):
        TensorSpec("a", (0, 3), "matrix")
    with pytest.raises(LayoutError):
        TensorSpec("a", (3,), "bias")
    with pytest.raises(LayoutError):
        Layout((TensorSpec("a", (3,), "small"), TensorSpec("a", (4,), "small")))


def test_layout_views_write_through():
    flat = np.zeros(LAYOUT.numel, dtype=np.float32)
    LAYOUT.view(flat, "matrix")[1, 2] = 7
    assert flat[LAYOUT.slices[2]][103 + 2] == 7
