"""The products' derivatives, their fallback for shapes that do not fit, and training through every path."""

import numpy as np
import pytest
import torch

from tscale.kernels.precision.backends import BlockEmulation, TensorEmulation
from tscale.kernels.precision.fp8 import Fp8Matrix
from tscale.kernels.precision.linear import fp8_product
from tscale.kernels.precision.products import product_for
from tscale.kernels.precision.select import PrecisionPath

P = PrecisionPath


def operands(n: int, k: int, m: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    noise = torch.Generator().manual_seed(n + k + m)
    weight, x, grad = (torch.randn(*shape, generator=noise) for shape in ((n, k), (k, m), (n, m)))
    return weight.to(dtype).requires_grad_(), x.to(dtype).requires_grad_(), (grad * 1e-6).to(dtype)


class Recording(BlockEmulation):
    """Notes over which lengths it contracted."""

    def __init__(self) -> None:
        self.contracted: list[int] = []

    def multiply(self, left_AC: Fp8Matrix, right_BC: Fp8Matrix) -> torch.Tensor:
        self.contracted.append(left_AC.codes.shape[1])
        assert left_AC.codes.dtype == right_BC.codes.dtype == torch.float8_e4m3fn
        return super().multiply(left_AC, right_BC)


def test_all_three_products_are_in_fp8_each_quantised_along_what_it_contracts() -> None:
    n, k, m = 48, 272, 160
    backend = Recording()
    weight, x, grad = operands(n, k, m)
    fp8_product(backend)(weight, x).backward(grad)
    assert sorted(backend.contracted) == sorted([k, m, n])
    assert weight.grad is not None and x.grad is not None
    blocks = BlockEmulation()
    w, w_t = (part.values() for part in blocks.weight(weight.detach()))
    (x_over_m, x_over_k), (g_over_m, g_over_n) = blocks.both_ways(x.detach()), blocks.both_ways(grad)
    torch.testing.assert_close(weight.grad, g_over_m.values() @ x_over_m.values().t(), rtol=1e-5, atol=1e-10)
    torch.testing.assert_close(x.grad, w_t @ g_over_n.values().t(), rtol=1e-5, atol=1e-10)
    torch.testing.assert_close(fp8_product(blocks)(weight, x), w @ x_over_k.values().t(), rtol=1e-5, atol=1e-5)


def test_what_is_kept_for_the_way_back_is_a_quarter_of_float32() -> None:
    kept: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    weight, x, _ = operands(128, 256, 512)
    with torch.autograd.graph.saved_tensors_hooks(note, note):
        fp8_product(BlockEmulation())(weight, x)
    kept_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    assert kept_bytes < 1.05 * (128 * 256 + 256 * 512)


@pytest.mark.parametrize("sizes", [(24, 32, 32), (32, 24, 32), (32, 32, 24), (8, 8, 8)])
@pytest.mark.parametrize("path", [P.FP8_BLOCK, P.FP8_TENSOR, P.INT8_FORWARD])
def test_shapes_that_do_not_fit_are_multiplied_in_bf16(path: PrecisionPath, sizes: tuple[int, int, int]) -> None:
    results = []
    for product in (product_for(path), product_for(P.BF16)):
        assert product is not None
        weight, x, grad = operands(*sizes)
        y = product(weight, x)
        y.backward(grad)
        results.append((y.detach(), weight.grad, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("path", [path for path in P if path != P.FP32])
def test_results_have_the_dtype_of_what_they_belong_to(path: PrecisionPath) -> None:
    product = product_for(path)
    assert product is not None
    weight, x, grad = operands(32, 48, 64)
    half = x.detach().to(torch.bfloat16).requires_grad_()
    y = product(weight, half)
    y.backward(grad.to(torch.bfloat16))
    assert weight.grad is not None and half.grad is not None
    assert (y.dtype, half.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_only_what_is_asked_for_is_computed() -> None:
    backend = Recording()
    weight, x, grad = operands(32, 48, 64)
    fp8_product(backend)(weight, x.detach()).backward(grad)
    assert backend.contracted == [48, 64]
    assert TensorEmulation().both_ways(x.detach())[0].scales.shape == (1, 1)


def test_gradients_in_int8_paths_are_those_of_bf16() -> None:
    results = []
    for path in (P.INT8_FORWARD, P.BF16):
        product = product_for(path)
        assert product is not None
        weight, x, grad = operands(32, 48, 64)
        product(weight, x).backward(grad)
        assert weight.grad is not None and x.grad is not None
        results.append(np.concatenate((weight.grad.numpy().ravel(), x.grad.numpy().ravel())))
    assert np.array_equal(*results)
