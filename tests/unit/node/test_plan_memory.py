"""The planner's main memory against the allocator's records of the trainers that its plans lead to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.peak_memory import peak_bytes
from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerConfig, InnerTrainer
from tscale.kernels.model_config import ModelConfig
from tscale.kernels.offload.memory import StepShape
from tscale.kernels.offload.trainer import OffloadParts, OffloadTrainer
from tscale.kernels.offload.transfer import DirectTransfer
from tscale.node.planning.machine import Machine
from tscale.node.planning.planner import TrainingPlan, Wish, make_plan
from tscale.node.planning.storage import PROCESSES_BYTES, vectors_of

WIDE, LONG = ModelConfig("tscale", 192, 3, 64, 4, 64, 256, 1), ModelConfig("tscale", 64, 2, 32, 5, 200, 256, 1)
VERBOSE = ModelConfig("tscale", 32, 2, 16, 4, 64, 6000, 1)
SIZES = [(WIDE, StepShape(2, 32)), (LONG, StepShape(6, 200)), (VERBOSE, StepShape(4, 160))]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize(("cfg", "shape"), SIZES, ids=["wide", "long", "vocabulary"])
def test_predicted_and_measured_main_memory_agree_within_a_tenth(
    cfg: ModelConfig, shape: StepShape, slots: int
) -> None:
    here = Machine("test", None, 8 << 30, None, 1e11, 0.0, 2e7, "made up")
    plan = make_plan(cfg, shape, here, Wish(slots))
    assert isinstance(plan, TrainingPlan) and plan.layer_major == (slots > 0)
    local, counts = init_state(cfg, 1), np.ones(cfg.vocab, np.int64)
    inner = InnerConfig(shape.rows, shape.context, 0.01, 0.01, 0.0, 0.9, 1000, 10000, 0.1)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, (shape.rows, shape.context + 1))

    def work() -> None:
        parts = OffloadParts(plan.offload, DirectTransfer())
        made = OffloadTrainer(cfg, inner, local, counts, parts) if slots else InnerTrainer(cfg, inner, local, counts)
        for _ in range(2):
            made.step(tokens, 1.0)

    vectors = vectors_of(cfg, outer_momentum=False)
    # the replica's vectors were there before, or are not needed for a step
    others_bytes = PROCESSES_BYTES + vectors.round_bytes + vectors.copies_bytes + vectors.weights_bytes
    predicted = plan.memory.ram_bytes - others_bytes
    assert predicted == pytest.approx(peak_bytes(work), rel=0.1)
