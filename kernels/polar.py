"""The orthogonal polar factor of many small matrices, by Newton-Schulz steps with the best triple for each step."""

from __future__ import annotations

import numpy as np
import torch

Triple = tuple[float, float, float]

_EXCHANGES = 40


def _best_quintic(low: float, high: float) -> tuple[Triple, float]:
    """The odd quintic closest to 1 on [low, high] in the maximum norm, and its error: Remez exchange.

    The error of the best one takes its maximum with alternating sign at both ends and at the two points between
    where the derivative vanishes.
    """
    points = np.array([low, low + (high - low) / 3, low + (high - low) * 2 / 3, high])
    triple, error = np.zeros(3), 0.0
    for _ in range(_EXCHANGES):
        signs = np.array([1.0, -1.0, 1.0, -1.0])
        system = np.stack([points, points**3, points**5, signs], axis=1)
        *coefficients, error = np.linalg.solve(system, np.ones(4))
        triple = np.array(coefficients)
        a, b, c = triple
        root = np.sqrt(max(9 * b * b - 20 * a * c, 0.0))
        inner = np.sqrt(np.maximum((-3 * b + np.array([-root, root])) / (10 * c), 0.0))
        moved = np.array([low, *np.sort(inner), high])
        if np.allclose(moved, points, rtol=1e-12, atol=0.0):
            break
        points = moved
    return (float(triple[0]), float(triple[1]), float(triple[2])), abs(float(error))


def minimax_triples(steps: int, low: float) -> tuple[Triple, ...]:
    """Coefficients (a, b, c) of `a*x + b*x**3 + c*x**5` for each step, for singular values in [low, 1].

    Each step is the minimax quintic for the interval the steps before it leave (Amsel et al., "The Polar Express",
    arXiv 2505.16932, show that this greedy choice is the best composition). Computed, not tabulated: under a
    millisecond.
    """
    triples = []
    high = 1.0
    for _ in range(steps):
        # values below a thousandth of the interval only grow, at the pace of the smallest one aimed at
        (a, b, c), error = _best_quintic(max(low, high * 1e-3), high)
        triples.append((a, b, c))
        low, high = low * (a + low * low * (b + low * low * c)), 1.0 + error
    return tuple(triples)


def polar_factor(batch_NRC: torch.Tensor, triples: tuple[Triple, ...]) -> torch.Tensor:
    """Approximates `U V^T` of every matrix `U S V^T` in float32 [N, R, C]; a zero matrix stays zero.

    Works on the shorter side, with Newton-Schulz steps as in MuLoCo (arXiv 2505.23725).
    """
    tall = batch_NRC.shape[1] > batch_NRC.shape[2]
    x = batch_NRC.transpose(1, 2) if tall else batch_NRC
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(1e-20)
    for a, b, c in triples:
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x
