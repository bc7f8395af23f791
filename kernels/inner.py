"""Inner training of one peer: steps on its local parameters, evaluation and text generation, on the CPU in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tscale.kernels.block import Product
from tscale.kernels.model import TscaleModel
from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.kernels.muon import InnerOptimizer

EVALUATION_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class InnerConfig:
    """What one inner step is. `batch` sequences of `context` tokens; rates at their peak; a schedule over the tokens
    of the whole swarm, not of this peer. Raises ValueError on values that make no sense."""

    batch: int
    context: int
    lr_muon: float
    lr_adam: float
    weight_decay: float
    momentum: float
    warmup_tokens: int
    schedule_tokens: int
    final_lr_fraction: float

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.batch < 1 or self.context < 1:
            raise ValueError("batch and context must be at least 1")
        if min(self.lr_muon, self.lr_adam, self.weight_decay) < 0.0 or not 0.0 <= self.momentum < 1.0:
            raise ValueError("rates and weight decay must not be negative, momentum in [0, 1)")
        if not 0 <= self.warmup_tokens <= self.schedule_tokens or not 0.0 <= self.final_lr_fraction <= 1.0:
            raise ValueError("need 0 <= warmup_tokens <= schedule_tokens and 0 <= final_lr_fraction <= 1")


def lr_scale(cfg: InnerConfig, total_tokens: int) -> float:
    """Factor on both learning rates after `total_tokens` of the swarm: linear warm-up, then cosine to the final
    fraction, which it keeps. The first step already has a rate."""
    if total_tokens < cfg.warmup_tokens:
        return max(total_tokens / cfg.warmup_tokens, 0.1)
    span = max(cfg.schedule_tokens - cfg.warmup_tokens, 1)
    done = min((total_tokens - cfg.warmup_tokens) / span, 1.0)
    return cfg.final_lr_fraction + (1.0 - cfg.final_lr_fraction) * 0.5 * (1.0 + math.cos(math.pi * done))


def next_token(logits_V: torch.Tensor, temperature: float, noise: torch.Generator) -> torch.Tensor:
    """A token drawn from the logits, int64 [1]; temperature 0 takes the likeliest."""
    if temperature > 0.0:
        return torch.multinomial(torch.softmax(logits_V / temperature, 0), 1, generator=noise)
    return logits_V.argmax(0, keepdim=True)


class InnerTrainer:
    """Trains `local` (float32 [P], C-contiguous, shared and updated in place) on token batches.

    `counts` are the unigram counts of the training data, int64 [V]. The optimizer's state is this object's own; it
    knows nothing of rounds, so `local` may be changed between steps. `product` replaces the layers' matrix products
    in training, evaluation and generation (None: float32).
    """

    def __init__(
        self,
        model_cfg: ModelConfig,
        inner_cfg: InnerConfig,
        local: np.ndarray,
        counts: np.ndarray,
        product: Product | None = None,
    ) -> None:
        self.model_cfg = model_cfg
        self.inner_cfg = inner_cfg
        self.layout = model_layout(model_cfg)
        self._flat = torch.from_numpy(local)
        self._grad = torch.zeros_like(self._flat)
        self._model = TscaleModel(model_cfg, self._flat, counts, product)
        self._model.bind_grad(self._grad)
        self._other = TscaleModel(model_cfg, self._flat, counts, product)
        self._optimizer = InnerOptimizer(
            self.layout,
            {"qc": model_cfg.head_dim, "kv": model_cfg.head_dim},
            inner_cfg.momentum,
            inner_cfg.weight_decay,
        )

    def step(self, tokens: np.ndarray, lr_scale: float) -> float:
        """One inner step on int64 [B, T+1]; returns the loss before it, in nats per token.

        A loss or a gradient that is not finite leaves the parameters and the optimizer untouched, and what is returned
        is not finite either: the step did not happen.
        """
        self._grad.zero_()
        loss = self._model.loss(torch.from_numpy(tokens))
        value = float(loss.detach())
        if not math.isfinite(value):
            return value
        loss.backward()
        # one number among millions shows in their sum
        if not math.isfinite(float(self._grad.sum())):
            return math.nan
        with torch.no_grad():
            cfg = self.inner_cfg
            self._optimizer.step(self._flat, self._grad, cfg.lr_muon * lr_scale, cfg.lr_adam * lr_scale)
        return value

    def evaluate(self, flat: np.ndarray, tokens: np.ndarray) -> float:
        """Mean loss in nats per token of the parameters `flat` [P] on int64 [N, T+1]; changes nothing."""
        self._other.bind(torch.from_numpy(flat))
        rows = max(1, EVALUATION_BATCH_TOKENS // (tokens.shape[1] - 1))
        total = 0.0
        with torch.no_grad():
            for start in range(0, tokens.shape[0], rows):
                part = torch.from_numpy(tokens[start : start + rows])
                total += float(self._other.loss(part)) * part.shape[0]
        return total / tokens.shape[0]

    def generate(
        self, flat: np.ndarray, prompt_tokens: np.ndarray, n: int, temperature: float, seed: int
    ) -> np.ndarray:
        """`n` tokens that follow the prompt (int64, at least one), int64 [n]; temperature 0 takes the likeliest."""
        if prompt_tokens.size == 0:
            raise ValueError("the prompt needs at least one token")
        self._other.bind(torch.from_numpy(flat))
        noise = torch.Generator().manual_seed(seed)
        tokens = torch.from_numpy(prompt_tokens.astype(np.int64))
        with torch.no_grad():
            for _ in range(n):
                logits_V = self._other(tokens[None, -self.model_cfg.window :])[-1]
                tokens = torch.cat((tokens, next_token(logits_V, temperature, noise)))
        return tokens[prompt_tokens.size :].numpy()

    def reset_momentum(self) -> None:
        """Forget the optimizer's state, after a gap of more than two rounds."""
        self._optimizer.reset()

    def state_arrays(self, copy: Callable[[np.ndarray], np.ndarray] = np.copy) -> dict[str, np.ndarray]:
        """The optimizer's state as copies, for a checkpoint; `copy` makes them, in a file if need be."""
        return self._optimizer.state_arrays(copy)

    def load_state_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Take over a checkpoint's state; ValueError when it does not fit."""
        self._optimizer.load_state_arrays(arrays)
