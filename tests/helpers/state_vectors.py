"""Golden vectors of what kernels and worker define: contribution blobs, layouts, states, batch keys and batches.

A blob's bytes depend on the version of zstd: a vector says what its bytes mean, not that today's encoder writes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.helpers.protocol_samples import ALICE
from tscale.kernels.codec import Rung, decode, encode
from tscale.kernels.digest import state_digest, tensor_digest
from tscale.kernels.layout import Layout, TensorSpec
from tscale.node.data.corpus import ByteCorpus
from tscale.node.worker.session import batch_key
from tscale.protocol.hashing import digest

LAYOUT = Layout((TensorSpec("w", (12, 25), "matrix"), TensorSpec("gain", (2,), "small")), small_numel=2)
RUNGS = {"gaps": Rung(64), "mask": Rung(1024), "exact": Rung(4096, 32)}


def ramp() -> np.ndarray:
    """302 values between -0.98 and 0.98 whose binary fractions are short: float32 [302]."""
    return ((np.arange(302) * 7919 % 1009 - 504) / np.float32(512)).astype(np.float32)


def meaning(blob: bytes) -> dict[str, Any]:
    """What a blob sends: how many values, the first eight of them, and a hash of all as float32 [302]."""
    sent = decode(blob, LAYOUT).dense()
    places = np.flatnonzero(sent)
    return {
        "count": len(places),
        "places": places[:8].tolist(),
        "values": [float(value) for value in sent[places[:8]]],
        "dense_digest": digest("test", sent.astype("<f4").tobytes()).hex(),
    }


def encode_blob(name: str) -> bytes:
    """What today's encoder writes for `ramp` at a named rung."""
    return encode(ramp(), LAYOUT, RUNGS[name], "reference")


def contribution_vectors() -> dict[str, Any]:
    """Name of the rung -> a blob of it and what it means."""
    blobs = {name: encode_blob(name) for name in RUNGS}
    return {name: {"start": blob[:80].hex(), "hex": blob.hex(), **meaning(blob)} for name, blob in blobs.items()}


def state_vectors() -> dict[str, Any]:
    """The layout's fingerprint, digests of a state, and the bytes of its snapshot."""
    anchor, momentum = ramp(), -ramp()
    return {
        "fingerprint": LAYOUT.fingerprint.hex(),
        "tensor": tensor_digest("gain", LAYOUT.view(anchor, "gain")).hex(),
        "plain": state_digest(LAYOUT, anchor, None).hex(),
        "nesterov": state_digest(LAYOUT, anchor, momentum).hex(),
        "snapshot_start": anchor.astype("<f4").tobytes()[:16].hex(),
    }


def batch_vectors() -> dict[str, Any]:
    """The key of a peer's batches on a manifest, and where its sequences of step 3 begin in a text of 100,000 bytes."""
    key = batch_key(1, digest("test", b"base"), ALICE.public)
    corpus = ByteCorpus((np.arange(100_000) % 251).astype(np.uint8).tobytes(), 20)
    tokens = corpus.batch(key, 3, 4, 8)
    return {"manifest": digest("test", b"base").hex(), "key": key.hex(), "first_tokens": tokens[:, 0].tolist()}


def state_files() -> dict[str, dict[str, Any]]:
    """File name without extension -> what the code gives today."""
    return {"contribution_v1": contribution_vectors(), "state_v1": state_vectors(), "batch_v1": batch_vectors()}
