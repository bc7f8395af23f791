"""How much a model computes in one inner step, as a function of sizes alone. Multiplications and additions apart."""

from __future__ import annotations

from tscale.kernels.model_config import ModelConfig, layer_reaches, model_layout
from tscale.kernels.offload.memory import StepShape
from tscale.kernels.offload.pieces import model_places
from tscale.kernels.polar import NEWTON_SCHULZ_STEPS


def step_flops(cfg: ModelConfig, shape: StepShape, *, recompute: bool) -> float:
    """Operations of one step: products of layers and head, attention, and the optimizer's Newton-Schulz steps."""
    tokens = shape.rows * shape.context
    passes = 8 if recompute else 6  # forward 2, derivatives 4, and forward again
    places = model_places(cfg)
    layers = passes * cfg.layers * places.layer_numel * tokens
    head = 6 * cfg.vocab * cfg.width * tokens
    return float(layers + head + passes * _attention_pairs(cfg, shape) * 2 * cfg.projection_width + muon_flops(cfg))


def muon_flops(cfg: ModelConfig) -> float:
    """Newton-Schulz on every matrix: three products with the shorter side squared, for each step."""
    total = 0.0
    for spec in model_layout(cfg).tensors:
        if spec.role != "matrix":
            continue
        rows, columns = spec.shape
        part = cfg.head_dim if spec.name.startswith(("qc.", "kv.")) else rows
        short, long = min(part, columns), max(part, columns)
        once = 2.0 * short * short * (2 * long + short)
        total += rows // part * NEWTON_SCHULZ_STEPS * once
    return total


def _attention_pairs(cfg: ModelConfig, shape: StepShape) -> float:
    """Query and key pairs that are computed: a layer of width 1 has none, a narrow one looks at two blocks."""
    pairs = 0.0
    for reach in layer_reaches(cfg):
        if reach.window > 1:
            pairs += shape.rows * shape.context * min(2 * reach.window, shape.context)
    return pairs
