"""How compressible is what a peer learns in a round? `python -m tests.bench.convergence.spectrum` (2 minutes).

Four peers of the preset `tiny` at 1/64. Of the hidden matrices' deltas, and of what is compressed (decayed residual and
delta), it prints how much of the energy different codes of equal size keep, beside the most that any code of that size
keeps of values that are Gaussian and independent (rate-distortion: 1 - 2^(-2R) at R bits a value).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import torch

from tests.bench.convergence.gates import SIXTYFOURTH8
from tests.bench.convergence.swarm import Peer, Setting, set_up
from tscale.kernels.init import init_state
from tscale.kernels.replica import OuterState
from tscale.kernels.screen import Share

PEERS, STEPS, ROUNDS = 4, 10, (5, 20, 40)
BITS = 0.147
"""A parameter, at 1/64."""
FACTOR_BITS = 4.0
"""A value of the two factors of a low rank, which is generous."""


def kept_by_size(values: np.ndarray, part: int) -> float:
    """Share of the energy in the largest 1/part of the values."""
    squares = np.sort(np.square(values, dtype=np.float64).ravel())[::-1]
    return float(squares[: max(1, values.size // part)].sum() / squares.sum())


def kept_by_rank(values_RC: np.ndarray) -> float:
    """Share of the energy in the best approximation whose factors take BITS a parameter; ranks between are blended."""
    rank = BITS * values_RC.size / (FACTOR_BITS * sum(values_RC.shape))
    energies = np.square(np.linalg.svd(values_RC.astype(np.float64), compute_uv=False))
    whole = int(rank)
    return float((energies[:whole].sum() + (rank - whole) * energies[whole]) / energies.sum())


def main() -> None:
    """Prints a table."""
    torch.set_num_threads(1)
    setting = set_up(replace(SIXTYFOURTH8, steps=(STEPS,) * PEERS))
    state = OuterState(init_state(setting.kernels.model, setting.variant.seed), None)
    peers = [Peer(setting, index, state) for index in range(PEERS)]
    print(f"the most of independent Gaussian values at {BITS} bits: {1 - 2 ** (-2 * BITS):.3f}", flush=True)
    print("round  correlation of two peers' deltas  what               largest 1/64  low rank  largest 1/16")
    density, tokens = setting.variant.density(0), 0
    for round_ in range(max(ROUNDS) + 1):
        deltas, sums, shares = [], [], []
        for peer in peers:
            peer.follow(round_ - 1, tokens)
            peer.train(STEPS)
            deltas.append(peer.replica.start - peer.replica.local)
            sums.append(peer.replica.residual * np.float32(setting.variant.beta) + deltas[-1])
            closed = peer.close(density)
            shares.append(Share(closed.decoded, float(closed.tokens), closed.gain))
        if round_ in ROUNDS:
            pairs = [np.corrcoef(a, b)[0, 1] for a, b in combinations(deltas, 2)]
            for what, vectors in (("delta", deltas), ("residual + delta", sums)):
                by_size, by_rank, denser = (_mean(setting, vectors[0], code) for code in _CODES)
                print(
                    f"{round_:5}  {np.mean(pairs):32.2f}  {what:18} {by_size:12.3f} {by_rank:9.3f} {denser:13.3f}",
                    flush=True,
                )
        peers[0].replica.fold(shares)
        tokens += sum(int(share.tokens) for share in shares)
        for peer in peers:
            peer.adopt(peers[0].replica.head, round_, tokens)


_CODES: tuple[Callable[[np.ndarray], float], ...] = (
    lambda values: kept_by_size(values, 64),
    kept_by_rank,
    lambda values: kept_by_size(values, 16),
)


def _mean(setting: Setting, vector: np.ndarray, kept: Callable[[np.ndarray], float]) -> float:
    """Mean over the hidden matrices."""
    layout = setting.kernels.layout
    pairs = zip(layout.tensors, layout.slices, strict=True)
    return float(np.mean([kept(vector[where].reshape(spec.shape)) for spec, where in pairs if spec.role == "matrix"]))


if __name__ == "__main__":
    main()
