"""Rounding to e4m3 and int8 with scales, against values worked out here from the formats' definitions."""

import numpy as np
import pytest
import torch

from tscale.kernels.precision.backends import BlockEmulation, ScaledMM, TensorEmulation, require_cuda_rules
from tscale.kernels.precision.fp8 import Fp8Matrix, quantise
from tscale.kernels.precision.half import half_product
from tscale.kernels.precision.int8 import int8_forward, int8_mm, quantise_int8
from tscale.kernels.precision.shapes import fits


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def e4m3_values() -> np.ndarray:
    """All values of the format: 4 exponent bits of bias 7, 3 fraction bits, no infinities, 0x7f is NaN."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    sizes = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    return np.concatenate((-sizes[::-1], sizes))


def nearest(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The distance to the closest of `values`."""
    return np.abs(x[:, None] - values).min(1)


def test_quantised_values_are_the_nearest_that_the_format_has_at_the_block_s_scale() -> None:
    x = noise(3, 300) * torch.tensor([[1e-6], [1.0], [300.0]])
    found = quantise(x, (1, 128))
    assert found.scales.shape == (3, 3) and found.codes.is_contiguous()
    table = e4m3_values()
    for row in range(3):
        for block in range(3):
            part = slice(block * 128, (block + 1) * 128)
            exact = (x[row, part] / found.scales[row, block]).double().numpy()
            rounded = found.codes[row, part].double().numpy()
            assert np.abs(rounded - exact) == pytest.approx(nearest(table, exact), abs=0)


def test_a_scale_brings_the_largest_value_of_a_block_to_the_largest_of_the_format() -> None:
    x = noise(4, 256) * torch.tensor([[1e-20], [1e-6], [1.0], [1e9]])
    found = quantise(x, (1, 128))
    assert torch.equal(found.scales, x.view(4, 2, 128).abs().amax(2) / 448)
    assert bool((found.codes.float().view(4, 2, 128).abs().amax(2) == 448).all())


def test_weight_blocks_are_square_and_cut_off_at_the_edges() -> None:
    x = noise(200, 144)
    x[130:, 130:] *= 1000
    found = quantise(x, (128, 128))
    assert found.scales.shape == (2, 2)
    assert found.scales[1, 1] > 100 * found.scales[0, 0]
    back = found.transposed()
    assert back.codes.is_contiguous() and torch.equal(back.values(), found.values().t())
    assert float((found.values() - x).abs().max() / x.abs().max()) < 1 / 16


def test_a_block_that_is_not_finite_is_seen_and_the_others_stay() -> None:
    x = noise(2, 256)
    x[0, 3], x[1, 200] = torch.inf, torch.nan
    finite = torch.isfinite(quantise(x, (1, 128)).values())
    assert finite.sum() == 256 and bool(finite[0, 128:].all()) and bool(finite[1, :128].all())


def test_zeros_stay_zeros() -> None:
    assert not quantise(torch.zeros(4, 130), (1, 128)).values().any()
    assert not int8_forward(torch.zeros(16, 16), torch.zeros(16, 16)).any()


@pytest.mark.parametrize("backend", [BlockEmulation(), TensorEmulation(), ScaledMM()])
def test_both_ways_are_the_same_activations_and_multiply_contracts_the_last_axis(backend: TensorEmulation) -> None:
    x, weight = noise(144, 272), noise(176, 144, seed=1)
    over_m, over_k = backend.both_ways(x)
    assert over_m.codes.shape == (144, 272) and over_k.codes.shape == (272, 144)
    for matrix in (over_m.values(), over_k.values().t()):
        assert float((matrix - x).norm() / x.norm()) < 0.03
    left, left_t = backend.weight(weight)
    assert torch.equal(left.values(), left_t.values().t())
    expected = left.values().double() @ over_k.values().double().t()
    assert float((backend.multiply(left, over_k) - expected).abs().max() / expected.abs().max()) < 1e-6


def test_scales_follow_a_block_s_size_where_one_scale_a_tensor_loses_it() -> None:
    x = noise(32, 256)
    x[:, 128:] *= 2.0**-20
    by_block, by_tensor = BlockEmulation().both_ways(x)[0], TensorEmulation().both_ways(x)[0]
    small = x[:, 128:]
    assert float((by_block.values()[:, 128:] - small).norm() / small.norm()) < 0.03
    assert float((by_tensor.values()[:, 128:] - small).norm() / small.norm()) > 0.3


@pytest.mark.parametrize(("left", "right"), [((32, 40), (32, 40)), ((32, 48), (40, 48)), ((7, 8), (16, 8))])
def test_scaled_mm_refuses_on_a_cpu_what_cuda_refuses(left: tuple[int, int], right: tuple[int, int]) -> None:
    sides = [Fp8Matrix(torch.zeros(s).to(torch.float8_e4m3fn), torch.ones(1, 1), s) for s in (left, right)]
    with pytest.raises(ValueError, match="multiples of 16"):
        ScaledMM().multiply(*sides)
    with pytest.raises(ValueError, match="row-major"):
        require_cuda_rules(torch.zeros(16, 32), torch.empty_strided((16, 32), (1, 16)))
    require_cuda_rules(torch.zeros(7, 32), torch.zeros(16, 32))


@pytest.mark.parametrize(
    ("weight", "x", "expected"),
    [
        ((16, 16), (16, 16), True),
        ((96, 272), (272, 48), True),
        ((24, 16), (16, 16), False),
        ((16, 24), (24, 16), False),
        ((16, 16), (16, 24), False),
        ((16, 16), (16, 8), False),
    ],
)
def test_the_shape_rule_looks_at_all_three_dimensions(
    weight: tuple[int, int], x: tuple[int, int], expected: bool
) -> None:
    assert fits(weight, x) is expected


def test_int8_has_a_scale_per_token_and_one_per_weight_matrix() -> None:
    x, weight = noise(64, 5) * torch.tensor([1.0, 1e-6, 1e6, 3.0, 0.1]), noise(48, 64, seed=1)
    codes, scales = quantise_int8(x, axis=0)
    assert scales.shape == (1, 5) and quantise_int8(weight)[1].shape == ()
    assert codes.abs().amax(0).tolist() == [127] * 5
    assert bool(((codes * scales - x).abs() <= scales * 0.5001).all())
    y, exact = int8_forward(weight, x), weight.double() @ x.double()
    assert float(((y - exact).norm(dim=0) / exact.norm(dim=0)).max()) < 0.02


def test_int8_sums_are_exact_at_any_length() -> None:
    # 2**24 // 127**2 = 1040 products of the largest codes are the last that float32 is sure to hold
    for terms in (1040, 1041, 5000):
        left = torch.full((2, terms), 127, dtype=torch.int8)
        left[1] = torch.randint(-127, 128, (terms,), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
        right = torch.full((terms, 2), 127, dtype=torch.int8)
        right[-1, 1] = 126
        assert torch.equal(int8_mm(left, right).long(), left.long() @ right.long())


def test_int8_shows_what_is_not_finite_in_its_token_only() -> None:
    x = noise(32, 4)
    x[3, 1], x[4, 2] = torch.nan, torch.inf
    finite = torch.isfinite(int8_forward(noise(16, 32, seed=1), x)).all(0)
    assert finite.tolist() == [True, False, False, True]


def test_fp16_keeps_gradients_that_are_smaller_than_the_format_has() -> None:
    weight, x = noise(16, 32).requires_grad_(), noise(32, 8, seed=1).requires_grad_()
    grad = noise(16, 8, seed=2) * 1e-12
    half_product(torch.float16)(weight, x).backward(grad)
    for found, exact in ((weight.grad, grad @ x.detach().t()), (x.grad, weight.detach().t() @ grad)):
        assert found is not None
        assert float((found - exact).norm() / exact.norm()) < 1e-3


def test_bf16_rounds_operands_to_eight_bits_and_sums_in_float32() -> None:
    weight, x = torch.full((1, 4096), 1.0), torch.full((4096, 1), 1.0 + 2**-9)
    assert half_product(torch.bfloat16)(weight, x).item() == 4096.0
    x[0] = 1.0 + 2**-7
    assert half_product(torch.bfloat16)(weight, x).item() == 4096.0 + 2**-7
