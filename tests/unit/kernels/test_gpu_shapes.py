"""What the GPU wrappers refuse before any kernel runs, and that the package is imported without Triton."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from tscale.kernels.codec import Rung, encode
from tscale.kernels.gpu import ShapeError, block_product, encode_e4m3, quantize_dual, quantize_weight
from tscale.kernels.layout import Layout, TensorSpec


def test_importing_the_package_and_the_back_end_imports_no_triton():
    code = "import sys, tscale.kernels.gpu.backend, tscale.kernels.gpu.delta; print('triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_encoder_raises_and_takes_nothing():
    residual = np.ones(5000, dtype=np.float32)
    with pytest.raises((RuntimeError, ImportError)):
        encode(residual, Layout((TensorSpec("one", (5000,), "matrix"),)), Rung(64), impl="triton")
    assert (residual == 1).all()


@pytest.mark.parametrize("quantize", [quantize_dual, quantize_weight])
@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(16, 24),
        torch.zeros(24, 16),
        torch.zeros(0, 16),
        torch.zeros(256),
        torch.zeros(2, 16, 16),
        torch.zeros(16, 16, dtype=torch.float16),
        torch.zeros(16, 32).t(),
    ],
)
def test_quantize_refuses(quantize, values):
    with pytest.raises(ShapeError):
        quantize(values)


def test_encode_refuses_other_dtypes():
    with pytest.raises(ShapeError, match="float32"):
        encode_e4m3(torch.zeros(3, dtype=torch.float64))


def coded(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, columns, dtype=torch.uint8), torch.ones(rows, -(-columns // 128))


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (coded(32, 128), coded(16, 144), "summed dimension"),
        ((coded(32, 128)[0], torch.ones(32, 2)), coded(16, 128), "don't fit"),
        ((coded(32, 128)[0], torch.ones(32, 1, dtype=torch.float64)), coded(16, 128), "float32"),
        (coded(32, 128), (coded(256, 128)[0], torch.ones(2, 1)), "per row"),
        ((torch.zeros(32, 128), torch.ones(32, 1)), coded(16, 128), "uint8"),
        (coded(32, 120), coded(16, 120), "multiples of 16"),
    ],
)
def test_product_refuses(a, b, said):
    with pytest.raises(ShapeError, match=said):
        block_product(*a, *b)
