"""Which trainer a worker has, and where its vectors lie: chosen once, at the start, for this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import torch

from tscale.kernels.block import Product
from tscale.kernels.head import block_tokens
from tscale.kernels.inner import InnerTrainer
from tscale.kernels.layout import Layout
from tscale.kernels.offload.cuda import CudaTransfer
from tscale.kernels.offload.memory import StepShape
from tscale.kernels.offload.pieces import model_places
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.spill import scratch_memory, scratch_spill
from tscale.kernels.offload.trainer import OffloadParts, OffloadTrainer
from tscale.kernels.offload.transfer import DirectTransfer, Transfer
from tscale.kernels.precision.capabilities import Capabilities
from tscale.kernels.replica import Vectors, memory_vectors
from tscale.node.checkpoint import NewArray
from tscale.node.planning.machine import Machine, this_machine
from tscale.node.planning.planner import Wish, make_plan
from tscale.node.planning.report import gigabytes, missing_as_line
from tscale.node.planning.storage import (
    PROCESSES_BYTES,
    SPILL_ALL,
    SPILL_NOTHING,
    SPILL_OPTIMIZER,
    DoesNotFit,
    vectors_of,
)
from tscale.node.statedir import write_error
from tscale.node.worker.kernel_config import KernelConfig, training_machine
from tscale.protocol.errors import BadInput

_SPILL_SETTING = "compute.spill_dir in the configuration file"
_LEAST_ON_DISK = 1024
_ACTIVATIONS_PER_LAYER = 40
"""Vectors of the model's width that a layer keeps of each token for its derivative, rounded up."""


class Trainer(Protocol):
    """What a session needs of InnerTrainer or OffloadTrainer."""

    def step(self, tokens: np.ndarray, lr_scale: float) -> float:
        """As InnerTrainer."""
        ...

    def evaluate(self, flat: np.ndarray, tokens: np.ndarray) -> float:
        """As InnerTrainer."""
        ...

    def generate(
        self, flat: np.ndarray, prompt_tokens: np.ndarray, n: int, temperature: float, seed: int
    ) -> np.ndarray:
        """As InnerTrainer."""
        ...

    def reset_momentum(self) -> None:
        """As InnerTrainer."""
        ...

    def state_arrays(self, copy: Callable[[np.ndarray], np.ndarray] = np.copy) -> dict[str, np.ndarray]:
        """As InnerTrainer."""
        ...

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """As InnerTrainer."""
        ...


class Limits(Protocol):
    """What a WorkerConfig or a node's ComputeConfig says of the machine's share; 0 is all there is."""

    @property
    def device(self) -> str: ...
    @property
    def offload_slots(self) -> int: ...
    @property
    def vram_bytes(self) -> int: ...
    @property
    def ram_bytes(self) -> int: ...


@dataclass(frozen=True)
class Arrangement:
    """Where a worker computes and where its vectors lie. `offload` None is all layers at once, on the processor.

    `spilled` is one of the planner's SPILLS. `text` says all of it in a line; `warning` is empty unless the machine
    can't do what it should.
    """

    machine: Capabilities
    offload: OffloadPlan | None
    spilled: str = SPILL_NOTHING
    warning: str = ""

    @property
    def text(self) -> str:
        """One line for people."""
        name = "the processor" if self.machine.device == "cpu" else self.machine.name
        words = [name]
        if self.offload is not None:
            plan = self.offload
            words.append(f"{plan.slots} slots for layers, {plan.micro_rows} sequences at a time")
        if self.spilled:
            words.append(f"{self.spilled} on disk")
        return ", ".join(words)


def arrange(config: Limits, kernels: KernelConfig) -> Arrangement:
    """The plan for this machine and this model within the limits of `config`.

    Raises:
        BadInput: there is no such device, or the model does not fit; the line says what is missing.
    """
    found = training_machine(config.device)
    if found.device == "cpu":
        return _on_processor(config, kernels)
    try:
        return _planned(config, kernels, found)
    except BadInput as error:
        if config.device != "auto":
            raise
        warning = f"{found.name} is not used: {error}"
    return replace(_on_processor(config, kernels), warning=warning)


def _on_processor(config: Limits, kernels: KernelConfig) -> Arrangement:
    if not _clearly_fits(config, kernels):
        return _planned(config, kernels, Capabilities())
    if not config.offload_slots:
        return Arrangement(Capabilities(), None)
    resident = kernels.model.layers + 2
    slots = min(config.offload_slots, resident)
    return Arrangement(Capabilities(), OffloadPlan(slots, kernels.inner.batch, "device", recompute=slots < resident))


def _clearly_fits(config: Limits, kernels: KernelConfig) -> bool:
    """Whether half of main memory is more than enough, so that nothing needs to be planned (which takes seconds)."""
    model, inner = kernels.model, kernels.inner
    vectors = vectors_of(model, kernels.rule.mu != 0)
    held_bytes = 2 * vectors.copies_bytes + vectors.weights_bytes + vectors.round_bytes
    a_token = model.layers * _ACTIVATIONS_PER_LAYER * max(model.width, model.projection_width)
    # a block of logits and their softmax
    work_bytes = 4 * inner.batch * inner.context * a_token + 4 * 2 * block_tokens(model.vocab) * model.vocab
    return PROCESSES_BYTES + held_bytes + work_bytes < _ram_bytes(config) // 2


def _ram_bytes(config: Limits) -> int:
    there = int(psutil.virtual_memory().total)
    return min(config.ram_bytes or there, there)


def _planned(config: Limits, kernels: KernelConfig, found: Capabilities) -> Arrangement:
    # what does not fit on the disk is found when its space is taken
    machine = _within_limits(this_machine(None, found=found), config)
    shape = StepShape(kernels.inner.batch, kernels.inner.context)
    plan = make_plan(kernels.model, shape, machine, Wish(config.offload_slots, kernels.rule.mu != 0))
    if isinstance(plan, DoesNotFit):
        raise BadInput(f"this machine can't train the swarm's model: {missing_as_line(plan)}")
    return Arrangement(found, plan.offload if plan.layer_major else None, plan.memory.spilled)


def _within_limits(machine: Machine, config: Limits) -> Machine:
    machine = replace(machine, ram_bytes=_ram_bytes(config))
    if machine.device_bytes is None:
        return machine
    free_bytes, _ = torch.cuda.mem_get_info()
    return replace(machine, device_bytes=min(free_bytes, config.vram_bytes or free_bytes))


def make_arrays(arrangement: Arrangement, spill_dir: str) -> NewArray:
    """Who makes arrays of the model's size: main memory, or files without a name, of which a crash leaves nothing.

    Making one in a file raises DiskFull or BadInput.
    """
    if arrangement.spilled == SPILL_NOTHING:
        return np.empty
    folder = _made(Path(spill_dir))
    make = scratch_memory(folder)

    def new_array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if np.dtype(dtype) != np.float32 or len(shape) != 1 or shape[0] < _LEAST_ON_DISK:
            return np.empty(shape, dtype)
        _made(folder)  # somebody may have tidied it up
        try:
            array: np.ndarray = make(shape[0]).numpy()
        except OSError as error:
            raise write_error(folder / f"{gigabytes(4 * shape[0])} of a vector", error, _SPILL_SETTING) from error
        return array

    return new_array


def make_vectors(arrangement: Arrangement, layout: Layout, new_array: NewArray) -> Vectors:
    """Who makes the replica's vectors."""

    def new_vector() -> np.ndarray:
        return new_array((layout.numel,), "f4")

    return Vectors(new_vector, new_vector if arrangement.spilled == SPILL_ALL else memory_vectors(layout).local)


def make_trainer(
    arrangement: Arrangement,
    kernels: KernelConfig,
    local: np.ndarray,
    counts: np.ndarray,
    product: Product | None,
    spill_dir: str,
) -> Trainer:
    """The trainer of `local` (float32 [P]); `counts` are the data's unigram counts. Raises DiskFull."""
    if arrangement.offload is None:
        return InnerTrainer(kernels.model, kernels.inner, local, counts, product)
    optimizer = None
    if arrangement.spilled in (SPILL_OPTIMIZER, SPILL_ALL):
        folder = _made(Path(spill_dir))
        try:
            # a checkpoint has its own copy, so that nothing is resumed here
            optimizer = scratch_spill(folder, model_places(kernels.model))
        except OSError as error:
            raise write_error(folder / "the optimizer", error, _SPILL_SETTING) from error
    transfer, mapped = make_transfer(arrangement.machine), arrangement.spilled == SPILL_ALL
    parts = OffloadParts(arrangement.offload, transfer, product, optimizer, mapped=mapped)
    return OffloadTrainer(kernels.model, kernels.inner, local, counts, parts)


def make_transfer(machine: Capabilities) -> Transfer:
    """The copies between host and device; on the processor there are none."""
    return DirectTransfer() if machine.device == "cpu" else CudaTransfer(machine.torch_device)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error, _SPILL_SETTING) from error
    return folder
