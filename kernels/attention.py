"""Attention of the tscale transformer: backward-looking windows, score slopes, a virtual entry to attend to nothing.

Suffixes: B sequences, T positions, H heads, Q head width, S key slots, W window, N blocks of W positions.

A token attends to earlier tokens only, never to itself, and to a virtual entry of score 0 and value 0. Keys and
values therefore arrive here moved one position to the right with zeros in slot 0: slot `j` holds token `j-1`, slot 0
is the virtual entry, and plain causal attention over the slots is the published rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tscale.kernels.model_config import LayerReach

SLOPE_UNIT = 0.693
"""Score lost per token of distance at slope 1: half the weight (rounded as published)."""
_BANDED_FROM_WINDOWS = 4


@dataclass(frozen=True)
class SlotBias:
    """What is added to the scores of one layer's slots, for sequences of `positions` tokens."""

    reach: LayerReach
    positions: int

    @property
    def banded(self) -> bool:
        """Whether blocks of one window's length are cheaper than the whole square."""
        return self.positions >= _BANDED_FROM_WINDOWS * self.reach.window and self.positions % self.reach.window == 0

    def square(self, doc_start_BT: torch.Tensor | None = None) -> torch.Tensor | None:
        """Bias [T, S], or [B, 1, T, S] with documents; None where plain causal attention over the slots says it."""
        if doc_start_BT is None and self.reach.slope == 0.0 and self.reach.window >= self.positions - 1:
            return None
        token = torch.arange(self.positions) - 1
        distance = torch.arange(self.positions)[:, None] - token
        valid = (distance >= 1) & (distance <= self.reach.window) & (token >= 0)
        if doc_start_BT is not None:
            valid = valid & (token >= doc_start_BT[:, None, :, None])
        return self._bias(distance, valid)

    def band(self) -> torch.Tensor:
        """Bias [N, 1, W, 2W]: block `n` sees its own slots and the block's before it; column 0 is the virtual entry."""
        w = self.reach.window
        block = torch.arange(self.positions // w)[:, None, None, None]
        token = (block - 1) * w + torch.arange(2 * w) - 1
        distance = block * w + torch.arange(w)[:, None] - token
        return self._bias(distance, (distance >= 1) & (distance <= w) & (token >= 0))

    def _bias(self, distance: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        fall = distance.to(torch.float32) * (-SLOPE_UNIT * self.reach.slope)
        bias = fall.expand(valid.shape).masked_fill(~valid, -math.inf)
        bias[..., 0] = 0.0
        return bias


def slot_attention(
    q_BTHQ: torch.Tensor, k_BTHQ: torch.Tensor, v_BTHQ: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention over all slots; without a bias it is causal over the slots. Returns [B, T, H, Q]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHQ, k_BTHQ, v_BTHQ))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale)
    return out.transpose(1, 2)


def band_attention(
    q_BTHQ: torch.Tensor, k_BTHQ: torch.Tensor, v_BTHQ: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same for a narrow window, block by block: 2W slots per position instead of T. W divides T."""
    b, t, h, q = q_BTHQ.shape
    n, w = bias.shape[0], bias.shape[2]

    def blocks(x_BTHQ: torch.Tensor) -> torch.Tensor:
        own = x_BTHQ.reshape(b, n, w, h, q)
        # the first slot of the block before is out of every window's reach, so the virtual entry takes its column
        before = F.pad(own[:, :-1, 1:], (0, 0, 0, 0, 1, 0, 1, 0))
        return torch.cat((before, own), dim=2).flatten(0, 1).transpose(1, 2)

    queries = q_BTHQ.reshape(b * n, w, h, q).transpose(1, 2)
    mask = bias.repeat(b, 1, 1, 1)
    out = F.scaled_dot_product_attention(queries, blocks(k_BTHQ), blocks(v_BTHQ), attn_mask=mask, scale=scale)
    return out.transpose(1, 2).reshape(b, t, h, q)
