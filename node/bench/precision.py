"""What short formats cost in loss: a small model on the shipped book, each precision beside float32, on one thread.

Figures are basis points of the held-out loss, (loss / float32 loss - 1) * 10000. "Forward" evaluates one trained model
in each precision. "Trained" goes on training from it in each precision, with the same batches, and evaluates what comes
out in that precision. Beside them is the check that TScale publishes its figures of (`code/gpt/train/main_gpt.cpp`):
the root mean square of the difference of predicted probabilities, times 10000, of a random model, before and after one
step at ten times the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from tscale.kernels.block import Product
from tscale.kernels.init import init_state, normal_values
from tscale.kernels.inner import InnerConfig, InnerTrainer
from tscale.kernels.model import TscaleModel
from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.kernels.precision.products import product_for
from tscale.kernels.precision.select import PrecisionPath
from tscale.node.bench.single_thread import one_torch_thread
from tscale.node.data.corpus import ByteCorpus, shipped_book

MODEL = ModelConfig("tscale", 128, 2, 64, 4, 128, 256, 2)
"""0.85M parameters: four layers, 128 wide, two heads of 64."""
INNER = InnerConfig(
    batch=8,
    context=128,
    lr_muon=0.02,
    lr_adam=0.01,
    weight_decay=0.0,
    momentum=0.9,
    warmup_tokens=0,
    schedule_tokens=1_000_000,
    final_lr_fraction=0.1,
)
CONTINUED_RATE = 0.3
"""Where the first training's learning rate ends and the compared one's begins; that one ends at zero."""
PIECE_WINDOWS = 8
CHECK_MODEL = ModelConfig("tscale", 384, 2, 128, 1, 64, 256, 1)
"""The sizes in TScale's check: width 384, two heads, one layer, window 64."""
CHECK_TOKENS = 64
CHECK_RATE = 10.0
BASIS = 1e4
PUBLISHED = MappingProxyType(
    {
        PrecisionPath.FP16: (0.2, 1.7),
        PrecisionPath.BF16: (0.2, 1.7),
        PrecisionPath.INT8_FORWARD: (3.6, 31.2),
        PrecisionPath.FP8_STORAGE: (7.9, 26.0),
        PrecisionPath.FP8_BLOCK: (7.9, 26.0),
        PrecisionPath.FP8_TENSOR: (7.9, 26.0),
    }
)
"""TScale's figures for the class of each path (doc/precision.md): forward, and forward with backward."""


@dataclass(frozen=True)
class Effort:
    """How much is measured. `runs` are continued trainings with other batches, and random models in the check."""

    trained_steps: int = 200
    continued_steps: int = 30
    runs: int = 3
    windows: int = 192


@dataclass(frozen=True)
class Start:
    """A model trained in float32: parameters, the optimizer's state, the data, and held-out windows [N, T+1]."""

    flat: np.ndarray
    optimizer: dict[str, np.ndarray]
    corpus: ByteCorpus
    heldout_NT: np.ndarray


def run_precision_bench(effort: Effort | None = None, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Every path beside float32. Seeds are fixed, so two runs on one machine give the same figures.

    `say` gets a line of progress now and then.
    """
    effort = effort or Effort()
    with one_torch_thread():
        say(f"training {effort.trained_steps} steps in fp32")
        start = train_start(effort)
        say(f"training {effort.continued_steps} more steps {effort.runs} times in fp32")
        reference = losses(start, None, start.flat)
        trained = [continued_loss(start, None, run, effort) for run in range(effort.runs)]
        checks = [prediction_check(start.corpus, None, run) for run in range(effort.runs)]
        rows = []
        for path, published in PUBLISHED.items():
            say(f"the same in {path}")
            product = product_for(path)
            forward = losses(start, product, start.flat)
            after = [continued_loss(start, product, run, effort) for run in range(effort.runs)]
            predicted = [prediction_check(start.corpus, product, run) for run in range(effort.runs)]
            row = {"path": str(path)} | _named("forward", _relative(forward, reference))
            row |= _named("trained", _relative(after, trained)) | _predictions(predicted, checks)
            rows.append(row | _verdict(row, published))
    return {
        "parameters": model_layout(MODEL).numel,
        "trained_tokens": effort.trained_steps * INNER.batch * INNER.context,
        "continued_tokens": effort.continued_steps * INNER.batch * INNER.context,
        "heldout_tokens": effort.windows * INNER.context,
        "runs": effort.runs,
        "loss_fp32": fmean(reference),
        "loss_fp32_continued": fmean(trained),
        "paths": rows,
        "no_worse_than_published": all(row["no_worse"] for row in rows),
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """The result for people, line by line."""
    size, loss = result["parameters"], result["loss_fp32"]
    yield f"{size:,} parameters, held-out loss in fp32 {loss:.4f} nats"
    yield "basis points          forward          trained   check: forward, step   published"
    for row in result["paths"]:
        forward, trained = (f"{row[f'{of}_bp']:6.2f} +- {row[f'{of}_se_bp']:.2f}" for of in ("forward", "trained"))
        check = f"{row['check_forward_bp']:6.2f} {row['check_step_bp']:6.2f}"
        limits = "/".join(map(str, row["published_bp"]))
        yield f"{row['path']:14} {forward:>14} {trained:>16} {check:>22}   {limits:>9}"
    yield "forward: the trained model evaluated in the format; trained: trained on in it; +- is the standard error."
    yield "check: change of a random model's predictions, before and after one large step. Published: TScale's, for the"
    verdict = "yes" if result["no_worse_than_published"] else "no"
    yield f"same class, forward / with backward. No worse in every row: {verdict}"


def train_start(effort: Effort) -> Start:
    """The trained model that every path starts from."""
    corpus = ByteCorpus(shipped_book(), heldout_per_mille=50)
    flat = init_state(MODEL, 1)
    trainer = InnerTrainer(MODEL, INNER, flat, corpus.counts)
    for step in range(effort.trained_steps):
        rate = 1.0 - (1.0 - CONTINUED_RATE) * step / effort.trained_steps
        trainer.step(corpus.batch(bytes(32), step, INNER.batch, INNER.context), rate)
    heldout_NT = corpus.heldout(effort.windows, INNER.context)
    return Start(flat, trainer.state_arrays(), corpus, heldout_NT)


def losses(start: Start, product: Product | None, flat: np.ndarray) -> list[float]:
    """Held-out loss in nats per token, for pieces of a few windows."""
    trainer = InnerTrainer(MODEL, INNER, flat.copy(), start.corpus.counts, product)
    pieces = range(0, len(start.heldout_NT), PIECE_WINDOWS)
    return [trainer.evaluate(flat, start.heldout_NT[first : first + PIECE_WINDOWS]) for first in pieces]


def continued_loss(start: Start, product: Product | None, run: int, effort: Effort) -> float:
    """Held-out loss after more training in one precision; `run` chooses the batches."""
    flat = start.flat.copy()
    trainer = InnerTrainer(MODEL, INNER, flat, start.corpus.counts, product)
    trainer.load_state_arrays(start.optimizer)
    for step in range(effort.continued_steps):
        batch = start.corpus.batch(bytes([run + 1]) * 32, step, INNER.batch, INNER.context)
        trainer.step(batch, CONTINUED_RATE * (1.0 - step / effort.continued_steps))
    return fmean(losses(start, product, flat))


def prediction_check(corpus: ByteCorpus, product: Product | None, run: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [T, V] that a random model gives to one short text, before and after one large step on it."""
    layout = model_layout(CHECK_MODEL)
    flat = init_state(CHECK_MODEL, run)
    for spec, view in layout.views(flat):
        if not view.any():  # TScale's check starts from random values where training starts from zeros
            view[...] = normal_values(f"{run} {spec.name}".encode(), view.size, 0.5).reshape(view.shape)
    tokens_BT = corpus.batch(bytes([run]) * 32, 0, 1, CHECK_TOKENS)
    inner = InnerConfig(1, CHECK_TOKENS, INNER.lr_muon, INNER.lr_adam, 0.0, 0.0, 0, 1, 1.0)
    trainer = InnerTrainer(CHECK_MODEL, inner, flat, corpus.counts, product)
    model = TscaleModel(CHECK_MODEL, torch.from_numpy(flat), corpus.counts, product)

    def probabilities() -> torch.Tensor:
        with torch.no_grad():
            return torch.softmax(model(torch.from_numpy(tokens_BT[:, :-1])), -1).double()

    before = probabilities()
    trainer.step(tokens_BT, CHECK_RATE)
    return before, probabilities()


def _relative(found: list[float], reference: list[float]) -> tuple[float, float]:
    """Mean difference and its standard error, in basis points of the reference's mean."""
    differences = [(a - b) * BASIS / fmean(reference) for a, b in zip(found, reference, strict=True)]
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return fmean(differences), error


def _named(what: str, value: tuple[float, float]) -> dict[str, Any]:
    return {f"{what}_bp": value[0], f"{what}_se_bp": value[1]}


def _predictions(found: list[Any], reference: list[Any]) -> dict[str, Any]:
    sizes = []
    for when in (0, 1):
        squares = [float((a[when] - b[when]).square().mean()) for a, b in zip(found, reference, strict=True)]
        sizes.append(math.sqrt(fmean(squares)) * BASIS)
    return {"check_forward_bp": sizes[0], "check_step_bp": sizes[1]}


def _verdict(row: dict[str, Any], published: tuple[float, float]) -> dict[str, Any]:
    """Whether each figure is at most the published one of its class."""
    forward, both = published
    no_worse = max(row["forward_bp"], row["check_forward_bp"]) <= forward
    no_worse = no_worse and max(row["trained_bp"], row["check_step_bp"]) <= both
    return {"published_bp": list(published), "no_worse": no_worse}
