"""An OffloadTrainer when things go wrong, and beside the plain trainer whose place it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.fake_transfer import FakeTransfer
from tests.helpers.offload_samples import CONTEXT, COUNTS, INNER, LAYERS, MODEL, ROWS, batch, start, trained, trainer
from tscale.kernels.inner import InnerTrainer
from tscale.kernels.offload import batch as batch_module
from tscale.kernels.offload.errors import DeviceLost, OutOfDeviceMemory, is_out_of_memory
from tscale.kernels.offload.plan import OffloadPlan, resident_plan
from tscale.kernels.offload.transfer import DirectTransfer

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand more lines")
FULL_CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: not enough memory: you tried to")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain(steps: int = 1) -> tuple[np.ndarray, list[float]]:
    local = start()
    inner = InnerTrainer(MODEL, INNER, local, COUNTS)
    return local, [inner.step(batch(step), 1.0) for step in range(steps)]


class FailsOnce:
    """A matrix product that raises at its n-th call."""

    def __init__(self, call: int, error: Exception = FULL) -> None:
        self.left = call
        self.error = error

    def __call__(self, weight_NK: torch.Tensor, x_KM: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return torch.mm(weight_NK, x_KM)


class FailsOnTheWayBack(torch.autograd.Function):
    """`weight @ x` whose derivative raises when `fault` says so, after the weight's share was computed."""

    @staticmethod
    def forward(ctx, weight, x, fault):
        ctx.save_for_backward(weight, x)
        ctx.fault = fault
        return torch.mm(weight, x)

    @staticmethod
    def backward(ctx, grad):
        weight, x = ctx.saved_tensors
        return torch.mm(grad, x.t()), ctx.fault(torch.mm(weight.t(), grad)), None


FORWARD_CALLS = 5 * LAYERS * 2  # two micro-batches


@pytest.mark.parametrize("call", [1, 8, FORWARD_CALLS, FORWARD_CALLS + 3, FORWARD_CALLS + 28, 2 * FORWARD_CALLS])
@pytest.mark.parametrize("plan", [OffloadPlan(2, 2), OffloadPlan(LAYERS + 2, 2, "device")], ids=["host", "device"])
def test_out_of_memory_in_a_layer_halves_the_micro_batch_and_the_step_is_whole(call: int, plan: OffloadPlan) -> None:
    expected, losses = plain(2)
    offloaded, local = trainer(plan, FakeTransfer(), FailsOnce(call))
    got = [offloaded.step(batch(step), 1.0) for step in range(2)]
    assert offloaded.micro_rows == 1 and offloaded.skipped_updates == 0
    assert got == pytest.approx(losses, abs=1e-5)
    # a layer that had its update twice, or never, would be off by the learning rate
    np.testing.assert_allclose(local, expected, rtol=0, atol=1e-3 * INNER.lr_muon)


@pytest.mark.parametrize(
    "plan", [OffloadPlan(3, 2), OffloadPlan(2, 2, "device", False, LAYERS)], ids=["slots", "graphs"]
)
@pytest.mark.parametrize("call", [1, 7, 5 * 2 * LAYERS - 1])
def test_out_of_memory_within_a_derivative_leaves_no_half_of_a_gradient(plan: OffloadPlan, call: int) -> None:
    left = call

    def fault(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left == 0:
            raise FULL_CPU
        return gradient

    expected, losses = plain()
    product = lambda weight, x: FailsOnTheWayBack.apply(weight, x, fault)  # noqa: E731
    offloaded, local = trainer(plan, FakeTransfer(), product)
    assert offloaded.step(batch(), 1.0) == pytest.approx(losses[0], abs=1e-5)
    # what gives way first is the graphs
    assert left < 0 and offloaded.recompute and offloaded.micro_rows == (1 if plan.recompute else 2)
    np.testing.assert_allclose(local, expected, rtol=0, atol=1e-3 * INNER.lr_muon)


@pytest.mark.parametrize(("part", "call"), [("embed", 2), ("head_loss", 1), ("head_loss", 2), ("embed", 4)])
def test_out_of_memory_in_the_embedding_or_the_head(monkeypatch, part: str, call: int) -> None:
    function, left = getattr(batch_module, part), call

    def fails_once(*arguments):
        nonlocal left
        left -= 1
        if left == 0:
            raise FULL
        return function(*arguments)

    monkeypatch.setattr(batch_module, part, fails_once)
    expected, losses = plain()
    offloaded, local = trainer(OffloadPlan(2, 2), FakeTransfer())
    assert offloaded.step(batch(), 1.0) == pytest.approx(losses[0], abs=1e-5)
    assert offloaded.micro_rows == 1 and left < 0
    np.testing.assert_allclose(local, expected, rtol=0, atol=1e-3 * INNER.lr_muon)


def test_kept_graphs_are_given_up_before_the_micro_batch_is() -> None:
    expected, losses = plain()
    plan = resident_plan(LAYERS, ROWS)
    offloaded, local = trainer(plan, DirectTransfer(), FailsOnce(18))
    assert offloaded.step(batch(), 1.0) == pytest.approx(losses[0], abs=1e-6)
    assert (offloaded.micro_rows, offloaded.recompute) == (ROWS, True)
    np.testing.assert_allclose(local, expected, rtol=0, atol=1e-3 * INNER.lr_muon)


def test_a_single_sequence_that_does_not_fit_is_an_error_of_one_line() -> None:
    def full(weight_NK: torch.Tensor, x_KM: torch.Tensor) -> torch.Tensor:
        raise FULL

    offloaded, local = trainer(OffloadPlan(2, ROWS), FakeTransfer(), full)
    before = local.copy()
    with pytest.raises(OutOfDeviceMemory, match=f"sequence of {CONTEXT} tokens does not fit: CUDA out of memory") as e:
        offloaded.step(batch(), 1.0)
    assert len(str(e.value).splitlines()) == 1 and np.array_equal(local, before)


@pytest.mark.parametrize("message", ["CUDA error: unspecified launch failure\nmore", "HIP error: device lost"])
def test_a_lost_device_is_named(message: str) -> None:
    offloaded, _ = trainer(OffloadPlan(2, 2), FakeTransfer(), FailsOnce(30, RuntimeError(message)))
    with pytest.raises(DeviceLost, match="the device was lost: (CUDA|HIP) error") as e:
        offloaded.step(batch(), 1.0)
    assert len(str(e.value).splitlines()) == 1


def test_other_errors_are_nobodys_business() -> None:
    offloaded, _ = trainer(OffloadPlan(2, 2), FakeTransfer(), FailsOnce(3, RuntimeError("a fault of the program")))
    with pytest.raises(RuntimeError, match="a fault of the program"):
        offloaded.step(batch(), 1.0)
    assert offloaded.micro_rows == 2
    assert is_out_of_memory(FULL_CPU) and not is_out_of_memory(ValueError("DefaultCPUAllocator"))


@pytest.mark.parametrize("plan", [OffloadPlan(2, 2), resident_plan(LAYERS, ROWS)], ids=["slots", "resident"])
def test_a_loss_that_is_not_finite_changes_nothing(plan: OffloadPlan) -> None:
    transfer = FakeTransfer() if plan.slots == 2 else DirectTransfer()
    offloaded, local, _ = trained(plan, transfer)
    good = local[3]
    local[3] = np.nan
    before, state = local.copy(), offloaded.state_arrays()
    assert not np.isfinite(offloaded.step(np.zeros((ROWS, CONTEXT + 1), np.int64), 1.0))
    assert np.array_equal(local, before, equal_nan=True)
    assert all(np.array_equal(array, state[name]) for name, array in offloaded.state_arrays().items())
    local[3] = good
    assert np.isfinite(offloaded.step(batch(1), 1.0)) and not np.array_equal(local, before)


def test_a_layer_whose_gradient_is_not_finite_stays_as_it_is() -> None:
    calls = 0

    def fault(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        # the third layer from the top, after two layers of five products each
        return gradient * torch.nan if calls == 11 else gradient

    product = lambda weight, x: FailsOnTheWayBack.apply(weight, x, fault)  # noqa: E731
    offloaded, local = trainer(OffloadPlan(2, ROWS), FakeTransfer(), product)
    before = local.copy()
    assert np.isnan(offloaded.step(batch(), 1.0)) and np.isfinite(local).all()
    expected, _ = plain()
    changed = {spec.name: not np.array_equal(now, then) for (spec, now), (_, then) in zip(
        offloaded.layout.views(local), offloaded.layout.views(before), strict=True)}  # fmt: skip
    assert [changed[f"expand.{index}"] for index in range(LAYERS)] == [False] * 3 + [True] * 2
    assert not changed["embed"] and changed["head"] and offloaded.skipped_updates == 4
    assert np.isfinite(offloaded.state_arrays()["muon_momentum"]).all()
    for name in ("head", "qc.4", "contract.3"):
        np.testing.assert_allclose(offloaded.layout.view(local, name), offloaded.layout.view(expected, name), atol=1e-5)
    assert np.isfinite(offloaded.step(batch(1), 1.0)) and offloaded.skipped_updates == 4


class NanOnTheWayBack(torch.autograd.Function):
    """A loss that is what it was, with a derivative that is not a number."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


def test_a_gradient_of_the_head_that_is_not_finite_changes_nothing(monkeypatch) -> None:
    offloaded, local, _ = trained(OffloadPlan(2, 2), FakeTransfer())
    before, state = local.copy(), offloaded.state_arrays()
    whole = batch_module.head_loss
    monkeypatch.setattr(batch_module, "head_loss", lambda *given: NanOnTheWayBack.apply(whole(*given)))
    assert np.isnan(offloaded.step(batch(1), 1.0)) and np.array_equal(local, before)
    assert all(np.array_equal(array, state[name]) for name, array in offloaded.state_arrays().items())
    monkeypatch.undo()
    assert np.isfinite(offloaded.step(batch(1), 1.0)) and not np.array_equal(local, before)


INNER_MOVING = replace(INNER, momentum=0.9)


@pytest.mark.parametrize("first", ["plain", "offloaded"])
def test_either_trainer_goes_on_with_the_others_state(first: str) -> None:
    results = []
    for others in (False, True):
        local = start()
        inner = InnerTrainer(MODEL, INNER_MOVING, local, COUNTS)
        offloaded, mine = trainer(OffloadPlan(3, ROWS), FakeTransfer(), inner=INNER_MOVING)
        one, two = (inner, offloaded) if first == "plain" else (offloaded, inner)
        flat, other = (local, mine) if first == "plain" else (mine, local)
        for step in range(2):
            one.step(batch(step), 1.0)
        if others:
            other[:] = flat
            two.load_state_arrays(one.state_arrays())
            one, flat = two, other
        one.step(batch(2), 1.0)
        results.append(flat)
    np.testing.assert_allclose(*results, rtol=0, atol=1e-5)


def test_momentum_is_forgotten_and_states_that_do_not_fit_are_refused() -> None:
    offloaded, _, _ = trained(OffloadPlan(2, 2), FakeTransfer())
    state = offloaded.state_arrays()
    with pytest.raises(ValueError, match="adam_second"):
        offloaded.load_state_arrays({**state, "adam_second": state["adam_second"][:-1]})
    assert all(np.array_equal(array, state[name]) for name, array in offloaded.state_arrays().items())
    offloaded.reset_momentum()
    assert not any(array.any() for array in offloaded.state_arrays().values())


@pytest.mark.parametrize("plan", [OffloadPlan(2, ROWS), OffloadPlan(3, 1, "device")], ids=str)
def test_evaluation_and_generation_are_the_plain_trainers(plan: OffloadPlan) -> None:
    transfer = FakeTransfer()
    offloaded, local, _ = trained(plan, transfer)
    other = start()
    inner = InnerTrainer(MODEL, INNER, other, COUNTS)
    tokens = np.random.default_rng(7).integers(0, 11, (9, CONTEXT + 1))
    written = transfer.traffic.to_host_bytes
    assert offloaded.evaluate(other, tokens) == pytest.approx(inner.evaluate(other, tokens), abs=1e-6)
    for temperature in (0.0, 1.0):
        made = [t.generate(other, np.array([1, 2, 3]), 20, temperature, 5) for t in (offloaded, inner)]
        assert made[0].dtype == np.int64 and np.array_equal(*made)
    assert transfer.traffic.to_host_bytes == written and not np.array_equal(local, other)
    with pytest.raises(ValueError, match="prompt"):
        offloaded.generate(other, np.array([], np.int64), 1, 1.0, 0)
