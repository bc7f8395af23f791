"""The optimizer's state in host memory, and Muon's step on a stage of layers from pieces that lie anywhere.

The same arithmetic as on the whole flat vector (`tscale.kernels.muon`), and the same state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tscale.kernels.muon import MuonRule, muon_update
from tscale.kernels.offload.pieces import ModelPlaces, StagePlaces
from tscale.kernels.offload.transfer import Pieces


class HostOptimizer:
    """The optimizer's state in host memory: Muon's momentum of all matrices, AdamW's two moments of both tables.

    `momentum` is float32 in the layout's order without the tables; `first` and `second` are [embed, head]. `mapped`
    says that they are views of a file, whose pages can't be pinned.
    """

    mapped = False

    def __init__(self, momentum: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        self.momentum = momentum
        self.first = first
        self.second = second
        self._steps = 0

    @property
    def adam_steps(self) -> int:
        """AdamW's steps so far."""
        return self._steps

    @adam_steps.setter
    def adam_steps(self, steps: int) -> None:
        self._steps = steps

    def begin_update(self, unit: int) -> None:
        """The state of one layer, or of a table (L: embed, L + 1: head), is about to change."""

    def end_update(self, unit: int) -> None:
        """It has changed, in host memory too."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by the names of a checkpoint."""
        return {"muon_momentum": self.momentum, "adam_first": self.first, "adam_second": self.second}

    def reset(self) -> None:
        """Forget all momentum."""
        for tensor in self.tensors.values():
            tensor.zero_()
        self.adam_steps = 0

    def state_arrays(self, copy: Callable[[np.ndarray], np.ndarray] = np.copy) -> dict[str, np.ndarray]:
        """Copies of the state, by name, as `copy` makes them; the names and sizes are those of InnerOptimizer."""
        arrays = {name: copy(tensor.numpy()) for name, tensor in self.tensors.items()}
        return arrays | {"adam_steps": np.array([self.adam_steps], np.int64)}

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Take over a state; ValueError when a name is missing or a size differs, and then nothing is changed."""
        self.check(arrays)
        for name, tensor in self.tensors.items():
            tensor.copy_(torch.from_numpy(arrays[name]))
        self.adam_steps = int(arrays["adam_steps"][0])

    def check(self, arrays: dict[str, np.ndarray]) -> None:
        """ValueError unless `arrays` is a state of this size."""
        sizes = {name: (tuple(tensor.shape), np.dtype(np.float32)) for name, tensor in self.tensors.items()}
        for name, size in (sizes | {"adam_steps": ((1,), np.dtype(np.int64))}).items():
            given = arrays.get(name)
            if given is None or (given.shape, given.dtype) != size:
                raise ValueError(f"optimizer state {name!r} is missing or has another size")


def memory_optimizer(places: ModelPlaces) -> HostOptimizer:
    """A state of zeros in main memory."""
    moments = 2 * places.table_numel
    return HostOptimizer(torch.zeros(places.matrix_numel), torch.zeros(moments), torch.zeros(moments))


class LayerUpdate:
    """Muon on the matrices of a stage. Fused projections are split into heads, as in the whole vector."""

    def __init__(self, head_dim: int, rule: MuonRule) -> None:
        self._head_dim = head_dim
        self._rule = rule

    def apply(self, stage: StagePlaces, weights: Pieces, gradients: Pieces, momentum: Pieces, lr: float) -> None:
        """One step, in place on `weights` and `momentum`."""
        for (rows, columns), fused, *tensors in zip(
            stage.shapes, stage.fused, weights, gradients, momentum, strict=True
        ):
            shape = (-1, self._head_dim if fused else rows, columns)
            weight, gradient, kept = (tensor.view(shape) for tensor in tensors)
            muon_update(weight, gradient, kept, self._rule, lr)
