"""Attention over all slots in one fused kernel on CUDA, with the window, the slope and the documents inside.

Suffixes: B sequences, T positions, H heads, Q head width, N blocks of `BLOCK` positions. FlexAttention (torch 2.9 or
newer) computes only the blocks of queries and slots that are listed. Elsewhere than on CUDA it runs unfused, in memory
quadratic in T: for tests.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tscale.kernels.attention_rule import SLOPE_UNIT, ScoreRule

BLOCK = 128


def flex_slot_attention(
    q_BHTQ: torch.Tensor,
    k_BHTQ: torch.Tensor,
    v_BHTQ: torch.Tensor,
    rule: ScoreRule,
    doc_start_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B, H, T, Q]; slot 0 of the keys and values is the virtual entry and must be zero."""
    fall = -SLOPE_UNIT * rule.slope

    def fallen(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        return score + torch.where(slot == 0, 0.0, (t + 1 - slot) * fall)

    mask = slot_blocks(q_BHTQ.shape[0], q_BHTQ.shape[2], rule, doc_start_BT, q_BHTQ.device)
    attend = torch.compile(flex_attention) if q_BHTQ.is_cuda else flex_attention
    score_mod = fallen if rule.slope else None
    out = attend(q_BHTQ, k_BHTQ, v_BHTQ, score_mod=score_mod, block_mask=mask, scale=rule.scale)
    assert isinstance(out, torch.Tensor)
    return out


def slot_blocks(
    batch: int, positions: int, rule: ScoreRule, doc_start_BT: torch.Tensor | None, device: torch.device
) -> BlockMask:
    """Which blocks of slots every block of queries needs, in whole or in part; no mask over T x T is made.

    A document's start must not fall along a sequence.
    """
    place = torch.arange(positions, device=device)
    lowest_BT = (place + 1 - rule.window).clamp_min(1).expand(batch, -1)
    if doc_start_BT is not None:
        lowest_BT = torch.maximum(lowest_BT, doc_start_BT + 1)

    def visible(b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return (slot == 0) | ((slot <= t) & (slot >= lowest_BT[b, t]))

    count = -(-positions // BLOCK)
    block = torch.arange(count, device=device)
    last = (block * BLOCK + BLOCK - 1).clamp_max(positions - 1)
    # the first query of a block sees furthest back, the last one least far
    from_BN, whole_from_BN = lowest_BT[:, block * BLOCK, None], lowest_BT[:, last, None]
    needed = (block == 0) | ((block <= block[:, None]) & (block * BLOCK + BLOCK > from_BN))
    whole = (block > 0) & (block < block[:, None]) & (block * BLOCK >= whole_from_BN)
    return BlockMask.from_kv_blocks(
        *_listed(needed & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(positions, positions),
    )


def _listed(wanted_BNN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks each row of [B, N, N] wants and their numbers first in order, [B, 1, N] and [B, 1, N, N]."""
    order = wanted_BNN.to(torch.int32).argsort(dim=2, descending=True, stable=True)
    return wanted_BNN.sum(2, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
