"""From a model and a machine to a plan: slots, micro-batch, memory, time and traffic, or the first thing that fails.

Memory on the device is `tscale.kernels.offload.memory`'s, which the tests hold against measured peaks. Time is an
estimate: operations over the machine's rate, copies beside them where there are slots enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.kernels.offload.memory import DeviceMemory, StepShape, device_memory, host_memory, layer_bytes, step_traffic
from tscale.kernels.offload.plan import OffloadPlan, resident_plan
from tscale.node.planning.machine import Machine
from tscale.node.planning.work import step_flops

FLOAT_BYTES = 4
RESERVE_BYTES = 700 << 20
"""Context, libraries and the allocator's gaps on a card; a node's two processes in main memory take as much each."""
ROUND_VECTORS = 5
"""Anchor and the one before, residual, start, and the place for the next: read and written once a round."""
OVERLAPPING_SLOTS = 4
SPILL_ROUND, SPILL_ALL = "round vectors", "round vectors, weights and optimizer"


@dataclass(frozen=True)
class Memory:
    """Bytes that a plan takes, by place. `spilled` names what lies on disk instead of in main memory."""

    device_bytes: int
    ram_bytes: int
    disk_bytes: int
    spilled: str = ""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one inner step. Copies are hidden behind the computation when there are slots enough."""

    compute_s: float
    copy_s: float
    hidden: bool

    @property
    def seconds(self) -> float:
        """The step's length."""
        return max(self.compute_s, self.copy_s) if self.hidden else self.compute_s + self.copy_s


@dataclass(frozen=True)
class TrainingPlan:
    """How a machine trains a model. `device` is None where the processor computes."""

    parameters: int
    offload: OffloadPlan
    device: DeviceMemory | None
    memory: Memory
    step: StepTime


@dataclass(frozen=True)
class DoesNotFit:
    """The first thing that is missing, and what to change."""

    what: str
    needed_bytes: int
    available_bytes: int
    advice: str


def make_plan(cfg: ModelConfig, shape: StepShape, machine: Machine) -> TrainingPlan | DoesNotFit:
    """The fastest plan that fits, or what does not fit first: the device, main memory, the disk."""
    found = _on_device(cfg, shape, machine) if machine.device_bytes is not None else _on_processor(cfg, shape, machine)
    if isinstance(found, DoesNotFit):
        return found
    offload, device, step = found
    memory = _memory(cfg, shape, machine, offload, device)
    if isinstance(memory, DoesNotFit):
        return memory
    return TrainingPlan(model_layout(cfg).numel, offload, device if machine.device_bytes else None, memory, step)


_Found = tuple[OffloadPlan, DeviceMemory, StepTime]


def _on_processor(cfg: ModelConfig, shape: StepShape, machine: Machine) -> _Found:
    plan = resident_plan(cfg.layers, shape.rows)
    compute_s = step_flops(cfg, shape, recompute=False) / machine.flops_per_s
    return plan, device_memory(cfg, plan, shape), StepTime(compute_s, 0.0, hidden=True)


def _on_device(cfg: ModelConfig, shape: StepShape, machine: Machine) -> _Found | DoesNotFit:
    """All resident if that fits; else as many slots as fit, with the largest micro-batch that hides the copies."""
    assert machine.device_bytes is not None
    best: _Found | None = None
    smallest_bytes = 0
    for plan, device in _choices(cfg, shape):
        rest_bytes = device.total_bytes - device.slots_bytes + RESERVE_BYTES
        smallest_bytes = rest_bytes + 2 * layer_bytes(cfg)
        slots = min(cfg.layers + 2, (machine.device_bytes - rest_bytes) // layer_bytes(cfg))
        if slots < (2 if plan.recompute else cfg.layers + 2):
            continue
        chosen = OffloadPlan(slots, plan.micro_rows, plan.boundary, plan.recompute)
        step = _step_time(cfg, chosen, shape, machine)
        if best is None or step.seconds < best[2].seconds:
            best = chosen, device_memory(cfg, chosen, shape), step
        if step.seconds <= step.compute_s:
            break
    if best is not None:
        return best
    advice = "take a smaller model, a shorter context, or a card with more memory"
    return DoesNotFit("memory of the card", smallest_bytes, machine.device_bytes, advice)


def _choices(cfg: ModelConfig, shape: StepShape) -> Iterator[tuple[OffloadPlan, DeviceMemory]]:
    """Plans from the fastest kind to the smallest, with what they take on the device."""
    for boundary, recompute in (("device", False), ("device", True), ("host", True)):
        micro_rows = shape.rows
        while micro_rows >= 1:
            plan = OffloadPlan(2 if recompute else cfg.layers + 2, micro_rows, boundary, recompute)
            yield plan, device_memory(cfg, plan, shape)
            micro_rows //= 2


def _step_time(cfg: ModelConfig, plan: OffloadPlan, shape: StepShape, machine: Machine) -> StepTime:
    traffic = step_traffic(cfg, plan, shape)
    copy_s = max(traffic.to_device_bytes, traffic.to_host_bytes) / machine.bus_bytes_per_s
    compute_s = step_flops(cfg, shape, recompute=plan.recompute) / machine.flops_per_s
    return StepTime(compute_s, copy_s, hidden=plan.slots >= OVERLAPPING_SLOTS)


def _memory(
    cfg: ModelConfig, shape: StepShape, machine: Machine, offload: OffloadPlan, device: DeviceMemory
) -> Memory | DoesNotFit:
    """Main memory and disk. What is touched once a round goes to the disk first, then all of the model's size."""
    state_bytes = FLOAT_BYTES * model_layout(cfg).numel
    host = host_memory(cfg, offload, shape)
    fixed_bytes = 2 * RESERVE_BYTES + host.boundary_bytes
    if machine.device_bytes is None:
        fixed_bytes += state_bytes + device.kept_bytes + device.work_bytes  # gradient and activations
    training_bytes, round_bytes = host.weights_bytes + host.optimizer_bytes, ROUND_VECTORS * state_bytes
    # two checkpoints and two snapshots, each written whole before the older one goes
    stored_bytes = 2 * (training_bytes + 3 * state_bytes) + 2 * state_bytes
    for spilled, in_ram_bytes, on_disk_bytes in (
        ("", training_bytes + round_bytes, 0),
        (SPILL_ROUND, training_bytes, round_bytes),
        (SPILL_ALL, 0, training_bytes + round_bytes),
    ):
        if fixed_bytes + in_ram_bytes <= machine.ram_bytes:
            if stored_bytes + on_disk_bytes > machine.disk_bytes:
                advice = "free space, or put the state directory on a larger disk with --state-dir"
                return DoesNotFit("disk", stored_bytes + on_disk_bytes, machine.disk_bytes, advice)
            device_bytes = 0 if machine.device_bytes is None else device.total_bytes
            return Memory(device_bytes, fixed_bytes + in_ram_bytes, stored_bytes + on_disk_bytes, spilled)
    advice = "take a smaller model, a shorter context, or add memory"
    return DoesNotFit("main memory", fixed_bytes, machine.ram_bytes, advice)
