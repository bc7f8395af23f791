"""The same step over CUDA streams, where there is a card."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.offload_samples import MODEL, SHAPE, trained
from tscale.kernels.offload.cuda import CudaTransfer
from tscale.kernels.offload.memory import step_traffic
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.transfer import DirectTransfer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")


@pytest.mark.parametrize("plan", [OffloadPlan(2, 1), OffloadPlan(4, 2), OffloadPlan(4, 4, "device")], ids=str)
def test_gradients_on_a_card_are_those_of_the_processor(plan: OffloadPlan) -> None:
    transfer = CudaTransfer()
    on_card, _, losses = trained(plan, transfer)
    other, _, expected = trained(plan, DirectTransfer())
    assert losses == pytest.approx(expected, abs=1e-4)
    for name, array in other.state_arrays().items():
        np.testing.assert_allclose(on_card.state_arrays()[name], array, rtol=1e-2, atol=1e-3 * np.abs(array).max())
    formula, moved = step_traffic(MODEL, plan, SHAPE), transfer.traffic
    assert (moved.to_device_bytes, moved.to_host_bytes) == (formula.to_device_bytes, formula.to_host_bytes)
    transfer.close()
