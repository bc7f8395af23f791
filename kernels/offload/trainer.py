"""Inner training with weights and optimizer state in host memory: the same interface and state as InnerTrainer.

A few layers' weights are on the device at a time. Backward updates a stage (a layer, or a few) as soon as its gradient
is complete, and its weights and its momentum go back to host memory.

Bytes a step, with W the bytes of one layer's matrices, E those of a table (V*D), and L layers, of which
`K = plan.kept_layers(L)` stay from forward to backward:

    to the device   W * (L + (L - K) + L)       weights forward, weights backward, momentum
                  + E * (3 + 4)                 embedding, head, embedding again; two moments of both
    to the host     W * 2L + E * (2 + 4)        weights and momentum; tables and moments

and with boundary activations on the host, N stages, and S the bytes of one state of the whole batch (rows * T * D):

    to the device   S * (N + 1) + S * (2N + 1)  stages and head; state and gradient of every stage, gradient of embed
    to the host     S * (N + 1) + S * (N + 1)   states 0 to N, and their gradients

`tscale.kernels.offload.memory` has it as functions. Tokens are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from tscale.kernels.block import BlockTables, Product, output_bias
from tscale.kernels.inner import EVALUATION_BATCH_TOKENS, InnerConfig, next_token
from tscale.kernels.model_config import ModelConfig, layer_reaches
from tscale.kernels.muon import MuonRule
from tscale.kernels.offload.batch import BatchRun, Network
from tscale.kernels.offload.boundary import Boundary, DeviceBoundary, HostBoundary, Memory, micro_batches
from tscale.kernels.offload.engine import LayerEngine, Rates
from tscale.kernels.offload.errors import DeviceLost, is_device_lost
from tscale.kernels.offload.pieces import model_places
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.transfer import Transfer
from tscale.kernels.offload.update import HostOptimizer, LayerUpdate, memory_optimizer
from tscale.kernels.polar import polar_rule

EVALUATION_GROUP_TOKENS = 16384
"""So many tokens share one pass of the weights over the bus when nothing is trained."""


@dataclass(frozen=True)
class OffloadParts:
    """Where and how an OffloadTrainer works.

    `optimizer` is its state (None: zeros in main memory); `scratch` makes the host's tensors for boundary activations
    (None: the transfer's, which copy fastest). Both may be files: `tscale.kernels.offload.spill`. `mapped` says that
    the parameters are in a file, whose pages can't be pinned.
    """

    plan: OffloadPlan
    transfer: Transfer
    product: Product | None = None
    optimizer: HostOptimizer | None = None
    scratch: Memory | None = None
    mapped: bool = False


class OffloadTrainer:
    """Trains `local` (float32 [P], C-contiguous, shared and updated in place) on token batches.

    As InnerTrainer: `local` may be changed between steps, and the optimizer's state has the same names and sizes.
    `micro_rows` and `recompute` begin as planned and give way when memory is short; the batch stays what it is.

    Raises:
        ValueError: the plan does not fit the model.
        OutOfDeviceMemory: one sequence does not fit. Stages behind the one that failed have had their step.
        DeviceLost: the same may be true; start again from a checkpoint.
    """

    def __init__(
        self,
        model_cfg: ModelConfig,
        inner_cfg: InnerConfig,
        local: np.ndarray,
        counts: np.ndarray,
        parts: OffloadParts,
    ) -> None:
        parts.plan.check(model_cfg.layers)
        places = model_places(model_cfg)
        places.layout.check(local, "parameters")
        self.model_cfg = model_cfg
        self.inner_cfg = inner_cfg
        self.layout = places.layout
        self.micro_rows = min(parts.plan.micro_rows, inner_cfg.batch)
        self.recompute = parts.plan.recompute
        self._scratch = parts.scratch
        self._host_boundary = parts.plan.boundary == "host"
        self._transfer = parts.transfer
        self._flat = torch.from_numpy(local)
        self._optimizer = parts.optimizer or memory_optimizer(places)
        held = () if parts.mapped else (self._flat,)
        for tensor in (*held, *(() if self._optimizer.mapped else self._optimizer.tensors.values())):
            parts.transfer.pin(tensor)
        device = parts.transfer.device
        bias_V = output_bias(counts).to(device)
        reaches = layer_reaches(model_cfg)
        self._network = Network(model_cfg, reaches, BlockTables(model_cfg, device), bias_V, parts.product)
        rule = MuonRule(inner_cfg.momentum, inner_cfg.weight_decay, polar_rule(device.type))
        update = LayerUpdate(model_cfg.head_dim, rule)
        self._engine = LayerEngine(places, parts.plan, parts.transfer, update)
        self._boundaries: dict[tuple[int, int, int], Boundary] = {}

    @property
    def skipped_updates(self) -> int:
        """How many stages and tables kept their weights and momentum, because their gradient was not finite."""
        return self._engine.skipped_updates

    def step(self, tokens: np.ndarray, lr_scale: float) -> float:
        """One inner step on int64 [B, T+1]; returns the loss before it, in nats per token.

        A loss that is not finite leaves the parameters and the optimizer untouched. So does a gradient that is not
        finite, from the stage in which it appears down to the embedding; stages above have had their step by then,
        with gradients that were. Either way what is returned is not finite: the step does not count.
        """
        cfg = self.inner_cfg
        rates = Rates(cfg.lr_muon * lr_scale, cfg.lr_adam * lr_scale, cfg.weight_decay)
        rows, positions = tokens.shape[0], tokens.shape[1] - 1
        with self._device():
            run = self._run(tokens, self.micro_rows, self._boundary(rows, positions))
            run.recompute = self.recompute
            try:
                return self._engine.train(run, self._flat, self._optimizer, rates)
            finally:
                self.recompute = run.recompute
                self.micro_rows = min(self.micro_rows, max(len(part) for part in run.ranges))

    def evaluate(self, flat: np.ndarray, tokens: np.ndarray) -> float:
        """Mean loss in nats per token of the parameters `flat` [P] on int64 [N, T+1]; changes nothing."""
        positions = tokens.shape[1] - 1
        micro_rows = max(1, min(EVALUATION_BATCH_TOKENS, self.micro_rows * self.inner_cfg.context) // positions)
        group = max(1, EVALUATION_GROUP_TOKENS // (micro_rows * positions)) * micro_rows
        total = 0.0
        with self._device():
            for start in range(0, tokens.shape[0], group):
                part = tokens[start : start + group]
                run = self._run(part, micro_rows, DeviceBoundary(positions))
                head_VD = self._engine.forward(run, torch.from_numpy(flat))
                total += float(run.loss(head_VD, self._engine.stages)) * part.shape[0]
                self._engine.end(run)
        return total / tokens.shape[0]

    def generate(
        self, flat: np.ndarray, prompt_tokens: np.ndarray, n: int, temperature: float, seed: int
    ) -> np.ndarray:
        """`n` tokens that follow the prompt (int64, at least one), int64 [n]; temperature 0 takes the likeliest."""
        if prompt_tokens.size == 0:
            raise ValueError("the prompt needs at least one token")
        noise = torch.Generator().manual_seed(seed)
        tokens = prompt_tokens.astype(np.int64)
        with self._device():
            for _ in range(n):
                chosen = next_token(self._last_logits(flat, tokens), temperature, noise)
                tokens = np.append(tokens, chosen.numpy())
        return tokens[prompt_tokens.size :]

    def reset_momentum(self) -> None:
        """Forget the optimizer's state, after a gap of more than two rounds."""
        self._optimizer.reset()

    def state_arrays(self, copy: Callable[[np.ndarray], np.ndarray] = np.copy) -> dict[str, np.ndarray]:
        """The optimizer's state as copies, for a checkpoint; `copy` makes them, in a file if need be."""
        return self._optimizer.state_arrays(copy)

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Take over a checkpoint's state; ValueError when it does not fit."""
        self._optimizer.load_state_arrays(arrays)

    def _last_logits(self, flat: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
        seen = tokens[-self.model_cfg.window :]
        # a run reads all but the last of its tokens, which is a target
        run = self._run(np.append(seen, 0)[None], 1, DeviceBoundary(seen.size))
        head_VD = self._engine.forward(run, torch.from_numpy(flat))
        logits_V = run.last_logits(head_VD, self._engine.stages).cpu()
        self._engine.end(run)
        return logits_V

    def _run(self, tokens: np.ndarray, micro_rows: int, boundary: Boundary) -> BatchRun:
        tokens_BT1 = torch.from_numpy(tokens).to(self._transfer.device)
        return BatchRun(self._network, tokens_BT1, boundary, micro_batches(tokens.shape[0], micro_rows))

    def _boundary(self, rows: int, positions: int) -> Boundary:
        if not self._host_boundary:
            return DeviceBoundary(positions)
        micro_rows = min(self.micro_rows, rows)
        size = (rows, positions, micro_rows)
        if size not in self._boundaries:
            # one at a time: this is most of the host memory, and its slots are the device's
            self._boundaries.clear()
            row_shape = (self.model_cfg.width, positions)
            self._boundaries[size] = HostBoundary(self._transfer, row_shape, rows, micro_rows, self._scratch)
        return self._boundaries[size]

    @contextmanager
    def _device(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_device_lost(error):
                raise DeviceLost(f"the device was lost: {str(error).splitlines()[0]}") from error
            raise
