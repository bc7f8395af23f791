"""From a model and a machine to a plan: slots, micro-batch, memory, time and traffic, or the first thing that fails.

Memory on the device is `tscale.kernels.offload.memory`'s, which the tests hold against measured peaks. Time is an
estimate: operations over the machine's rate, copies beside them where there are slots enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.kernels.offload.memory import DeviceMemory, StepShape, device_memory, layer_bytes, step_traffic, table_bytes
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.works import AffineWorks
from tscale.node.planning.machine import Machine
from tscale.node.planning.storage import DoesNotFit, Memory, find_memory
from tscale.node.planning.work import step_flops

RESERVE_BYTES = 700 << 20
"""Context, libraries and the allocator's gaps on a card."""
OVERLAPPING_SLOTS = 4
EXACT_ROWS = 8
"""Up to here a plan is worked out a second time from its own micro-batch, which takes seconds for longer ones."""


@dataclass(frozen=True)
class Wish:
    """What is not left to the planner: slots (0: as many as suit), and whether the swarm has an outer momentum."""

    slots: int = 0
    outer_momentum: bool = False


@dataclass(frozen=True)
class StepTime:
    """Seconds of one inner step. Copies are hidden behind the computation when there are slots enough, and what is
    read from the disk and written there never is."""

    compute_s: float
    copy_s: float
    hidden: bool
    disk_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The step's length."""
        both = max(self.compute_s, self.copy_s) if self.hidden else self.compute_s + self.copy_s
        return both + self.disk_s


@dataclass(frozen=True)
class TrainingPlan:
    """How a machine trains a model. `device` is None where the processor computes.

    `layer_major` says that layers are trained one after the other, with `offload`; else all of them at once.
    """

    parameters: int
    offload: OffloadPlan
    layer_major: bool
    device: DeviceMemory | None
    memory: Memory
    step: StepTime


@dataclass(frozen=True)
class _Task:
    """What is planned, and what is known of the layers' memory."""

    cfg: ModelConfig
    shape: StepShape
    machine: Machine
    wish: Wish
    works: AffineWorks

    def device_memory(self, plan: OffloadPlan) -> DeviceMemory:
        """Without running the layers again."""
        works = self.works.at(min(plan.micro_rows, self.shape.rows))
        return device_memory(self.cfg, plan, self.shape, works=works)

    def micro_rows(self) -> Iterator[int]:
        """From the whole batch down to one sequence."""
        rows = self.shape.rows
        while rows >= 1:
            yield rows
            rows //= 2


def make_plan(
    cfg: ModelConfig, shape: StepShape, machine: Machine, wish: Wish | None = None
) -> TrainingPlan | DoesNotFit:
    """The fastest plan that fits, or what does not fit first: the device, main memory, the disk."""
    task = _Task(cfg, shape, machine, wish or Wish(), AffineWorks(cfg, shape.context))
    return _on_processor(task) if machine.device_bytes is None else _on_device(task)


def _on_processor(task: _Task) -> TrainingPlan | DoesNotFit:
    """All at once if that fits; else one layer at a time with the largest micro-batch that does."""
    cfg, shape, machine = task.cfg, task.shape, task.machine
    missing: DoesNotFit | None = None
    for offload, layer_major in _processor_choices(task):
        device = task.device_memory(offload)
        work_bytes = device.boundary_bytes + device.kept_bytes + device.work_bytes
        gradient_bytes = device.gradient_bytes
        if not layer_major:
            work_bytes = max(work_bytes, task.works.at(1).update(cfg.layers).peak_bytes)
            gradient_bytes = 4 * model_layout(cfg).numel
        needed_bytes = gradient_bytes + work_bytes + device.constant_bytes
        memory = find_memory(cfg, machine, needed_bytes, task.wish.outer_momentum, mapped_training=layer_major)
        if isinstance(memory, DoesNotFit):
            missing = memory
            continue
        compute_s = step_flops(cfg, shape, recompute=offload.recompute) / machine.flops_per_s
        step = StepTime(compute_s, 0.0, hidden=True, disk_s=memory.step_disk_bytes / machine.disk_bytes_per_s)
        return TrainingPlan(model_layout(cfg).numel, offload, layer_major, None, memory, step)
    assert missing is not None
    return missing


def _processor_choices(task: _Task) -> Iterator[tuple[OffloadPlan, bool]]:
    resident, wished = task.cfg.layers + 2, task.wish.slots
    if not wished:
        yield OffloadPlan(resident, task.shape.rows, "device", recompute=False), False
    slots = min(wished or 2, resident)
    if slots == resident:
        yield OffloadPlan(slots, task.shape.rows, "device", recompute=False), True
    for rows in task.micro_rows():
        yield OffloadPlan(slots, rows, "device"), True


def _on_device(task: _Task) -> TrainingPlan | DoesNotFit:
    """All resident if that fits; else as many slots as fit, with the largest micro-batch that hides the copies."""
    best = _fastest_on_device(task)
    if isinstance(best, DoesNotFit):
        return best
    offload, device, step = best
    host_bytes = 0
    if offload.boundary == "host":
        states = task.shape.rows * task.shape.context * task.cfg.width * 4
        host_bytes = (len(offload.stages(task.cfg.layers)) + 2) * states
    memory = find_memory(task.cfg, task.machine, host_bytes, task.wish.outer_momentum, device_bytes=device.total_bytes)
    if isinstance(memory, DoesNotFit):
        return memory
    disk_s = memory.step_disk_bytes / task.machine.disk_bytes_per_s
    step = StepTime(step.compute_s, step.copy_s, step.hidden, disk_s)
    return TrainingPlan(model_layout(task.cfg).numel, offload, True, device, memory, step)


def _fastest_on_device(task: _Task) -> tuple[OffloadPlan, DeviceMemory, StepTime] | DoesNotFit:
    cfg, available_bytes = task.cfg, task.machine.device_bytes
    assert available_bytes is not None
    best: tuple[OffloadPlan, DeviceMemory, StepTime] | None = None
    smallest_bytes = 0
    for plan in _device_choices(task):
        device = task.device_memory(plan)
        rest_bytes = device.total_bytes - device.slots_bytes + RESERVE_BYTES
        smallest_bytes = rest_bytes + 2 * layer_bytes(cfg)
        room = min(cfg.layers + 2, (available_bytes - rest_bytes) // layer_bytes(cfg))
        slots = task.wish.slots or room
        if not (2 if plan.recompute else cfg.layers + 2) <= slots <= room:
            continue
        chosen = OffloadPlan(slots, plan.micro_rows, plan.boundary, plan.recompute)
        step = _step_time(task, chosen)
        if (best is None or step.seconds < best[2].seconds) and _fits_exactly(task, chosen):
            best = chosen, task.device_memory(chosen), step
            if step.seconds <= step.compute_s:
                break
    if best is not None:
        return best
    advice = "take a smaller model, a shorter context, or a card with more memory"
    return DoesNotFit("memory of the card", smallest_bytes, available_bytes, advice)


def _device_choices(task: _Task) -> Iterator[OffloadPlan]:
    """Plans from the fastest kind to the smallest, with as few slots as each may have."""
    cfg, machine, resident = task.cfg, task.machine, task.cfg.layers + 2
    assert machine.device_bytes is not None
    least_resident_bytes = resident * layer_bytes(cfg) + 2 * table_bytes(cfg) + RESERVE_BYTES
    for boundary, recompute in (("device", False), ("device", True), ("host", True)):
        # the layers' graphs need not be looked at where not even their weights fit
        if recompute or least_resident_bytes < machine.device_bytes:
            for rows in task.micro_rows():
                yield OffloadPlan(2 if recompute else resident, rows, boundary, recompute)


def _fits_exactly(task: _Task, plan: OffloadPlan) -> bool:
    """Whether the layers themselves, asked about this micro-batch, confirm it."""
    assert task.machine.device_bytes is not None
    if min(plan.micro_rows, task.shape.rows) > EXACT_ROWS:
        return True
    return device_memory(task.cfg, plan, task.shape).total_bytes + RESERVE_BYTES <= task.machine.device_bytes


def _step_time(task: _Task, plan: OffloadPlan) -> StepTime:
    traffic = step_traffic(task.cfg, plan, task.shape)
    copy_s = max(traffic.to_device_bytes, traffic.to_host_bytes) / task.machine.bus_bytes_per_s
    compute_s = step_flops(task.cfg, task.shape, recompute=plan.recompute) / task.machine.flops_per_s
    return StepTime(compute_s, copy_s, hidden=plan.slots >= OVERLAPPING_SLOTS)
