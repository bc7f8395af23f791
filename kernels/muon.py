"""Muon for the hidden matrices and AdamW for embedding and head.

Update rules and constants: MuLoCo (arXiv 2505.23725). `muon_update` and `MatrixBatch` work on matrices wherever they
lie; `Muon` and `AdamW` on slices of one flat float32 vector on the CPU. Suffixes: N matrices of R rows and C columns,
P parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tscale.kernels.layout import Layout
from tscale.kernels.polar import PolarRule, polar_factor, polar_rule

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


@dataclass(frozen=True)
class MuonRule:
    """`m = mu*m + (1-mu)*g; W = W*(1 - lr*wd) - lr*factor*polar(m)`; with `nesterov` it is `polar(mu*m + (1-mu)*g)`.

    With `match_adam` the factor is `0.2*sqrt(max(R, C))`: every entry of the update has a root mean square of about
    0.2*lr, whatever the shape. Without, it is `sqrt(max(1, R/C))`. torch.optim.Muon is the same rule with one triple in
    every step, and with `nesterov` and without `match_adam` by default.
    """

    momentum: float
    weight_decay: float
    polar: PolarRule
    nesterov: bool = False
    match_adam: bool = True

    def factor(self, rows: int, columns: int) -> float:
        """What the polar factor is multiplied by, besides the rate."""
        return 0.2 * max(rows, columns) ** 0.5 if self.match_adam else max(1.0, rows / columns) ** 0.5


def muon_update(
    weights_NRC: torch.Tensor, grad_NRC: torch.Tensor, momentum_NRC: torch.Tensor, rule: MuonRule, lr: float
) -> None:
    """One step on equal matrices, in place on `weights` and `momentum`, on any device.

    A matrix's step depends on nothing but its own values, so layers can take theirs one at a time. The momentum may
    be bfloat16; weights that are stored in bfloat16 are widened first (`tscale.kernels.rounding`).
    """
    if momentum_NRC.dtype == grad_NRC.dtype:
        smooth = momentum_NRC.lerp_(grad_NRC, 1.0 - rule.momentum)
    else:
        smooth = momentum_NRC.to(grad_NRC.dtype).lerp_(grad_NRC, 1.0 - rule.momentum)
        momentum_NRC.copy_(smooth)
    if rule.nesterov:
        smooth = grad_NRC.lerp(smooth, rule.momentum)
    if rule.weight_decay:
        weights_NRC.mul_(1.0 - lr * rule.weight_decay)
    update = polar_factor(smooth, rule.polar)
    weights_NRC.add_(update, alpha=-lr * rule.factor(weights_NRC.shape[1], weights_NRC.shape[2]))


class Muon:
    """Muon on the batches of one flat vector on one device.

    `momentum` has their values side by side, in the batches' order; another tensor, or another `rule`, may be put in
    its place.
    """

    def __init__(
        self,
        batches: tuple[MatrixBatch, ...],
        momentum: float,
        weight_decay: float,
        device: torch.device | str = "cpu",
    ) -> None:
        self._batches = batches
        self.rule = MuonRule(momentum, weight_decay, polar_rule(torch.device(device).type))
        self.momentum = torch.zeros(sum(b.where.stop - b.where.start for b in batches), device=device)

    def step(self, flat: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        """One step on `flat` [P] with the gradient `grad` [P], in place."""
        start = 0
        for batch in self._batches:
            stop = start + batch.where.stop - batch.where.start
            weights, gradient = flat[batch.where].view(batch.shape), grad[batch.where].view(batch.shape)
            muon_update(weights, gradient, self.momentum[start:stop].view(batch.shape), self.rule, lr)
            start = stop


@dataclass(frozen=True)
class AdamStep:
    """AdamW's step number `steps` (from 1) at rate `lr`."""

    steps: int
    lr: float
    weight_decay: float

    def apply(self, weight: torch.Tensor, grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """One step on values that lie side by side, in place on all but `grad`, on any device.

        The corrections of both moments are in the rate and in epsilon, which saves two passes.
        """
        keep_first, keep_second = ADAM_BETAS
        first.lerp_(grad, 1.0 - keep_first)
        second.mul_(keep_second).addcmul_(grad, grad, value=1.0 - keep_second)
        correction = (1.0 - keep_second**self.steps) ** 0.5
        root = second.sqrt().add_(ADAM_EPS * correction)
        if self.weight_decay:
            weight.mul_(1.0 - self.lr * self.weight_decay)
        weight.addcdiv_(first, root, value=-self.lr * correction / (1.0 - keep_first**self.steps))


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
        step, start = AdamStep(self.steps, lr, self._weight_decay), 0
        for where in self._wheres:
            own = slice(start, start + where.stop - where.start)
            step.apply(flat[where], grad[where], self.first[own], self.second[own])
            start = own.stop


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

    def state_arrays(self, copy: Callable[[np.ndarray], np.ndarray] = np.copy) -> dict[str, np.ndarray]:
        """Copies of the state, by name, as `copy` makes them."""
        return {
            "muon_momentum": copy(self._muon.momentum.numpy()),
            "adam_first": copy(self._adam.first.numpy()),
            "adam_second": copy(self._adam.second.numpy()),
            "adam_steps": np.array([self._adam.steps], np.int64),
        }

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Take over a state; ValueError when a name is missing or a size differs, and then nothing is changed."""
        own = self.state_arrays(lambda array: array)
        for name, current in own.items():
            given = arrays.get(name)
            if given is None or given.shape != current.shape or given.dtype != current.dtype:
                raise ValueError(f"optimizer state {name!r} is missing or has another size")
        self._muon.momentum.copy_(torch.from_numpy(arrays["muon_momentum"]))
        self._adam.first.copy_(torch.from_numpy(arrays["adam_first"]))
        self._adam.second.copy_(torch.from_numpy(arrays["adam_second"]))
        self._adam.steps = int(arrays["adam_steps"][0])
