"""Which trainer a worker has, where its vectors lie, and what it says when its device is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.worker_bench import GENESIS, SPARSE, Bench, manifest, open_bench, run_rounds, tiny, worker_config
from tscale.kernels.inner import InnerTrainer
from tscale.kernels.offload.errors import DeviceLost, OutOfDeviceMemory
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.trainer import OffloadTrainer
from tscale.kernels.offload.transfer import DirectTransfer, Pieces, Slot, Ticket
from tscale.kernels.precision.capabilities import Capabilities
from tscale.node.planning.machine import Machine
from tscale.node.planning.storage import PROCESSES_BYTES, SPILL_ALL, SPILL_OPTIMIZER, SPILL_ROUND, SPILLS
from tscale.node.worker import messages as m
from tscale.node.worker import resume, trainers
from tscale.node.worker.kernel_config import kernel_config, training_machine
from tscale.node.worker.process import failure
from tscale.node.worker.trainers import Arrangement, arrange
from tscale.protocol.errors import BadInput, DiskFull

CARD = Capabilities("cuda", "Test card", 8, 9, memory_bytes=12 << 30, bf16=True)
LOST = RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")
NANO = kernel_config(tiny())


def arranged(folder: Path, **changes: Any) -> Arrangement:
    return arrange(worker_config(folder, **changes), NANO)


def with_card(monkeypatch: pytest.MonkeyPatch, device_bytes: int) -> None:
    monkeypatch.setattr(trainers, "training_machine", lambda device: CARD if device != "cpu" else Capabilities())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (device_bytes, 12 << 30))

    def machine(disk_bytes: int | None, found: Capabilities) -> Machine:
        return Machine(found.name, found.memory_bytes or None, 32 << 30, disk_bytes, 1e12, 1e10, 2e7, "test")

    monkeypatch.setattr(trainers, "this_machine", machine)


def test_a_small_model_on_the_processor_is_trained_all_at_once_unless_slots_are_wished_for(tmp_path: Path) -> None:
    assert arranged(tmp_path) == Arrangement(Capabilities(), None)
    assert arranged(tmp_path).text == "the processor"
    layers = NANO.model.layers
    for slots, recompute in ((2, layers > 0), (layers + 2, False), (99, False)):
        plan = OffloadPlan(min(slots, layers + 2), NANO.inner.batch, "device", recompute)
        assert arranged(tmp_path, offload_slots=slots).offload == plan
    assert type(open_bench(tmp_path).session.trainer) is InnerTrainer
    bench = open_bench(tmp_path, offload_slots=2)
    assert type(bench.session.trainer) is OffloadTrainer
    assert bench.ready.device == "the processor, 2 slots for layers, 4 sequences at a time"


def test_a_card_is_used_within_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_card(monkeypatch, 10 << 30)
    roomy = arranged(tmp_path)
    assert (roomy.machine, roomy.warning) == (CARD, "")
    assert roomy.offload == OffloadPlan(NANO.model.layers + 2, NANO.inner.batch, "device", recompute=False)
    assert arranged(tmp_path, device="cpu") == Arrangement(Capabilities(), None)
    assert arranged(tmp_path, offload_slots=3).offload.slots == 3
    small = arranged(tmp_path, vram_bytes=600 << 20)
    assert small.offload is None and small.machine.device == "cpu"
    assert small.warning.startswith("Test card is not used: this machine can't train the swarm's model: memory of the")
    with pytest.raises(BadInput, match=r"memory of the card: 0\.73\d GB are needed, 0\.629 GB are there"):
        arranged(tmp_path, device="cuda", vram_bytes=600 << 20)


def test_what_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='compute.device is "cuda", but torch finds no card'):
        training_machine("cuda")
    with pytest.raises(BadInput, match=r"main memory: 1\.\d+ GB are needed, 0\.2\d+ GB are there: take a smaller"):
        arranged(tmp_path, ram_bytes=200 << 20)


def test_main_memory_decides_what_lies_on_disk(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []
    # a megabyte or two beside what the processes take: that much is this model
    for extra_bytes in range(600_000, 4_000_000, 800_000):
        try:
            found = arranged(tmp_path, ram_bytes=PROCESSES_BYTES + extra_bytes)
        except BadInput:
            assert not seen
            continue
        seen.append((found.spilled, found.offload is None))
    levels = [spilled for spilled, _ in seen]
    assert seen[-1] == ("", True) and SPILL_ROUND in levels
    assert levels == sorted(levels, key=SPILLS.index, reverse=True), "more memory, less on disk"


def anchor(bench: Bench) -> bytes:
    return bench.session.replica.anchor.tobytes()


def test_layer_after_layer_is_another_way_to_the_same_rounds(tmp_path: Path) -> None:
    plain = open_bench(tmp_path / "plain")
    others = [
        open_bench(tmp_path / "two", offload_slots=2),
        open_bench(tmp_path / "fp8", offload_slots=4, precision="fp8"),
    ]
    base = GENESIS
    for r in range(2):
        losses = [bench.steps(3) for bench in (plain, *others)]
        np.testing.assert_allclose(losses[1], losses[0], atol=1e-4)
        assert losses[2] != losses[0]
        paths = [bench.close(r, base, SPARSE).path for bench in (plain, *others)]
        folded = {bench.fold(r, base, *((path, 0.5) for path in paths)).state_digest for bench in (plain, *others)}
        assert len(folded) == 1
        base = manifest(r)
    assert anchor(plain) == anchor(others[0]) == anchor(others[1])


@pytest.mark.parametrize(("first", "then"), [(0, 2), (2, 0)])
def test_a_checkpoint_is_taken_over_by_the_other_trainer(tmp_path: Path, first: int, then: int) -> None:
    one = open_bench(tmp_path, offload_slots=first)
    one.steps(3)
    one.session.handle(m.Save())
    other = open_bench(tmp_path, offload_slots=then)
    assert other.ready.resumed and other.digests() == one.digests()
    np.testing.assert_allclose(other.steps(2), one.steps(2), atol=1e-4)


def spilled(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    slots = None if what == SPILL_ROUND else OffloadPlan(2, NANO.inner.batch, "device")
    monkeypatch.setattr(resume, "arrange", lambda *_: Arrangement(Capabilities(), slots, what))


@pytest.mark.parametrize("mu", [0.0, 0.6])
@pytest.mark.parametrize("what", [SPILL_ROUND, SPILL_OPTIMIZER, SPILL_ALL])
def test_vectors_on_disk_have_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, mu: float
) -> None:
    slots = 0 if what == SPILL_ROUND else 2
    memory = open_bench(tmp_path / "memory", tiny(mu), offload_slots=slots)
    spilled(monkeypatch, what)
    where = tmp_path / "spill"
    disk = open_bench(tmp_path / "disk", tiny(mu), spill_dir=str(where))
    assert disk.ready.device.endswith(f"{what} on disk")
    losses = [run_rounds(bench, 0, 3, GENESIS)[0] for bench in (memory, disk)]
    assert losses[0] == losses[1] and memory.digests() == disk.digests()
    snapshot = tmp_path / "snapshot"
    for bench in (memory, disk):
        bench.session.handle(m.WriteSnapshot(manifest(2), str(snapshot)))
        bench.session.handle(m.Load(manifest(4), str(snapshot), 9, 4))
        bench.session.handle(m.Save())
    again = open_bench(tmp_path / "disk", tiny(mu), spill_dir=str(where))
    assert again.ready.resumed and memory.digests() == disk.digests() == again.digests()
    # nothing has a name: a crash leaves nothing, and nodes may share the folder
    assert not list(where.iterdir())


def test_a_folder_that_cannot_hold_the_spill_is_named_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for what in (SPILL_ROUND, SPILL_ALL):
        spilled(monkeypatch, what)
        with pytest.raises(BadInput, match="can't write .*file .*: choose another compute.spill_dir in the config"):
            open_bench(tmp_path / "other", spill_dir=str(tmp_path / "file"))


def test_a_spill_folder_that_was_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled(monkeypatch, SPILL_ROUND)
    where = tmp_path / "spill" / "below"
    bench = open_bench(tmp_path, spill_dir=str(where))
    bench.steps(1)
    path = bench.close(0, GENESIS).path
    before = bench.session.head
    where.rmdir()
    where.parent.rmdir()
    bench.fold(0, GENESIS, (path, 1.0))
    bench.session.handle(m.Save())
    assert bench.session.head != before and where.is_dir()


def test_a_full_disk_is_named_at_the_start_and_in_a_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled(monkeypatch, SPILL_ROUND)
    bench = open_bench(tmp_path, spill_dir=str(tmp_path / "spill"))
    bench.steps(1)
    path = bench.close(0, GENESIS).path
    own, local = bench.session.head, bench.session.replica.local.copy()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match=f"no space left for {tmp_path / 'spill'}.* of a vector: free some"):
        bench.fold(0, GENESIS, (path, 1.0))
    assert bench.session.head == own and np.array_equal(bench.session.replica.local, local)
    for what in (SPILL_ROUND, SPILL_ALL):
        spilled(monkeypatch, what)
        with pytest.raises(DiskFull, match="no space left"):
            open_bench(tmp_path / "other", spill_dir=str(tmp_path / "spill"))
    assert not list((tmp_path / "spill").iterdir())


class LosesDevice(DirectTransfer):
    """A device that is gone at the n-th load."""

    def __init__(self, loads: int) -> None:
        super().__init__()
        self.left = loads

    def to_device(self, hosts: Pieces, slot: Slot, after: tuple[Ticket, ...] = ()) -> Ticket:
        self.left -= 1
        if self.left < 0:
            raise LOST
        return super().to_device(hosts, slot, after)


def test_a_lost_device_ends_the_session_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "make_transfer", lambda _: LosesDevice(40))
    bench = open_bench(tmp_path, offload_slots=2)
    with pytest.raises(DeviceLost) as lost:
        bench.steps(20)
    said = failure(lost.value)
    assert (said.kind, said.message) == ("device", "the device was lost: CUDA error: unspecified launch failure")
    assert failure(OutOfDeviceMemory("one sequence does not fit")) == m.Failed("device", "one sequence does not fit")
    assert failure(RuntimeError("x")) == m.Failed("crash", "RuntimeError: x")
