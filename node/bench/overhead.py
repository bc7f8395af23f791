"""What the node costs: the speed of the bare training loop, to hold the node's own speed against."""

import time
from dataclasses import dataclass

import torch

from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerTrainer, lr_scale
from tscale.node.data.corpus import ByteCorpus
from tscale.node.worker.kernel_config import kernel_config
from tscale.node.worker.session import batch_key
from tscale.protocol.spec import SwarmSpec

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class BareSpeed:
    """What a bare loop did after its warm-up."""

    tokens: int
    steps: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """The rate, 0 when nothing was done."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def bare_loop(spec: SwarmSpec, corpus: ByteCorpus, seconds: float) -> BareSpeed:
    """Train with the worker's own InnerTrainer for `seconds` and nothing else: no rounds, no node, no evaluation.

    Call it in a process of its own with the worker's thread settings; it sets torch's threads to one.
    """
    torch.set_num_threads(1)
    kernels = kernel_config(spec)
    inner = kernels.inner
    local = init_state(kernels.model, spec.seed)
    trainer = InnerTrainer(kernels.model, inner, local, corpus.counts)
    key, scale = batch_key(spec.seed, bytes(32), bytes(32)), lr_scale(inner, 0)

    def step(number: int) -> None:
        trainer.step(corpus.batch(key, number, inner.batch, inner.context), scale)

    for number in range(WARM_UP_STEPS):
        step(number)
    begin_s, done = time.monotonic(), 0
    while time.monotonic() - begin_s < seconds:
        step(WARM_UP_STEPS + done)
        done += 1
    return BareSpeed(done * inner.batch * inner.context, done, time.monotonic() - begin_s)
