"""The rule by which scores of the tscale transformer's attention become weights, and the masks that say it.

Suffixes: B sequences, T positions, S key slots, L queries of a block. Slot `j` holds token `j-1`, slot 0 the virtual
entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SLOPE_UNIT = 0.693
"""Score lost per token of distance at slope 1: half the weight (rounded as published)."""


@dataclass(frozen=True)
class ScoreRule:
    """A query looks `window` tokens back; a token at distance `d` scores `scale * q.k - SLOPE_UNIT * slope * d`."""

    window: int
    slope: float
    scale: float

    def square(
        self, positions: int, doc_start_BT: torch.Tensor | None = None, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """What is added to the scores: [T, S], or [B, 1, T, S] with documents."""
        token = torch.arange(positions, device=device) - 1
        distance = torch.arange(positions, device=device)[:, None] - token
        valid = (distance >= 1) & (distance <= self.window) & (token >= 0)
        if doc_start_BT is not None:
            valid = valid & (token >= doc_start_BT[:, None, :, None])
        bias = self._fall(distance).expand(valid.shape).masked_fill(~valid, -math.inf)
        bias[..., 0] = 0.0
        return bias

    def relative(self, queries: int, before: int, like: torch.Tensor) -> torch.Tensor:
        """The same for `queries` neighbours and the slots from `before - 1` ahead of the first one's, without the
        virtual entry, documents and the start of the sequence: [L, L + before - 1].

        Query `r` has its own slot in column `r + before - 1`; at the same place in any block it is the same.
        """
        row = torch.arange(queries, device=like.device)[:, None]
        distance = row - torch.arange(queries + before - 1, device=like.device) + before
        return self._fall(distance, like.dtype).masked_fill((distance < 1) | (distance > self.window), -math.inf)

    def _fall(self, distance: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return distance.to(dtype) * (-SLOPE_UNIT * self.slope)
