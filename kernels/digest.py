"""State digests: what two peers compare to know that they hold the same model, bit for bit."""

import numpy as np
from blake3 import blake3

from tscale.kernels.layout import Layout

DIGEST_BYTES = 32


def tensor_digest(name: str, array: np.ndarray) -> bytes:
    """BLAKE3 (32 bytes) over a float32 tensor's name, shape and little-endian bytes; 0.0 and -0.0 differ."""
    label = name.encode()
    hasher = blake3(b"tscale tensor 1\0" + len(label).to_bytes(4, "little") + label)
    hasher.update(array.ndim.to_bytes(4, "little") + b"".join(size.to_bytes(8, "little") for size in array.shape))
    hasher.update(np.ascontiguousarray(array, dtype="<f4").data.cast("B") if array.size else b"")
    return hasher.digest(length=DIGEST_BYTES)


def tensor_digests(layout: Layout, anchor: np.ndarray, momentum: np.ndarray | None) -> tuple[bytes, ...]:
    """Digest of every anchor tensor in layout order, then of every momentum tensor if there is momentum.

    Two states that differ differ here, which tells a peer the tensors to repair.
    """
    digests = [tensor_digest(tensor.name, view) for tensor, view in layout.views(anchor)]
    if momentum is not None:
        digests += [tensor_digest("momentum of " + tensor.name, view) for tensor, view in layout.views(momentum)]
    return tuple(digests)


def state_digest(layout: Layout, anchor: np.ndarray, momentum: np.ndarray | None) -> bytes:
    """BLAKE3 (32 bytes) of the tensor digests of a state (float32 [P] each; momentum None where mu is 0)."""
    layout.check(anchor, "anchor")
    if momentum is not None:
        layout.check(momentum, "momentum")
    kind = b"plain" if momentum is None else b"nesterov"
    parts = tensor_digests(layout, anchor, momentum)
    return blake3(b"tscale state 1\0" + kind + b"".join(parts)).digest(length=DIGEST_BYTES)
