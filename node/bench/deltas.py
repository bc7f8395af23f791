"""What peers would send: residuals of short training runs, or drawn ones where training takes too long."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tscale.kernels.codec import Rung, encode
from tscale.kernels.feedback import accumulate
from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerConfig, InnerTrainer
from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.node.data.corpus import ByteCorpus, shipped_book
from tscale.protocol.errors import BadInput

TRAINED_UP_TO = 16_000_000  # parameters; training more takes minutes on a CPU
ROUNDS, STEPS_PER_ROUND = 3, 2
SEED = 1
BETA = 0.9
TRAINING = InnerConfig(
    batch=1,
    context=64,
    lr_muon=0.02,
    lr_adam=0.01,
    weight_decay=0.0,
    momentum=0.9,
    warmup_tokens=0,
    schedule_tokens=1_000_000,
    final_lr_fraction=0.1,
)


@dataclass(frozen=True)
class Deltas:
    """A residual as it stands before it is encoded (float32 [P]), its layout, and where it came from."""

    residual: np.ndarray
    layout: Layout
    source: str


def trained_deltas(parameters: int, rung: Rung) -> Deltas:
    """The residual of the last of a few rounds (start minus end of the local parameters, with error feedback)."""
    return list(rounds_of_deltas(parameters, rung))[-1]


def rounds_of_deltas(parameters: int, rung: Rung, rounds: int = ROUNDS) -> Iterator[Deltas]:
    """The residual of every round before it is encoded (float32 [P], a copy), of one peer that trains alone."""
    config = model_of_at_least(parameters)
    layout = model_layout(config)
    corpus = ByteCorpus(shipped_book(), heldout_per_mille=10)
    local = init_state(config, SEED)
    trainer = InnerTrainer(config, TRAINING, local, corpus.counts)
    residual = np.zeros_like(local)
    for round_number in range(rounds):
        start = local.copy()
        for step in range(STEPS_PER_ROUND):
            number = round_number * STEPS_PER_ROUND + step
            trainer.step(corpus.batch(bytes(32), number, TRAINING.batch, TRAINING.context), 1.0)
        accumulate(residual, start - local, BETA)
        yield Deltas(residual.copy(), layout, "trained")
        encode(residual, layout, rung)


def model_of_at_least(parameters: int) -> ModelConfig:
    """Wide and shallow, so that few steps move every matrix: the narrowest byte model of two layers that is enough."""
    for heads in range(1, 1000):
        config = ModelConfig("tscale", heads * 64, heads, 64, 2, 128, 256, 1)
        if model_layout(config).numel >= parameters:
            return config
    raise BadInput(f"no model has {parameters} parameters: use a smaller --parameters")


def drawn_deltas(parameters: int) -> Deltas:
    """Student's t with five degrees of freedom, in matrices of 1024 columns whose rows have scales of their own."""
    rows = -(-parameters // 1024)
    layout = Layout((TensorSpec("drawn", (rows, 1024), "matrix"),))
    generator = np.random.default_rng(SEED)
    residual = np.empty(layout.numel, dtype=np.float32)
    view = layout.view(residual, "drawn")
    for first in range(0, rows, 4096):
        part = view[first : first + 4096]
        part[...] = generator.standard_t(5, part.shape) * np.exp(generator.normal(-6, 0.3, (len(part), 1)))
    return Deltas(residual, layout, "drawn")
