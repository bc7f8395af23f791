"""What a step of an OffloadTrainer moves and holds, in bytes, as a function of sizes alone.

The planner decides with it, and the tests measure it. L layers, W the bytes of one layer's matrices, E those of a
table (vocabulary * width), S the bytes of one boundary state of the whole batch (rows * context * width).
"""

from __future__ import annotations

from dataclasses import dataclass

from tscale.kernels.model_config import ModelConfig, layer_parameters
from tscale.kernels.offload.plan import OffloadPlan

FLOAT_BYTES = 4


@dataclass(frozen=True)
class StepShape:
    """The batch of one inner step: sequences, and tokens a sequence."""

    rows: int
    context: int


def layer_bytes(cfg: ModelConfig) -> int:
    """W: the float32 matrices of one layer."""
    return layer_parameters(cfg) // cfg.layers * FLOAT_BYTES


def table_bytes(cfg: ModelConfig) -> int:
    """E: the float32 embedding, or the head."""
    return cfg.vocab * cfg.width * FLOAT_BYTES


def state_bytes(cfg: ModelConfig, shape: StepShape) -> int:
    """S: what lies between two layers, of the whole batch."""
    return shape.rows * shape.context * cfg.width * FLOAT_BYTES


@dataclass(frozen=True)
class StepTraffic:
    """Bytes over the bus in one step, each way."""

    to_device_bytes: int
    to_host_bytes: int


def step_traffic(cfg: ModelConfig, plan: OffloadPlan, shape: StepShape) -> StepTraffic:
    """Exactly what a step copies; tokens (8 bytes each) and the loss are not counted.

    In: weights forward, weights of the layers that were not kept, momentum; embedding, head, embedding again, and two
    moments of both. Out: weights and momentum; tables and moments. With boundary activations on the host, in: what
    every layer and the head read, state and gradient of every layer going back, the embedding's gradient. Out: states
    0 to L and their gradients.
    """
    layers, w, e, s = cfg.layers, layer_bytes(cfg), table_bytes(cfg), state_bytes(cfg, shape)
    to_device = w * (3 * layers - plan.kept_layers(layers)) + e * (3 + 4)
    to_host = w * 2 * layers + e * (2 + 4)
    if plan.boundary == "host":
        to_device += s * ((layers + 1) + (2 * layers + 1))
        to_host += s * 2 * (layers + 1)
    return StepTraffic(to_device, to_host)
