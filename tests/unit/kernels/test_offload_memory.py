"""The memory formula against the allocator's records of a real step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.fake_transfer import FakeTransfer
from tests.helpers.peak_memory import peak_bytes
from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerConfig
from tscale.kernels.model_config import ModelConfig
from tscale.kernels.offload.footprint import footprint
from tscale.kernels.offload.memory import StepShape, device_memory, host_memory
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.trainer import OffloadParts, OffloadTrainer
from tscale.kernels.offload.works import AffineWorks, LayerWorks

WIDE = ModelConfig("tscale", 64, 2, 32, 5, 300, 256, 1)
VERBOSE = ModelConfig("tscale", 32, 2, 16, 4, 64, 8000, 1)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("cfg", "plan", "shape", "at"),
    [
        (WIDE, OffloadPlan(2, 2, "host"), StepShape(6, 512), "backward"),
        (WIDE, OffloadPlan(4, 1, "device"), StepShape(4, 512), "backward"),
        (WIDE, OffloadPlan(7, 2, "device", recompute=False), StepShape(4, 256), "head"),
        (WIDE, OffloadPlan(2, 1, "host", stage_layers=4), StepShape(1, 8), "update of a stage"),
        (VERBOSE, OffloadPlan(3, 1, "host"), StepShape(3, 600), "head"),
        (VERBOSE, OffloadPlan(6, 2, "device", recompute=False), StepShape(4, 200), "head"),
    ],
    ids=["long", "resident states", "graphs", "short", "vocabulary", "vocabulary and graphs"],
)
def test_the_formula_is_within_a_tenth_of_the_measured_peak(cfg, plan, shape, at) -> None:
    local = init_state(cfg, 1)
    inner = InnerConfig(shape.rows, shape.context, 0.01, 0.01, 0.0, 0.9, 1000, 10000, 0.1)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab, (shape.rows, shape.context + 1))

    def work() -> None:
        # the fake's slots and the host's memory are all the CPU's
        parts = OffloadParts(plan, FakeTransfer())
        OffloadTrainer(cfg, inner, local, np.ones(cfg.vocab, np.int64), parts).step(tokens, 1.0)

    device, host = device_memory(cfg, plan, shape), host_memory(cfg, plan, shape)
    predicted = device.total_bytes + host.optimizer_bytes + host.boundary_bytes
    measured = peak_bytes(work)
    assert abs(predicted / measured - 1.0) < 0.05, (predicted, measured, device)
    assert at in device.at


def test_a_footprint_counts_what_is_alive_and_not_what_was_given() -> None:
    def work(given: torch.Tensor) -> torch.Tensor:
        doubled = given * 2.0
        doubled = doubled.view(10, 100) * 2.0
        return doubled[0]

    found = footprint(lambda: torch.empty(1000), work)
    assert (found.peak_bytes, found.kept_bytes) == (2 * 4000, 4000)


@pytest.mark.parametrize("plan", [OffloadPlan(3, 3, "host"), OffloadPlan(7, 5, "device", recompute=False)], ids=str)
def test_micro_batches_of_any_size_follow_from_those_of_one_and_two_sequences(plan: OffloadPlan) -> None:
    shape = StepShape(10, 48)
    works = AffineWorks(WIDE, shape.context)
    assert device_memory(WIDE, plan, shape, works=works.at(plan.micro_rows)) == device_memory(WIDE, plan, shape)


def test_the_head_takes_blocks_of_logits_and_not_all_of_them() -> None:
    # 256 tokens are a block of this vocabulary, which is five of these sequences and a bit
    works = AffineWorks(VERBOSE, 48)
    peaks = {rows: works.at(rows).head().peak_bytes for rows in (1, 4, 6, 7, 12, 200)}
    assert peaks == {rows: LayerWorks(VERBOSE, (rows, 48)).head().peak_bytes for rows in peaks}
    # logits, their logarithms, and the gradient of the table
    block = 2 * 256 * VERBOSE.vocab * 4 + VERBOSE.vocab * VERBOSE.width * 4
    assert peaks[1] < block / 4 < block < peaks[6] < peaks[200] < 1.25 * block
