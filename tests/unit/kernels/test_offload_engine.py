"""Layer-major training against plain autograd: equal bits, the bytes of the formula, bounded residency, every wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.fake_transfer import FakeTransfer, TransferMisuse
from tests.helpers.offload_samples import (
    CONTEXT,
    COUNTS,
    INNER,
    LAYERS,
    MODEL,
    ROWS,
    SHAPE,
    batch,
    start,
    trained,
    trainer,
)
from tscale.kernels.inner import InnerTrainer
from tscale.kernels.model import TscaleModel
from tscale.kernels.offload.memory import StepShape, layer_bytes, state_bytes, step_traffic, table_bytes
from tscale.kernels.offload.plan import OffloadPlan, resident_plan
from tscale.kernels.offload.transfer import DirectTransfer, Ticket
from tscale.kernels.precision.half import half_product


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain_gradient(micro_rows: int) -> tuple[float, np.ndarray]:
    """Loss and gradient of the plain model, its micro-batches one after the other through all layers."""
    flat, tokens = torch.from_numpy(start()), torch.from_numpy(batch())
    model, gradient, total = TscaleModel(MODEL, flat, COUNTS), torch.zeros_like(flat), torch.zeros(())
    model.bind_grad(gradient)
    for first in range(0, ROWS, micro_rows):
        part = tokens[first : first + micro_rows]
        loss = model.loss(part) * (len(part) / ROWS)
        loss.backward()
        total += loss.detach()
    return float(total), gradient.numpy()


SIZES = [(2, 4, "host"), (2, 1, "host"), (3, 3, "device"), (4, 2, "host"), (5, 1, "device"), (7, 4, "host")]
PLANS = [
    *(OffloadPlan(slots, micro_rows, boundary) for slots, micro_rows, boundary in SIZES),
    OffloadPlan(9, 2, "host"),
    OffloadPlan(2, 2, "host", stage_layers=2),
    OffloadPlan(4, 4, "device", stage_layers=3),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_gradients_are_those_of_plain_autograd_to_the_bit(plan: OffloadPlan, monkeypatch) -> None:
    # several blocks of logits, the last one shorter
    monkeypatch.setattr("tscale.kernels.head.LEAST_BLOCK_TOKENS", 7)
    monkeypatch.setattr("tscale.kernels.head.BLOCK_BYTES", 4)
    offloaded, _, losses = trained(plan, FakeTransfer())
    loss, gradient = plain_gradient(plan.micro_rows)
    state, table = offloaded.state_arrays(), MODEL.vocab * MODEL.width
    assert losses == [loss] and offloaded.skipped_updates == 0
    assert np.array_equal(state["muon_momentum"], gradient[table:-table])
    tables = torch.from_numpy(np.concatenate([gradient[:table], gradient[-table:]]))
    first = torch.zeros_like(tables).lerp_(tables, 1.0 - 0.9)
    assert np.array_equal(state["adam_first"], first.numpy())
    assert np.median(np.abs(gradient)) > 1e-4


@pytest.mark.parametrize("plan", [*PLANS[:1], PLANS[5]], ids=str)
def test_steps_are_those_of_the_plain_trainer_when_the_batch_is_whole(plan: OffloadPlan) -> None:
    offloaded, local, losses = trained(plan, FakeTransfer(), steps=3)
    other = start()
    inner = InnerTrainer(MODEL, INNER, other, COUNTS)
    assert losses == [inner.step(batch(step), 1.0) for step in range(3)]
    np.testing.assert_allclose(local, other, rtol=0, atol=1e-6)
    for name, array in inner.state_arrays().items():
        np.testing.assert_allclose(offloaded.state_arrays()[name], array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("slots", "stage_layers"), [(LAYERS + 2, 1), (2, LAYERS), (4, 3)])
def test_everything_resident_is_the_same_again(recompute: bool, slots: int, stage_layers: int) -> None:
    plan = OffloadPlan(slots, 2, "device", recompute, stage_layers)
    direct, local, losses = trained(plan, DirectTransfer(), steps=3)
    faked, other, expected = trained(OffloadPlan(2, 2), FakeTransfer(), steps=3)
    assert losses == expected and np.array_equal(local, other)
    assert direct._transfer.traffic.to_device_bytes == 0
    for name, array in faked.state_arrays().items():
        assert np.array_equal(direct.state_arrays()[name], array)


def test_a_processor_may_keep_the_boundary_in_host_memory_too() -> None:
    _, local, losses = trained(OffloadPlan(3, 3, "host"), DirectTransfer(), steps=2)
    _, other, expected = trained(OffloadPlan(3, 3, "device"), DirectTransfer(), steps=2)
    assert losses == expected and np.array_equal(local, other)


def test_other_matrix_products_take_the_same_way() -> None:
    product = half_product(torch.bfloat16)
    offloaded, local = trainer(OffloadPlan(2, ROWS), FakeTransfer(), product)
    other = start()
    inner = InnerTrainer(MODEL, INNER, other, COUNTS, product)
    losses = [[t.step(batch(step), 1.0) for step in range(2)] for t in (offloaded, inner)]
    assert losses[0] == losses[1] != trained(OffloadPlan(2, ROWS), FakeTransfer(), steps=2)[2]
    np.testing.assert_allclose(local, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_bytes_are_those_of_the_formula(plan: OffloadPlan) -> None:
    transfer = FakeTransfer()
    trained(plan, transfer, steps=2)
    expected = step_traffic(MODEL, plan, SHAPE)
    got = transfer.traffic
    assert (got.to_device_bytes, got.to_host_bytes) == (2 * expected.to_device_bytes, 2 * expected.to_host_bytes)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_at_most_the_slots_one_layer_and_the_boundary_are_on_the_device(plan: OffloadPlan) -> None:
    transfer = FakeTransfer()
    trained(plan, transfer, steps=2)
    w, e = plan.stage_layers * layer_bytes(MODEL), table_bytes(MODEL)
    bound = plan.slots * w + e + max(w, e)
    if plan.boundary == "host":
        micro = state_bytes(MODEL, StepShape(plan.micro_rows, CONTEXT))
        # state and gradient, of the micro-batch computed with and of the next; outputs of this one and the one before
        bound += (4 + 2) * micro if plan.micro_rows < ROWS else (2 + 1) * micro
    assert 0.8 * bound < transfer.peak_bytes <= bound


def test_host_memory_for_the_boundary_is_reused() -> None:
    transfer = FakeTransfer()
    trained(OffloadPlan(2, 1), transfer, steps=2)
    assert transfer.host_bytes == (LAYERS + 2) * state_bytes(MODEL, SHAPE)


class ForgetsOneWait(FakeTransfer):
    """Does not wait when it is asked to for the n-th time for something that is not there yet."""

    def __init__(self, forget: int) -> None:
        super().__init__()
        self.forget = forget
        self.waits = 0

    def wait(self, ticket: Ticket) -> None:
        if ticket.serial in self._pending:
            self.waits += 1
            if self.waits == self.forget:
                return
        super().wait(ticket)


@pytest.mark.parametrize("plan", [OffloadPlan(2, 2), OffloadPlan(4, 3, "device")], ids=str)
def test_the_fake_catches_every_single_missing_wait(plan: OffloadPlan) -> None:
    model, complete = replace(MODEL, layers=3), ForgetsOneWait(0)
    trained(plan, complete, model=model)
    assert complete.waits > 3 * 3
    for forget in range(1, complete.waits + 1):
        with pytest.raises(TransferMisuse):
            trained(plan, ForgetsOneWait(forget), model=model)


class ForgetsTheOrder(FakeTransfer):
    """Loads without regard to the copies that must come before."""

    def to_device(self, hosts, slot, after=()):
        return super().to_device(hosts, slot)


class ForgetsToFinish(FakeTransfer):
    """Says that everything is done when nothing is."""

    def finish(self, ticket: Ticket | None = None) -> None:
        pass


class ReadsEarly(FakeTransfer):
    """Hands out what is in a slot whether it is there or not."""

    def to_device(self, hosts, slot, after=()):
        ticket = super().to_device(hosts, slot, after)
        slot.state = "ready"
        return ticket

    def wait(self, ticket: Ticket) -> None:
        pass


def test_the_fake_catches_a_slot_or_host_memory_that_is_used_too_early() -> None:
    for plan in (OffloadPlan(2, 2), OffloadPlan(2, 2, "device")):
        with pytest.raises(TransferMisuse, match="copy (out of|into) it was not done"):
            trained(plan, ForgetsTheOrder())
    assert np.isnan(trained(OffloadPlan(2, 2), ReadsEarly())[2]).all()


def test_a_step_that_does_not_finish_its_copies_shows() -> None:
    _, complete, _ = trained(OffloadPlan(2, 2, "device"), FakeTransfer())
    _, local, _ = trained(OffloadPlan(2, 2, "device"), ForgetsToFinish())
    assert not np.array_equal(local, complete)


def test_a_change_of_the_parameters_between_steps_counts() -> None:
    losses = []
    for transfer, plan in ((FakeTransfer(), OffloadPlan(3, 4)), (DirectTransfer(), resident_plan(LAYERS, ROWS))):
        offloaded, local, _ = trained(plan, transfer)
        local *= np.float32(0.5)
        losses.append(offloaded.step(batch(1), 1.0))
    other = start()
    inner = InnerTrainer(MODEL, INNER, other, COUNTS)
    inner.step(batch(0), 1.0)
    other *= np.float32(0.5)
    assert losses[0] == losses[1] == pytest.approx(inner.step(batch(1), 1.0), abs=1e-6)


@pytest.mark.parametrize(
    ("values", "fault"),
    [({"slots": 1}, "two slots"), ({"stage_layers": 0}, "one layer"),
     ({"micro_rows": 0}, "one sequence"), ({"boundary": "disk"}, "disk"),
     ({"slots": LAYERS + 1, "recompute": False, "boundary": "device"}, f"{LAYERS + 2} slots"),
     ({"slots": LAYERS + 2, "recompute": False}, "on the device")],
)  # fmt: skip
def test_plans_that_can_not_be_are_refused(values: dict, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        trained(OffloadPlan(**{"slots": 2, "micro_rows": 1, **values}), FakeTransfer())
