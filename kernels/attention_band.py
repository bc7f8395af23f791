"""Attention over a narrow window: blocks of one window's length, each beside the block before it.

Suffixes: B sequences, T positions, H heads, Q head width, N blocks of W positions, W window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tscale.kernels.attention_rule import ScoreRule


def band_attention(q_BTHQ: torch.Tensor, k_BTHQ: torch.Tensor, v_BTHQ: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """Attention [B, T, H, Q] over 2W slots per position instead of T; T is filled up to whole blocks.

    Slot 0 of the keys and values is the virtual entry and must be zero. All blocks but the first share one mask.
    """
    positions, w = q_BTHQ.shape[1], rule.window
    missing = -positions % w
    if missing:
        q_BTHQ, k_BTHQ, v_BTHQ = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q_BTHQ, k_BTHQ, v_BTHQ))
    square = rule.square(w, device=q_BTHQ.device)
    first = _attend(q_BTHQ[:, :w], k_BTHQ[:, :w], v_BTHQ[:, :w], square, rule.scale)
    if q_BTHQ.shape[1] == w:
        return first[:, :positions]
    # the first slot of the block before is out of every window's reach, so the virtual entry takes its column
    mask = rule.relative(w, w + 1, q_BTHQ)
    mask[:, 0] = 0.0
    later = _attend(_own(q_BTHQ, w), _with_block_before(k_BTHQ, w), _with_block_before(v_BTHQ, w), mask, rule.scale)
    b, _, h, q = q_BTHQ.shape
    return torch.cat((first, later.reshape(b, -1, h, q)), dim=1)[:, :positions]


def _attend(
    q_BTHQ: torch.Tensor, k_BSHQ: torch.Tensor, v_BSHQ: torch.Tensor, mask_TS: torch.Tensor, scale: float
) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTHQ, k_BSHQ, v_BSHQ))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TS, scale=scale).transpose(1, 2)


def _own(x_BTHQ: torch.Tensor, w: int) -> torch.Tensor:
    """Every block but the first: [B*(N-1), W, H, Q]."""
    return x_BTHQ[:, w:].reshape(-1, w, *x_BTHQ.shape[2:])


def _with_block_before(x_BTHQ: torch.Tensor, w: int) -> torch.Tensor:
    """Every block but the first behind the one before it: [B*(N-1), 2W, H, Q]."""
    blocks = x_BTHQ.unflatten(1, (-1, w))
    before = F.pad(blocks[:, :-1, 1:], (0, 0, 0, 0, 1, 0))
    return torch.cat((before, blocks[:, 1:]), dim=2).flatten(0, 1)
