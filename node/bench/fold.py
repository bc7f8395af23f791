"""How long it takes to open, screen and fold the contributions of a round for a large model, and in how much memory."""

import time
import tracemalloc
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from tscale.kernels.codec import Rung, encode
from tscale.kernels.fold import FoldOptions, FoldPart, OuterRule, fold, open_parts
from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.screen import Share, screen, warm_up
from tscale.node.bench.room import require_memory
from tscale.protocol.errors import BadInput

DISTINCT = 4  # blobs that are made; the others are the same again
COLUMNS = 1024
TENSORS = 32
SEED = 1


def run_fold_bench(
    parameters: int = 125_000_000, contributions: int = 16, threads: int = 2, repeats: int = 3
) -> dict[str, Any]:
    """Decodes, screens and folds `contributions` at 1/64 density into a model of about `parameters` in equal matrices.

    The contributions are of normally distributed values: positions are as hard to code as they can be. `seconds` is the
    median of `repeats`. The peak is that of numpy's and Python's memory, measured in one more fold; `peak_over_state`
    has the new state and the blobs taken off. Raises BadInput.
    """
    if min(parameters, contributions, threads, repeats) < 1:
        raise BadInput("parameters, contributions, threads and repeats must be at least 1")
    require_memory((16.0 + contributions / 16) * parameters, "a smaller --parameters, or fewer --contributions")
    layout = _layout(parameters)
    anchor = np.random.default_rng(SEED).standard_normal(layout.numel, np.float32)
    blobs = [_blob(anchor, layout, number) for number in range(min(DISTINCT, contributions))]
    shares = [Share(blobs[i % len(blobs)], 1.0 + i, 1.0) for i in range(contributions)]
    warm_up()
    times = [_one_fold(anchor, shares, layout, threads) for _ in range(repeats)]
    tracemalloc.start()
    _one_fold(anchor, shares, layout, threads)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    blob_bytes = sum(len(share.blob) for share in shares if isinstance(share.blob, bytes))
    decode_s, screen_s, fold_s = (median(column) for column in zip(*times, strict=True))
    return {
        "parameters": layout.numel,
        "contributions": contributions,
        "threads": threads,
        "decode_s": decode_s,
        "screen_s": screen_s,
        "fold_s": fold_s,
        "seconds": median(sum(turn) for turn in times),
        "blob_bytes": blob_bytes,
        "state_bytes": anchor.nbytes,
        "tensor_bytes": 4 * layout.tensors[0].numel,
        "peak_bytes": peak_bytes,
        "peak_over_state_and_blobs_bytes": peak_bytes - anchor.nbytes - blob_bytes,
    }


def _layout(parameters: int) -> Layout:
    rows = max(1, -(-parameters // (COLUMNS * TENSORS)))
    return Layout(tuple(TensorSpec(f"matrix.{i}", (rows, COLUMNS), "matrix") for i in range(TENSORS)))


def _blob(values: np.ndarray, layout: Layout, number: int) -> bytes:
    return encode(np.roll(values, 1_000_003 * number), layout, Rung(64))


def _one_fold(anchor: np.ndarray, shares: list[Share], layout: Layout, threads: int) -> tuple[float, float, float]:
    """Seconds of decoding, of screening and of folding."""
    begin_s = time.perf_counter()
    blobs = open_parts([FoldPart(share.blob, share.gain) for share in shares], layout, threads)
    opened_s = time.perf_counter()
    opened = [replace(share, blob=part.blob) for share, part in zip(shares, blobs, strict=True)]
    parts = screen(opened, layout, threads).parts
    screened_s = time.perf_counter()
    fold(anchor, None, parts, layout, OuterRule(1.0, 0.0), FoldOptions(threads))
    return opened_s - begin_s, screened_s - opened_s, time.perf_counter() - screened_s
