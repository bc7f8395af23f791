"""Would positions cost less if they were coded under what the receiver knows already? `python -m tests.bench.positions`

One peer trains the `tiny` preset on the shipped book, closes rounds with error feedback and folds its own
contributions. From the contributions' masks, and from nothing that a receiver would not have, the code lengths of these
models of the positions are worked out (an adaptive code with one counter pair for each context: learning is paid for):

uniform   no context: what the product's gap code is measured against
last      whether the peer sent the same place in its last contribution
rows      how many values of the row and of the column its last contribution had, in four classes each
both      rows and last together
"""

import argparse
import json
import sys
from typing import Any

import numpy as np

from tscale.kernels.codec import Decoded, Rung, decode
from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerTrainer, lr_scale
from tscale.kernels.replica import Replica
from tscale.kernels.screen import Share
from tscale.node.data.corpus import ByteCorpus, shipped_book
from tscale.node.worker.kernel_config import kernel_config
from tscale.protocol.hashing import blob_ref
from tscale.protocol.presets import preset
from tscale.protocol.spec import NO_OWNER

CLASSES = 4
GAIN = 2.0


def masks(decoded: Decoded) -> list[np.ndarray]:
    """Which values of each chunked tensor were sent: bool, in the tensor's shape."""
    found = []
    for index in decoded.plan.chunked:
        mask = np.zeros(decoded.layout.tensors[index].numel, bool)
        mask[decoded.sparse(index)[0]] = True
        found.append(mask.reshape(decoded.layout.tensors[index].shape))
    return found


def adaptive_bits(sent: np.ndarray, context: np.ndarray) -> float:
    """Code length of flags under a counter pair for each context, learning included (Krichevsky-Trofimov, closely)."""
    total = np.bincount(context)
    ones = np.bincount(context, weights=sent)
    total, ones = total[total > 0], ones[total > 0]
    share = np.clip(ones / total, 1e-12, 1 - 1e-12)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share))
    return float((total * entropy + 0.5 * np.log2(total + 1)).sum())


def classes(counts: np.ndarray) -> np.ndarray:
    """Rows or columns in `CLASSES` equal classes by how much they sent."""
    order = counts.argsort(kind="stable").argsort(kind="stable")
    return order * CLASSES // len(counts)


def contexts(last: np.ndarray, tensor: int) -> dict[str, np.ndarray]:
    """Contexts of every value of a tensor, from its last mask."""
    seen = last.ravel().astype(np.int64)
    grid = (classes(last.sum(1))[:, None] * CLASSES + classes(last.sum(0))[None, :]).ravel().astype(np.int64)
    both = grid * 2 + seen
    own = {"uniform": np.zeros_like(seen), "last": seen, "rows": grid, "both": both}
    return {name: context + tensor * 2 * CLASSES**2 for name, context in own.items()}


def position_bits(now: list[np.ndarray], last: list[np.ndarray]) -> dict[str, float]:
    """Bits for all positions of a contribution under each model, every tensor with counters of its own."""
    found: dict[str, list[np.ndarray]] = {}
    for tensor, mask in enumerate(last):
        for name, context in contexts(mask, tensor).items():
            found.setdefault(name, []).append(context)
    sent = np.concatenate([mask.ravel() for mask in now])
    return {name: adaptive_bits(sent, np.concatenate(parts)) for name, parts in found.items()}


def contributions(name: str, kept_per_chunk: int, rounds: int, steps: int) -> list[tuple[bytes, Decoded]]:
    """What one lone peer sends, round by round."""
    text = shipped_book()
    spec = preset(name, data=(blob_ref(text),), owner=NO_OWNER, t0_unix_s=0.0)
    kernels, corpus, rung = kernel_config(spec), ByteCorpus(text, 10), Rung(kept_per_chunk)
    peer = Replica(kernels.layout, init_state(kernels.model, 1), spec.outer.rho, spec.outer.beta, kernels.rule)
    trainer = InnerTrainer(kernels.model, kernels.inner, peer.local, corpus.counts)
    made = []
    for number in range(rounds):
        for step in range(number * steps, (number + 1) * steps):
            tokens = corpus.batch(bytes(32), step, kernels.inner.batch, kernels.inner.context)
            trainer.step(tokens, lr_scale(kernels.inner, step * tokens.shape[0] * (tokens.shape[1] - 1)))
        blob = peer.close(rung)
        peer.fold([Share(blob, 1.0, GAIN)])
        peer.rebase()
        made.append((blob, decode(blob, kernels.layout)))
    return made


def measure(name: str, kept_per_chunk: int, rounds: int, steps: int) -> dict[str, Any]:
    """Bits per sent value for its position, and of the whole contribution by how much it would shrink."""
    made = contributions(name, kept_per_chunk, rounds, steps)
    sums: dict[str, float] = {}
    sent = whole = places = 0
    for (_, before), (blob, now) in zip(made[rounds // 2 - 1 :], made[rounds // 2 :], strict=False):
        for model, bits in position_bits(masks(now), masks(before)).items():
            sums[model] = sums.get(model, 0.0) + bits
        assert now.streams is not None
        sent += int(now.streams.counts_C.sum(dtype=np.int64))
        whole += 8 * len(blob)
        places += int.from_bytes(blob[64:72], "little") * 8  # the frame of the places: the header's third size
    found: dict[str, Any] = {"preset": name, "kept_per_chunk": kept_per_chunk, "rounds": rounds, "steps": steps}
    found["as_sent_bits_per_position"] = round(places / sent, 3)
    for model, bits in sums.items():
        found[f"{model}_bits_per_position"] = round(bits / sent, 3)
        found[f"{model}_saves_of_the_whole"] = round((places - bits) / whole, 4)
    return found


def main() -> int:
    """One line of JSON for each density."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    for kept_per_chunk in (64, 128, 256):
        sys.stdout.write(json.dumps(measure(given.preset, kept_per_chunk, given.rounds, given.steps)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
