"""Attention of the tscale transformer: backward-looking windows, score slopes, a virtual entry to attend to nothing.

Suffixes: B sequences, T positions, M = B*T, H heads, Q head width, S key slots.

A token attends to earlier tokens only, never to itself, and to a virtual entry of score 0 and value 0. Keys and
values therefore arrive here moved one position to the right with zeros in slot 0 of every sequence: slot `j` holds
token `j-1`, slot 0 is the virtual entry, and plain causal attention over the slots is the published rule.

Each path takes memory linear in T. A mask over T slots exists for at most `SQUARE_UP_TO` queries at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tscale.kernels.attention_band import band_attention
from tscale.kernels.attention_blocks import block_attention
from tscale.kernels.attention_flex import flex_slot_attention
from tscale.kernels.attention_rule import ScoreRule
from tscale.kernels.model_ops import transposed

SQUARE_UP_TO = 256
"""Positions up to which one mask over all queries and slots is cheaper than any cutting."""
BANDED_FROM_WINDOWS = 4
BANDED_UP_TO_WINDOW = 256


def window_attention(
    q_HQM: torch.Tensor,
    k_HQM: torch.Tensor,
    v_HQM: torch.Tensor,
    shape: tuple[int, int],
    rule: ScoreRule,
    doc_start_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """What every head attends to, [H, Q, M], for `shape` = (B, T), by the cheapest path of the device.

    `doc_start_BT` (int64) holds for each position the index in its sequence where its document starts; it does not
    fall along a sequence, and nothing before it is attended to. A window of 1 has a cheaper way of its own
    (`tscale.kernels.model_ops.single_attention`).
    """
    path = attention_path(rule, shape[1], doc_start_BT is not None, q_HQM.device.type)
    if path in ("band", "blocks"):
        cut = band_attention if path == "band" else block_attention
        return cut(q_HQM, k_HQM, v_HQM, shape, rule, doc_start_BT)
    heads, width, _ = q_HQM.shape
    q, k, v = (
        transposed(x.reshape(heads * width, -1)).view(*shape, heads, width).transpose(1, 2)
        for x in (q_HQM, k_HQM, v_HQM)
    )
    if path == "flex":
        out = flex_slot_attention(q, k, v, rule, doc_start_BT)
    else:
        mask = rule.square(shape[1], doc_start_BT, q.device) if path == "square" else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=rule.scale)
    return transposed(out.transpose(1, 2).reshape(-1, heads * width)).view(heads, width, -1)


def attention_path(rule: ScoreRule, positions: int, documents: bool, device: str) -> str:
    """Which way sequences of `positions` tokens take on a kind of device.

    `flex`: one fused kernel, on CUDA; it is compiled for a length, so short prompts do without. `causal`: torch's fused
    kernel without a mask. `square`: the same with one small mask. `band`: blocks of one window. `blocks`: blocks of
    queries with everything recomputed on the way back.
    """
    on_gpu = device == "cuda"
    if on_gpu and positions > SQUARE_UP_TO:
        return "flex"
    if not documents and rule.slope == 0.0 and rule.window >= positions - 1:
        return "causal"
    if not on_gpu and BANDED_FROM_WINDOWS * rule.window <= positions and rule.window <= BANDED_UP_TO_WINDOW:
        return "band"
    return "square" if positions <= SQUARE_UP_TO else "blocks"
