"""A small model, its batches and its trainer for tests of the offload engine."""

from __future__ import annotations

import numpy as np

from tscale.kernels.block import Product
from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerConfig
from tscale.kernels.model_config import ModelConfig
from tscale.kernels.offload.memory import StepShape
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.trainer import OffloadParts, OffloadTrainer
from tscale.kernels.offload.transfer import Transfer

LAYERS, ROWS, CONTEXT = 5, 4, 24
MODEL = ModelConfig("tscale", 16, 2, 8, LAYERS, 12, 11, 2)
# momentum 0: what Muon keeps after a step is the gradient
INNER = InnerConfig(ROWS, CONTEXT, 0.1, 0.02, 0.01, 0.0, 1000, 10000, 0.1)
COUNTS = np.arange(11)
SHAPE = StepShape(ROWS, CONTEXT)


def start(model: ModelConfig = MODEL) -> np.ndarray:
    """Parameters without the zero matrices of the start, so that every gradient is of use."""
    noise = np.random.default_rng(3).standard_normal(init_state(model, 1).size)
    return (init_state(model, 1) + 0.1 * noise).astype(np.float32)


def batch(step: int = 0) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 11, (ROWS, CONTEXT + 1))


def trainer(
    plan: OffloadPlan,
    transfer: Transfer,
    product: Product | None = None,
    model: ModelConfig = MODEL,
    inner: InnerConfig = INNER,
) -> tuple[OffloadTrainer, np.ndarray]:
    local = start(model)
    return OffloadTrainer(model, inner, local, COUNTS, OffloadParts(plan, transfer, product)), local


def trained(
    plan: OffloadPlan, transfer: Transfer, steps: int = 1, model: ModelConfig = MODEL
) -> tuple[OffloadTrainer, np.ndarray, list[float]]:
    made, local = trainer(plan, transfer, model=model)
    return made, local, [made.step(batch(step), 1.0) for step in range(steps)]
