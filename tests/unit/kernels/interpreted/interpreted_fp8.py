"""Block quantization and the fp8 product against plain torch, in Triton's interpreter."""

import pytest
import torch

from tscale.kernels.gpu import block_product, dequantize, quantize_dual, quantize_weight
from tscale.kernels.gpu.backend import TritonBackend
from tscale.kernels.precision.backends import BlockEmulation
from tscale.kernels.precision.fp8 import Fp8Matrix
from tscale.kernels.precision.products import product_for
from tscale.kernels.precision.select import Backend, PrecisionPath

SHAPES = [(16, 16), (128, 256), (144, 208)]  # less than a tile, whole tiles, cut tiles


def values(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 5
) -> torch.Tensor:
    """Rows of very different sizes, and a row and a column of zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(rows, 1, generator=generator))
    tile = torch.randn(rows, columns, generator=generator) * sizes
    tile[3], tile[:, 5] = 0, 0
    return tile.to(dtype)


def same(ours: Fp8Matrix, theirs: Fp8Matrix) -> bool:
    codes = torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    return codes and torch.equal(ours.scales, theirs.scales) and ours.block == theirs.block


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_the_emulations_both_ways(shape, dtype):
    tile = values(*shape, dtype)
    for ours, theirs in zip(TritonBackend().both_ways(tile), BlockEmulation().both_ways(tile), strict=True):
        assert same(ours, theirs)
    for ours, theirs in zip(TritonBackend().weight(tile), BlockEmulation().weight(tile), strict=True):
        assert same(ours, theirs)


def test_a_scale_brings_the_largest_to_448_and_is_never_zero():
    tile = torch.zeros(16, 256)
    tile[0, 3], tile[0, 200], tile[1, 7] = -896.0, 7.0, 2.0**-120
    rows, columns = quantize_dual(tile)
    assert rows.scales[0].tolist() == [2.0, 7.0 / 448] and rows.codes[0, 3] == 0xFE and rows.codes[0, 200] == 0x7E
    smallest = torch.tensor(2.0**-100) / 448
    assert torch.equal(rows.scales[1], smallest.expand(2)) and rows.codes[1].count_nonzero() == 0
    assert columns.codes[3, 0] == 0xFE and columns.scales.shape == (256, 1)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_value_that_is_not_finite_makes_its_blocks_nan(bad):
    tile = values(16, 256)
    tile[2, 130] = bad
    rows, _ = TritonBackend().both_ways(tile)
    broken = ~torch.isfinite(rows.values())
    assert broken[2, 128:].all() and broken.sum() == 128
    product = block_product(*quantize_dual(tile).rows, *quantize_dual(values(32, 256)).rows)
    assert not torch.isfinite(product[2]).any() and torch.isfinite(product[[0, 1, 3]]).all()


@pytest.mark.parametrize("scale_rows", [1, 128])
def test_dequantize_is_code_times_scale_rounded_to_bfloat16(scale_rows):
    tile = values(144, 208)
    coded = (quantize_dual(tile) if scale_rows == 1 else quantize_weight(tile)).rows
    exact = Fp8Matrix(coded.codes.view(torch.float8_e4m3fn), coded.scales, (scale_rows, 128)).values()
    assert torch.equal(dequantize(coded).view(torch.int16), exact.to(torch.bfloat16).view(torch.int16))


def test_three_products_of_a_linear_layer_equal_the_emulations():
    """Forward, input gradient and weight gradient; the summed dimension is whole (128), cut (208) and short (144)."""
    ours, theirs = TritonBackend(), BlockEmulation()
    weight, x, grad = (values(*shape, spread=0.3) for shape in ((144, 128), (128, 208), (144, 208)))
    products = []
    for backend in (ours, theirs):
        w, w_t = backend.weight(weight)
        (x_rows, x_columns), (grad_rows, grad_columns) = backend.both_ways(x), backend.both_ways(grad)
        pairs = ((w, x_columns), (w_t, grad_columns), (grad_rows, x_rows))
        products.append([backend.multiply(*pair) for pair in pairs])
    for our, their, plain in zip(*products, (weight @ x, weight.t() @ grad, grad @ x.t()), strict=True):
        assert our.shape == plain.shape
        assert (our - their).abs().max() < 2e-6 * plain.abs().max()  # only the order of float32 sums differs
        assert (our - plain).norm() < 0.05 * plain.norm()


def test_the_linear_layer_and_its_gradients_are_the_emulations():
    found = []
    for backend in (Backend.TRITON, Backend.EMULATION):
        weight, x = values(48, 32, spread=0.3).requires_grad_(), values(32, 16, spread=0.3).requires_grad_()
        y = product_for(PrecisionPath.FP8_BLOCK, backend)(weight, x)
        y.backward(values(48, 16, seed=1, spread=0.3))
        found.append((y.detach(), weight.grad, x.grad))
    for our, their in zip(*found, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=2e-6 * float(their.abs().max()))


def test_products_of_small_integers_are_exact():
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-8, 9, (16, 144), generator=generator).float()
    b = torch.randint(-8, 9, (32, 144), generator=generator).float()
    a[:, ::128], b[:, ::128] = 448, 448  # scales of one
    assert torch.equal(block_product(*quantize_dual(a).rows, *quantize_dual(b).rows), a @ b.t())
