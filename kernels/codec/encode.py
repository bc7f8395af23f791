"""Residual in, contribution out."""

import numpy as np

from tscale.kernels.codec.errors import CodecError
from tscale.kernels.codec.implementation import chunk_coder
from tscale.kernels.codec.plan import ChunkPlan, plan_chunks
from tscale.kernels.codec.rung import Rung
from tscale.kernels.codec.wire import pack_exact, pack_streams
from tscale.kernels.layout import Layout, LayoutError

HALF_LARGEST = np.float32(65504)
HALF_REACH = np.float32(2.0**29)  # from here on, float32 is coarser than 65504's last place


def encode(residual: np.ndarray, layout: Layout, rung: Rung, impl: str = "auto", threads: int = 1) -> bytes:
    """Encodes `residual` (float32 [P]) and leaves in it, in place, exactly what was not sent.

    `decode(blob).dense() + residual` equals the input in every float32. Equal input gives equal bytes (with one zstd
    version), whatever `impl` and `threads` are. Raises CodecError, with the residual untouched, if a value isn't
    finite.
    """
    try:
        layout.check(residual, "residual")
    except LayoutError as error:
        raise CodecError(str(error)) from error
    coder, plan = chunk_coder(impl), plan_chunks(layout, rung)
    unchunked = [residual] if rung.exact else [residual[layout.slices[position]] for position in plan.small]
    if not all(np.isfinite(values).all() for values in unchunked):
        raise CodecError("the residual has a value that isn't finite")
    if rung.exact:
        blob = pack_exact(residual, layout)
        residual.fill(0.0)
        return blob
    streams = coder.encode_chunks(residual, plan, threads)  # first, because it may find a value that isn't finite
    return pack_streams(streams, _take_small(residual, layout, plan), layout, rung)


def _take_small(residual: np.ndarray, layout: Layout, plan: ChunkPlan) -> np.ndarray:
    """The small tensors as float16, taken out of `residual`. Saturates at 65504; 2^29 and more stays whole.

    Exact: the difference to the nearest float16 fits a float32, and 65504 is a multiple of the last place below 2^29.
    """
    parts = [np.zeros(0, dtype=np.float16)]
    for position in plan.small:
        values = residual[layout.slices[position]]
        reachable = np.where(np.abs(values) < HALF_REACH, values, np.float32(0))
        half = np.clip(reachable, -HALF_LARGEST, HALF_LARGEST).astype(np.float16)
        values -= half.astype(np.float32)
        parts.append(half)
    return np.concatenate(parts)
