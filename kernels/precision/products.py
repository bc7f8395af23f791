"""From a precision path to the product that the model's layers call."""

from __future__ import annotations

import importlib

import torch

from tscale.kernels.block import Product
from tscale.kernels.precision.backends import BlockEmulation, Fp8Backend, ScaledMM, TensorEmulation
from tscale.kernels.precision.half import half_product
from tscale.kernels.precision.linear import fp8_product, fp8_storage_product, int8_product
from tscale.kernels.precision.select import Backend, Candidate, PrecisionPath

TRITON_MODULE = "tscale.kernels.gpu.backend"


def product_for(path: PrecisionPath, backend: Backend = Backend.EMULATION) -> Product | None:
    """The product of a path; None is the model's own float32, fused with the addition.

    Raises:
        ImportError: the back end's package is missing or too old.
        ValueError: the back end does not do this path.
    """
    if path in (PrecisionPath.FP8_BLOCK, PrecisionPath.FP8_TENSOR):
        return fp8_product(_fp8_backend(path, backend))
    if path == PrecisionPath.FP8_STORAGE:
        return fp8_storage_product()
    if path == PrecisionPath.INT8_FORWARD:
        return int8_product()
    if path == PrecisionPath.BF16:
        return half_product(torch.bfloat16)
    if path == PrecisionPath.FP16:
        return half_product(torch.float16)
    return None


def product_of(candidate: Candidate) -> Product | None:
    """The product of a candidate; raises as `product_for` does."""
    return product_for(candidate.path, candidate.backend)


def _fp8_backend(path: PrecisionPath, backend: Backend) -> Fp8Backend:
    by_block = path == PrecisionPath.FP8_BLOCK
    if backend == Backend.TRITON and by_block:
        # imported by name and only here: it needs triton
        module = importlib.import_module(TRITON_MODULE)
        backend_: Fp8Backend = module.TritonBackend()
        return backend_
    if backend == Backend.SCALED_MM and not by_block:
        return ScaledMM()
    if backend == Backend.EMULATION:
        return BlockEmulation() if by_block else TensorEmulation()
    raise ValueError(f"{backend} does not do {path}")
