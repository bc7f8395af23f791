"""The orthogonal polar factor of many small matrices, by Newton-Schulz steps with the best triple for each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

Triple = tuple[float, float, float]

NEWTON_SCHULZ_STEPS = 5
SMALLEST_SINGULAR = 3e-3
"""Singular values below this share of the Frobenius norm are not lifted to 1 in full."""
SAFETY = 1.01
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


def guarded(triples: tuple[Triple, ...], safety: float = SAFETY) -> tuple[Triple, ...]:
    """The same steps for singular values that rounding has pushed up to `safety` times over their interval.

    Beyond its interval a minimax quintic grows fast, and bfloat16 rounds by 0.4 %: unguarded, singular values end
    anywhere up to 3. All steps but the last take their values divided by `safety` (Amsel et al., arXiv 2505.16932).
    """
    return *((a / safety, b / safety**3, c / safety**5) for a, b, c in triples[:-1]), triples[-1]


@dataclass(frozen=True)
class PolarRule:
    """Coefficients of every step, and the type that the matrix products are computed in."""

    triples: tuple[Triple, ...]
    dtype: torch.dtype = torch.float32


def polar_rule(device: str) -> PolarRule:
    """float32 on a CPU, where it is faster than bfloat16 (measured: 1.7 times); guarded bfloat16 on a GPU."""
    triples = minimax_triples(NEWTON_SCHULZ_STEPS, SMALLEST_SINGULAR)
    return PolarRule(guarded(triples), torch.bfloat16) if device == "cuda" else PolarRule(triples)


def polar_factor(batch_NRC: torch.Tensor, rule: PolarRule) -> torch.Tensor:
    """Approximates `U V^T` of every matrix `U S V^T` of [N, R, C], in the rule's type; a zero matrix stays zero.

    Works on the shorter side, with Newton-Schulz steps as in MuLoCo (arXiv 2505.23725). Never writes to its argument.
    """
    tall = batch_NRC.shape[1] > batch_NRC.shape[2]
    x = batch_NRC.transpose(1, 2) if tall else batch_NRC
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (x / norm.clamp_min(1e-20)).to(rule.dtype)
    for a, b, c in rule.triples:
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x
