"""Whether main memory is enough for what is about to be measured, before the machine swaps or the system ends it."""

from __future__ import annotations

import psutil

from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.protocol.errors import BadInput

_ACTIVATIONS_PER_LAYER = 40
"""Vectors of the model's width that a layer keeps of each token for its derivative, about."""
_TRAINED_VECTORS = 8
"""Of the model's size, that a trainer holds: parameters, gradients, momentum, and what a step works in."""


def require_memory(needed_bytes: float, smaller: str) -> None:
    """Raises BadInput, with `smaller` as the advice, when clearly less than `needed_bytes` (about) are free."""
    free_bytes = psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        needed_gb = min(needed_bytes, 1e18) / 1e9
        raise BadInput(
            f"this takes about {needed_gb:,.3g} GB of memory, and {free_bytes / 1e9:,.3g} GB are free: use {smaller}"
        )


def training_bytes(cfg: ModelConfig, batch: int, context: int) -> float:
    """About what one trainer of the model takes."""
    a_token = cfg.layers * _ACTIVATIONS_PER_LAYER * max(cfg.width, cfg.projection_width) + 4 * cfg.vocab
    return 4.0 * (_TRAINED_VECTORS * model_layout(cfg).numel + batch * context * a_token)
