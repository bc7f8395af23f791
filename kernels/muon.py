"""Muon for the hidden matrices and AdamW for embedding and head, both over slices of one flat vector.

Update rules and constants: MuLoCo (arXiv 2505.23725). All arrays are float32 on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tscale.kernels.layout import Layout
from tscale.kernels.polar import minimax_triples, polar_factor

NEWTON_SCHULZ_STEPS = 5
SMALLEST_SINGULAR = 3e-3
"""Singular values below this share of the Frobenius norm are not lifted to 1 in full."""
ADAM_BETAS = (0.9, 0.99)
ADAM_EPS = 1e-8


@dataclass(frozen=True)
class MatrixBatch:
    """Equal matrices that lie side by side in the flat vector: `where` viewed as `shape` [N, R, C]."""

    where: slice
    shape: tuple[int, int, int]


def matrix_batches(layout: Layout, rows_per_head: dict[str, int]) -> tuple[MatrixBatch, ...]:
    """Groups of neighbouring "matrix" tensors to orthogonalise together.

    `rows_per_head` says for the kinds (name up to the dot) that fuse several matrices by rows how many rows one has:
    a fused projection must be split, or its parts share one scale.
    """
    batches: list[MatrixBatch] = []
    for spec, where in zip(layout.tensors, layout.slices, strict=True):
        if spec.role != "matrix":
            continue
        rows = rows_per_head.get(spec.name.split(".")[0], spec.shape[0])
        count = spec.shape[0] // rows
        last = batches[-1] if batches else None
        if last is not None and last.shape[1:] == (rows, spec.shape[1]) and last.where.stop == where.start:
            shape = (last.shape[0] + count, rows, spec.shape[1])
            batches[-1] = MatrixBatch(slice(last.where.start, where.stop), shape)
        else:
            batches.append(MatrixBatch(where, (count, rows, spec.shape[1])))
    return tuple(batches)


class Muon:
    """`m = mu*m + (1-mu)*g; W = W*(1 - lr*wd) - lr*0.2*sqrt(max(R, C))*polar(m)`, in place on `flat`.

    The factor gives every entry of the update a root mean square of about 0.2*lr, whatever the shape.
    """

    def __init__(self, batches: tuple[MatrixBatch, ...], momentum: float, weight_decay: float) -> None:
        self._batches = batches
        self._keep = momentum
        self._weight_decay = weight_decay
        self._triples = minimax_triples(NEWTON_SCHULZ_STEPS, SMALLEST_SINGULAR)
        self.momentum = torch.zeros(sum(b.where.stop - b.where.start for b in batches))

    def step(self, flat: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        """One step on `flat` [P] with the gradient `grad` [P]."""
        start = 0
        for batch in self._batches:
            size = batch.where.stop - batch.where.start
            buffer = self.momentum[start : start + size]
            buffer.lerp_(grad[batch.where], 1.0 - self._keep)
            start += size
            weights = flat[batch.where].view(batch.shape)
            if self._weight_decay:
                weights.mul_(1.0 - lr * self._weight_decay)
            scale = 0.2 * max(batch.shape[1], batch.shape[2]) ** 0.5
            weights.add_(polar_factor(buffer.view(batch.shape), self._triples), alpha=-lr * scale)


class AdamW:
    """AdamW with bias correction on some slices of the flat vector, in place."""

    def __init__(self, wheres: tuple[slice, ...], weight_decay: float) -> None:
        self._wheres = wheres
        self._weight_decay = weight_decay
        size = sum(where.stop - where.start for where in wheres)
        self.first = torch.zeros(size)
        self.second = torch.zeros(size)
        self.steps = 0

    def step(self, flat: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        """One step on `flat` [P] with the gradient `grad` [P]."""
        self.steps += 1
        keep_first, keep_second = ADAM_BETAS
        g = torch.cat([grad[where] for where in self._wheres])
        self.first.lerp_(g, 1.0 - keep_first)
        self.second.mul_(keep_second).addcmul_(g, g, value=1.0 - keep_second)
        root = (self.second / (1.0 - keep_second**self.steps)).sqrt_().add_(ADAM_EPS)
        update = self.first / root
        rate = lr / (1.0 - keep_first**self.steps)
        start = 0
        for where in self._wheres:
            size = where.stop - where.start
            if self._weight_decay:
                flat[where].mul_(1.0 - lr * self._weight_decay)
            flat[where].add_(update[start : start + size], alpha=-rate)
            start += size


class InnerOptimizer:
    """Muon on a layout's matrices and AdamW on everything else, with one state to save."""

    def __init__(self, layout: Layout, rows_per_head: dict[str, int], momentum: float, weight_decay: float) -> None:
        pairs = list(zip(layout.tensors, layout.slices, strict=True))
        self._muon = Muon(matrix_batches(layout, rows_per_head), momentum, weight_decay)
        self._adam = AdamW(tuple(where for spec, where in pairs if spec.role != "matrix"), weight_decay)

    def step(self, flat: torch.Tensor, grad: torch.Tensor, lr_muon: float, lr_adam: float) -> None:
        """One step of both on `flat` [P], in place."""
        self._muon.step(flat, grad, lr_muon)
        self._adam.step(flat, grad, lr_adam)

    def reset(self) -> None:
        """Forget all momentum."""
        for buffer in (self._muon.momentum, self._adam.first, self._adam.second):
            buffer.zero_()
        self._adam.steps = 0

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the state, by name."""
        return {
            "muon_momentum": self._muon.momentum.numpy().copy(),
            "adam_first": self._adam.first.numpy().copy(),
            "adam_second": self._adam.second.numpy().copy(),
            "adam_steps": np.array([self._adam.steps], np.int64),
        }

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Take over a state; ValueError when a name is missing or a size differs, and then nothing is changed."""
        own = self.state_arrays()
        for name, current in own.items():
            given = arrays.get(name)
            if given is None or given.shape != current.shape or given.dtype != current.dtype:
                raise ValueError(f"optimizer state {name!r} is missing or has another size")
        self._muon.momentum.copy_(torch.from_numpy(arrays["muon_momentum"]))
        self._adam.first.copy_(torch.from_numpy(arrays["adam_first"]))
        self._adam.second.copy_(torch.from_numpy(arrays["adam_second"]))
        self._adam.steps = int(arrays["adam_steps"][0])
