"""Error feedback: what a round could not send is remembered and decays.

SparseLoCo (arXiv 2508.15706): e <- beta*e + delta; send C(e); e <- e - C(e).
"""

import numpy as np

from tscale.kernels.codec import Rung, encode
from tscale.kernels.layout import Layout


def accumulate(residual: np.ndarray, delta: np.ndarray, beta: float) -> None:
    """`residual = beta*residual + delta` in place, float32 [P]; the product is rounded, then the sum."""
    np.multiply(residual, np.float32(beta), out=residual)
    np.add(residual, delta, out=residual)


def feed_back(residual: np.ndarray, delta: np.ndarray, beta: float, layout: Layout, rung: Rung) -> bytes:
    """Adds the round's delta (float32 [P]) to the decayed residual and encodes it; the residual keeps the rest.

    Raises CodecError if a value isn't finite; the residual then holds the sum.
    """
    accumulate(residual, delta, beta)
    return encode(residual, layout, rung)
