"""The same step over CUDA streams, where there is a card, and what copies wait for, on streams that keep a record."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from tests.helpers.offload_samples import MODEL, SHAPE, trained
from tscale.kernels.offload.cuda import CudaTransfer
from tscale.kernels.offload.memory import step_traffic
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.transfer import DirectTransfer

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")


@needs_card
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


class RecordedStream:
    """A stream that says what it is told to wait for. What is copied on it is copied at once."""

    def __init__(self, record: list[str], name: str) -> None:
        self.record, self.name = record, name

    def wait_stream(self, other: RecordedStream) -> None:
        self.record.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: RecordedEvent) -> None:
        self.record.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.record.append(f"the processor waits for {self.name}")


class RecordedEvent:
    def __init__(self, record: list[str]) -> None:
        self.log, self.name = record, ""

    def record(self, stream: RecordedStream) -> None:
        self.name = f"a copy {stream.name}"

    def synchronize(self) -> None:
        self.log.append(f"the processor waits for {self.name}")


@pytest.fixture
def record(monkeypatch) -> list[str]:
    record: list[str] = []
    names = iter(("in", "out"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: RecordedStream(record, "the computation"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: RecordedStream(record, next(names)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: RecordedEvent(record))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: record.append(f"{stream.name} reads"))
    return record


def test_a_copy_comes_after_the_computation_and_after_what_it_was_told(record: list[str]) -> None:
    transfer, host = CudaTransfer("cpu"), torch.arange(6.0).view(2, 3)
    written = transfer.to_host((torch.ones(2, 3),), (host,))
    assert record == ["out waits for the computation", "out reads"]
    record.clear()
    slot = transfer.slot(6)
    ticket = transfer.to_device((host,), slot, (written,))
    assert record == ["in waits for the computation", "in waits for a copy out"]
    record.clear()
    transfer.wait(ticket)
    assert record == ["the computation waits for a copy in"] and torch.equal(slot.pieces[0], torch.ones(2, 3))
    transfer.finish(written)
    record.clear()
    # a copy that was finished needs no waiting for
    transfer.to_device((host,), slot, (written,))
    assert record == ["in waits for the computation"]


def test_a_part_of_a_state_that_the_processor_gathers_is_waited_for_by_the_processor(record: list[str]) -> None:
    transfer, host = CudaTransfer("cpu"), torch.zeros(2, 4)
    written = transfer.to_host((torch.ones(2, 4),), (host,))
    record.clear()
    transfer.to_device((host[:, 1:3],), transfer.slot(4), (written,))
    assert record == ["in waits for the computation", "the processor waits for a copy out"]
