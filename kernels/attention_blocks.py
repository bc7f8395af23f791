"""Attention by blocks of queries, for any window and with documents: what is kept for the way back is linear in T.

Suffixes: B sequences, T positions, M = B*T, H heads, Q head width, L queries of a block, S slots it can see.

The virtual entry has no slot here: it adds `exp(0)` to the sum of the weights. The way back recomputes the weights
from the logarithm of that sum (Dao et al., FlashAttention, arXiv 2205.14135, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx

from tscale.kernels.attention_rule import ScoreRule

FEWEST_QUERIES, MOST_QUERIES = 64, 256


def block_attention(
    q_HQM: torch.Tensor,
    k_HQM: torch.Tensor,
    v_HQM: torch.Tensor,
    shape: tuple[int, int],
    rule: ScoreRule,
    doc_start_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [H, Q, M] for `shape` = (B, T). Scores exist for one sequence and one block of queries at a time.

    `doc_start_BT` must not fall along a sequence: slots that no query of a block can see are left out.
    """
    return _BlockAttention.apply(q_HQM, k_HQM, v_HQM, doc_start_BT, _Cut(shape, rule))


@dataclass(frozen=True)
class _Block:
    """Queries and the slots before them as places in M, and the mask [L, S] between them."""

    queries: slice
    slots: slice
    mask_LS: torch.Tensor


@dataclass(frozen=True)
class _Cut:
    """How sequences are cut into blocks."""

    shape: tuple[int, int]
    rule: ScoreRule

    def blocks(self, like: torch.Tensor, doc_start_BT: torch.Tensor | None) -> Iterator[_Block]:
        """Every block in order; one without slots sees nothing but the virtual entry and is left out."""
        sequences, positions = self.shape
        window = min(self.rule.window, positions)
        length = min(max(window, FEWEST_QUERIES), MOST_QUERIES)
        mask = self.rule.relative(length, window, like)
        for sequence in range(sequences):
            begin = sequence * positions
            for first in range(0, positions, length):
                stop = min(first + length, positions)
                origin = first + 1 - window
                start = max(1, origin)
                if doc_start_BT is not None:
                    start = max(start, int(doc_start_BT[sequence, first]) + 1)
                if start >= stop:
                    continue
                mask_LS = mask[: stop - first, start - origin : stop - origin]
                if doc_start_BT is not None:
                    token = torch.arange(start, stop, device=like.device) - 1
                    mask_LS = mask_LS.masked_fill(token < doc_start_BT[sequence, first:stop, None], -math.inf)
                yield _Block(slice(begin + first, begin + stop), slice(begin + start, begin + stop), mask_LS)


def _scores(q_HQM: torch.Tensor, k_HQM: torch.Tensor, block: _Block, scale: float) -> torch.Tensor:
    queries, keys = q_HQM[:, :, block.queries], k_HQM[:, :, block.slots]
    return torch.baddbmm(block.mask_LS, queries.transpose(1, 2), keys, alpha=scale)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        doc_start_BT: torch.Tensor | None,
        cut: _Cut,
    ) -> torch.Tensor:
        out = torch.zeros_like(q)
        log_sum_HM = q.new_zeros(q.shape[0], q.shape[2])
        for block in cut.blocks(q, doc_start_BT):
            weight = _scores(q, k, block, cut.rule.scale)
            top = weight.amax(2, keepdim=True).clamp_min_(0.0)
            weight.sub_(top).exp_()
            total = weight.sum(2, keepdim=True).add_(top.neg().exp_())
            out[:, :, block.queries] = torch.bmm(v[:, :, block.slots], weight.div_(total).transpose(1, 2))
            log_sum_HM[:, block.queries] = total.log_().add_(top).squeeze(2)
        ctx.save_for_backward(q, k, v, out, log_sum_HM, doc_start_BT)
        ctx.cut = cut
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, out, log_sum_HM, doc_start_BT = ctx.saved_tensors
        scale = ctx.cut.rule.scale
        along_HM = (grad * out).sum(1)
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.cut.blocks(q, doc_start_BT):
            here, seen = block.queries, block.slots
            weight = _scores(q, k, block, scale).sub_(log_sum_HM[:, here, None]).exp_()
            grad_v[:, :, seen].baddbmm_(grad[:, :, here], weight)
            change = torch.bmm(grad[:, :, here].transpose(1, 2), v[:, :, seen])
            change.sub_(along_HM[:, here, None]).mul_(weight).mul_(scale)
            grad_q[:, :, here] = torch.bmm(k[:, :, seen], change.transpose(1, 2))
            grad_k[:, :, seen].baddbmm_(q[:, :, here], change)
        return grad_q, grad_k, grad_v, None, None
