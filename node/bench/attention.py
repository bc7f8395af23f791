"""What attention costs with the windows of the layers, beside full attention in every layer, on one thread."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from tscale.kernels.block import BlockPass, BlockTables, look_at_previous, look_back
from tscale.kernels.model_config import NARROW_WINDOW_TOKENS, PRESETS, LayerReach, ModelConfig, layer_reaches
from tscale.node.bench.room import require_memory
from tscale.node.bench.single_thread import one_torch_thread
from tscale.protocol.errors import BadInput

SEED = 1
FEWEST_REPEATS, MOST_REPEATS = 5, 200
VECTORS_A_TOKEN = 16
"""Queries, keys, values, what they attend to, and derivatives, for the layers of each kind: about."""


def run_attention_bench(model: str = "125m", context: int = 2048, seconds: float = 15.0) -> dict[str, Any]:
    """Forward and backward of attention, from the projected queries, keys and values to what the heads attend to.

    One layer of each kind takes its turn for about `seconds`, for one sequence of `context` tokens; layers of one kind
    do the same work, so a plan's time is the sum over its layers. The widest layers see the whole context. Times are
    the processor's: other programs count little. `plan_vs_full` is the median of the ratios within a turn;
    `pairs_vs_full` is what the counts of pairs of tokens alone say. Raises BadInput.
    """
    if model not in PRESETS:
        raise BadInput(f"no model is called {model!r}: use one of {', '.join(PRESETS)}")
    if context <= NARROW_WINDOW_TOKENS:
        raise BadInput(f"a context of {context} has no layer narrower than it: use a --context above 64")
    config = dataclasses.replace(PRESETS[model], window=context)
    layers = Counter(layer_reaches(config))
    require_memory(4.0 * VECTORS_A_TOKEN * config.projection_width * context, "a smaller --context")
    widest = LayerReach(context, 0.0)
    with one_torch_thread():
        turns = list(_turns({reach: _layer(config, reach, context) for reach in (*layers, widest)}, seconds))
    plans = [sum(turn[reach] * count for reach, count in layers.items()) for turn in turns]
    full = [turn[widest] * config.layers for turn in turns]
    by_window = {reach.window: median(turn[reach] for turn in turns) * 1e3 for reach in layers}
    return {
        "model": model,
        "context_tokens": context,
        "layers": {str(reach.window): count for reach, count in layers.items()},
        "layer_ms": {str(window): round(took_ms, 3) for window, took_ms in by_window.items()},
        "plan_s": median(plans),
        "full_s": median(full),
        "plan_vs_full": median(one / other for one, other in zip(plans, full, strict=True)),
        "pairs_vs_full": sum(_pairs(reach.window, context) * count for reach, count in layers.items())
        / (_pairs(context, context) * config.layers),
        "repeats": len(turns),
        "threads": 1,
    }


def _pairs(window: int, context: int) -> int:
    return sum(min(window, token) for token in range(context))


def _layer(config: ModelConfig, reach: LayerReach, context: int) -> Callable[[], object]:
    """A call that does one layer's attention and its derivative."""
    noise = torch.Generator().manual_seed(SEED)
    run = BlockPass(config, BlockTables(config), (1, context))
    q, k, v = (torch.randn(config.projection_width, context, generator=noise) for _ in range(3))
    k[:, 0], v[:, 0] = 0.0, 0.0
    qkv = tuple(x.requires_grad_() for x in (q, k, v))
    probe = torch.randn(config.heads, config.head_dim, context, generator=noise)

    def once() -> object:
        out = look_at_previous(run, qkv) if reach.window == 1 else look_back(run, reach, qkv)
        return torch.autograd.grad(out, qkv, probe.view(out.shape))

    return once


def _turns(layers: dict[LayerReach, Callable[[], object]], seconds: float) -> Iterator[dict[LayerReach, float]]:
    """Processor seconds of one layer of each kind, again and again; the first turn warms up."""
    begin_s = time.perf_counter()
    for turn in range(MOST_REPEATS + 1):
        if turn > FEWEST_REPEATS and time.perf_counter() - begin_s > seconds:
            return
        took = {}
        for reach, once in layers.items():
            start_s = time.process_time()
            once()
            took[reach] = time.process_time() - start_s
        if turn:
            yield took
