"""Time of an inner step: the worker's trainer, the layer-major one, and the same model in a plain PyTorch loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerConfig, InnerTrainer
from tscale.kernels.model_config import PRESETS, ModelConfig, model_layout
from tscale.kernels.offload.plan import joined_plan
from tscale.kernels.offload.trainer import OffloadParts, OffloadTrainer
from tscale.kernels.offload.transfer import DirectTransfer
from tscale.node.bench.plain_model import PlainModel, PlainMuon
from tscale.node.bench.room import require_memory, training_bytes
from tscale.node.bench.single_thread import one_torch_thread
from tscale.protocol.errors import BadInput

SEED = 1
WARM_UP_TURNS = 2
FEWEST_TURNS, MOST_TURNS = 6, 400
LR_MUON, LR_ADAM, WEIGHT_DECAY, MOMENTUM = 0.01, 0.003, 0.01, 0.9

Step = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class StepSize:
    """What is trained: a preset's model, `batch` sequences of `context` tokens."""

    model: str = "demo"
    batch: int = 4
    context: int = 128

    def config(self) -> ModelConfig:
        """Raises BadInput."""
        if self.model not in PRESETS:
            raise BadInput(f"no model is called {self.model!r}: use one of {', '.join(PRESETS)}")
        return PRESETS[self.model]


def run_step_bench(size: StepSize, seconds: float = 30.0) -> dict[str, Any]:
    """Steps of the three take turns for about `seconds`, on one thread, on equal batches from equal parameters.

    Times are the processor's: other programs count little. Ratios are medians of the ratios within a turn.
    `loss_gap` is the largest distance of the losses of all steps, in nats: the three train the same model.
    """
    cfg = size.config()
    # three trainers hold their parameters; the activations of one step live at a time
    held_bytes = 2 * training_bytes(cfg, 0, 0)
    require_memory(
        held_bytes + training_bytes(cfg, size.batch, size.context), "a smaller --model, --batch or --context"
    )
    with one_torch_thread():
        steps = [_plain(cfg, size), _inner(cfg, size), _layer_major(cfg, size)]
        turns = list(_turns(steps, cfg, size, seconds))
    times = [[turn[which][0] for turn in turns[WARM_UP_TURNS:]] for which in range(len(steps))]
    plain, inner, layers = times
    gap = max(max(loss for _, loss in turn) - min(loss for _, loss in turn) for turn in turns)
    return {
        "model": size.model,
        "parameters": model_layout(cfg).numel,
        "batch": size.batch,
        "context_tokens": size.context,
        "plain_step_s": median(plain),
        "inner_step_s": median(inner),
        "layer_major_step_s": median(layers),
        "inner_speed_vs_plain": median(one / other for one, other in zip(plain, inner, strict=True)),
        "layer_major_time_vs_inner": median(one / other for one, other in zip(layers, inner, strict=True)),
        "loss_gap": gap,
        "turns": len(plain),
        "threads": 1,
    }


def _turns(steps: list[Step], cfg: ModelConfig, size: StepSize, seconds: float) -> Iterator[list[tuple[float, float]]]:
    """Per turn, seconds and loss of every one's step; each turn another one is first."""
    begin_s = time.perf_counter()
    for turn in range(MOST_TURNS):
        if turn >= WARM_UP_TURNS + FEWEST_TURNS and time.perf_counter() - begin_s > seconds:
            return
        tokens = np.random.default_rng(turn).integers(0, cfg.vocab, (size.batch, size.context + 1))
        result: dict[int, tuple[float, float]] = {}
        for which in range(len(steps)):
            chosen = (which + turn) % len(steps)
            start_s = time.process_time()
            loss = steps[chosen](tokens)
            result[chosen] = (time.process_time() - start_s, loss)
        yield [result[which] for which in range(len(steps))]


def _inner_config(size: StepSize) -> InnerConfig:
    tokens = size.batch * size.context
    return InnerConfig(size.batch, size.context, LR_MUON, LR_ADAM, WEIGHT_DECAY, MOMENTUM, 0, tokens, 1.0)


def _counts(cfg: ModelConfig) -> np.ndarray:
    return np.ones(cfg.vocab, np.int64)


def _plain(cfg: ModelConfig, size: StepSize) -> Step:
    model = PlainModel(cfg, init_state(cfg, SEED), _counts(cfg), size.context)
    heads = 2 * cfg.heads
    fused = [getattr(block, kind) for block in model.blocks for kind in ("qc", "kv")]
    whole = [getattr(block, kind) for block in model.blocks for kind in ("combine", "expand", "contract")]
    muon = PlainMuon([{"params": fused, "heads": heads}, {"params": whole}], LR_MUON, MOMENTUM, WEIGHT_DECAY)
    tables = [model.embed, model.head]
    adam = torch.optim.AdamW(tables, LR_ADAM, betas=(0.9, 0.99), eps=1e-8, weight_decay=WEIGHT_DECAY, fused=True)

    def step(tokens: np.ndarray) -> float:
        muon.zero_grad()
        adam.zero_grad()
        loss = model.loss(torch.from_numpy(tokens))
        loss.backward()
        muon.step()
        adam.step()
        return float(loss.detach())

    return step


def _inner(cfg: ModelConfig, size: StepSize) -> Step:
    trainer = InnerTrainer(cfg, _inner_config(size), init_state(cfg, SEED), _counts(cfg))
    return lambda tokens: trainer.step(tokens, 1.0)


def _layer_major(cfg: ModelConfig, size: StepSize) -> Step:
    parts = OffloadParts(joined_plan(cfg.layers, size.batch), DirectTransfer())
    trainer = OffloadTrainer(cfg, _inner_config(size), init_state(cfg, SEED), _counts(cfg), parts)
    return lambda tokens: trainer.step(tokens, 1.0)
