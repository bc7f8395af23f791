"""What lies in main memory and what on disk: a training's vectors, its optimizer, and what the node keeps of it."""

from __future__ import annotations

from dataclasses import dataclass

from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.kernels.offload.memory import layer_bytes, table_bytes
from tscale.node.planning.machine import Machine

FLOAT_BYTES = 4
PROCESSES_BYTES = 1400 << 20
"""A node, its network process and its worker, before there is a model."""
ROUND_VECTORS = 5
"""The anchor, the one before or the next, residual, start, spare: read and written once a round."""
CHECKPOINT_VECTORS = 4
"""Two anchors, residual, start; local parameters and optimizer come on top."""
CHECKPOINTS = 3
"""Two are kept, and a new one is whole before the oldest goes."""
SNAPSHOTS = 4
SPILL_NOTHING, SPILL_ROUND = "", "round vectors"
SPILL_OPTIMIZER, SPILL_ALL = "round vectors and optimizer", "round vectors, optimizer and weights"
SPILLS = (SPILL_NOTHING, SPILL_ROUND, SPILL_OPTIMIZER, SPILL_ALL)


@dataclass(frozen=True)
class Memory:
    """Bytes that a plan takes, by place. `spilled`, one of SPILLS, names what lies on disk instead of in main memory.

    `disk_bytes` is with checkpoints and snapshots; `step_disk_bytes` is what a step reads and writes there.
    """

    device_bytes: int
    ram_bytes: int
    disk_bytes: int
    spilled: str = SPILL_NOTHING
    step_disk_bytes: int = 0


@dataclass(frozen=True)
class DoesNotFit:
    """The first thing that is missing, and what to change."""

    what: str
    needed_bytes: int
    available_bytes: int
    advice: str


@dataclass(frozen=True)
class Vectors:
    """Bytes of what has the model's size. `copies` are those that a checkpoint takes between two steps."""

    weights_bytes: int
    optimizer_bytes: int
    round_bytes: int
    copies_bytes: int
    stored_bytes: int


def vectors_of(cfg: ModelConfig, outer_momentum: bool) -> Vectors:
    """What a worker holds and keeps of a model; with an outer momentum each anchor has one."""
    state_bytes = FLOAT_BYTES * model_layout(cfg).numel
    momentum_bytes = 2 * state_bytes if outer_momentum else 0
    optimizer_bytes = cfg.layers * layer_bytes(cfg) + 4 * table_bytes(cfg)
    checkpoint_bytes = (1 + CHECKPOINT_VECTORS) * state_bytes + momentum_bytes + optimizer_bytes
    snapshot_bytes = state_bytes + momentum_bytes // 2
    return Vectors(
        weights_bytes=state_bytes,
        optimizer_bytes=optimizer_bytes,
        round_bytes=ROUND_VECTORS * state_bytes + momentum_bytes,
        copies_bytes=state_bytes + optimizer_bytes,
        stored_bytes=CHECKPOINTS * checkpoint_bytes + SNAPSHOTS * snapshot_bytes,
    )


def spilled_bytes(vectors: Vectors, spilled: str) -> int:
    """What lies on disk in place of main memory when `spilled`, one of SPILLS, does."""
    parts = (vectors.round_bytes + vectors.copies_bytes, vectors.optimizer_bytes, vectors.weights_bytes)
    return sum(parts[: SPILLS.index(spilled)])


def find_memory(
    cfg: ModelConfig,
    machine: Machine,
    work_bytes: int,
    outer_momentum: bool,
    *,
    mapped_training: bool = True,
    device_bytes: int = 0,
) -> Memory | DoesNotFit:
    """Main memory and disk, beside `work_bytes` of main memory that a step works in.

    What is touched once a round goes to the disk first, then what is touched in every step, where the trainer can
    have it there (`mapped_training`).
    """
    vectors = vectors_of(cfg, outer_momentum)
    weights, optimizer = vectors.weights_bytes, vectors.optimizer_bytes
    rounds = vectors.round_bytes + vectors.copies_bytes
    on_disk = {spilled: spilled_bytes(vectors, spilled) for spilled in SPILLS}
    levels = [
        Memory(device_bytes, weights + optimizer + rounds, 0),
        Memory(device_bytes, weights + optimizer, on_disk[SPILL_ROUND], SPILL_ROUND),
    ]
    if mapped_training:
        # read and written once a step; the weights are read for both passes and written once
        levels.append(Memory(device_bytes, weights, on_disk[SPILL_OPTIMIZER], SPILL_OPTIMIZER, 2 * optimizer))
        levels.append(Memory(device_bytes, 0, on_disk[SPILL_ALL], SPILL_ALL, 2 * optimizer + 3 * weights))
    fixed_bytes = PROCESSES_BYTES + work_bytes
    for level in levels:
        if fixed_bytes + level.ram_bytes > machine.ram_bytes:
            continue
        disk_bytes = vectors.stored_bytes + level.disk_bytes
        if machine.disk_bytes is not None and disk_bytes > machine.disk_bytes:
            advice = "free space, or put the state directory on a larger disk with --state-dir"
            return DoesNotFit("disk", disk_bytes, machine.disk_bytes, advice)
        ram_bytes = fixed_bytes + level.ram_bytes
        return Memory(device_bytes, ram_bytes, disk_bytes, level.spilled, level.step_disk_bytes)
    advice = "take a smaller model, a shorter context, or add memory"
    return DoesNotFit("main memory", fixed_bytes + levels[-1].ram_bytes, machine.ram_bytes, advice)
