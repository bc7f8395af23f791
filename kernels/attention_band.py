"""Attention over a narrow window: blocks of one window's length, each with its own slots and the block's before it.

Suffixes: B sequences, T positions, M = B*T, H heads, Q head width, W window, N blocks of W positions in all sequences.

The virtual entry has no slot here: it adds `exp(0)` to the sum of the weights. The way back recomputes the weights
from the logarithm of that sum (Dao et al., FlashAttention, arXiv 2205.14135, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx

from tscale.kernels.attention_rule import ScoreRule

BLOCKS_AT_ONCE = 32
"""So many blocks of 64 keep their scores in a core's cache."""


def band_attention(
    q_HQM: torch.Tensor,
    k_HQM: torch.Tensor,
    v_HQM: torch.Tensor,
    shape: tuple[int, int],
    rule: ScoreRule,
    doc_start_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [H, Q, M] for `shape` = (B, T), over 2W slots per position instead of T.

    Sequences are filled up to whole blocks.
    """
    missing = -shape[1] % rule.window
    if doc_start_BT is not None:
        doc_start_BT = F.pad(doc_start_BT, (0, missing))
    filled = [_filled(x, shape, missing) for x in (q_HQM, k_HQM, v_HQM)]
    out = _BandAttention.apply(*filled, doc_start_BT, _Band((shape[0], shape[1] + missing), rule))
    if not missing:
        return out
    by_position = out.view(*q_HQM.shape[:2], shape[0], -1)
    return by_position[..., : shape[1]].reshape(q_HQM.shape)


def _filled(x_HQM: torch.Tensor, shape: tuple[int, int], missing: int) -> torch.Tensor:
    if not missing:
        return x_HQM
    return F.pad(x_HQM.reshape(*x_HQM.shape[:2], *shape), (0, missing)).flatten(2)


@dataclass(frozen=True)
class _Band:
    """Sequences of whole blocks; `shape` is (B, T)."""

    shape: tuple[int, int]
    rule: ScoreRule

    def parts(self, heads: int) -> Iterator[tuple[int, slice]]:
        """Heads and runs of blocks whose scores are computed at once."""
        blocks = self.shape[0] * self.shape[1] // self.rule.window
        for head in range(heads):
            for first in range(0, blocks, BLOCKS_AT_ONCE):
                yield head, slice(first, min(first + BLOCKS_AT_ONCE, blocks))

    def mask(self, like: torch.Tensor, doc_start_BT: torch.Tensor | None) -> torch.Tensor:
        """What is added to the scores, [1 or N, W, 2W]; without documents the start of sequences is not in it."""
        w = self.rule.window
        mask = self.rule.relative(w, w + 1, like)[None]
        if doc_start_BT is None:
            return mask
        place = torch.arange(self.shape[1], device=like.device).view(-1, w)
        token = place[:, :1] - w - 1 + torch.arange(2 * w, device=like.device)
        return mask.masked_fill((token[:, None] < doc_start_BT.view(self.shape[0], -1, w, 1)).flatten(0, 1), -math.inf)

    def scores(self, q_NQW: torch.Tensor, k_NQS: torch.Tensor, mask: torch.Tensor, first: int) -> torch.Tensor:
        """Masked scores [n, W, 2W] of the blocks from `first` on."""
        count, w = q_NQW.shape[0], self.rule.window
        alike = mask.shape[0] == 1
        mask = mask if alike else mask[first : first + count]
        scores = torch.baddbmm(mask, q_NQW.transpose(1, 2), k_NQS, alpha=self.rule.scale)
        if alike:
            # the first block of a sequence has none before it, and its first slot is the virtual entry
            scores[-first % (self.shape[1] // w) :: self.shape[1] // w, :, : w + 1] = -math.inf
        return scores


def _own(x_HQM: torch.Tensor, w: int) -> torch.Tensor:
    """Every block as a view: [H, N, Q, W]."""
    return x_HQM.unflatten(2, (-1, w)).transpose(1, 2)


def _with_before(x_HQM: torch.Tensor, w: int) -> torch.Tensor:
    """Every block behind the one before it, overlapping in one copy: [H, N, Q, 2W]."""
    return F.pad(x_HQM, (w, 0)).unfold(2, 2 * w, w).transpose(1, 2)


class _BandAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        doc_start_BT: torch.Tensor | None,
        band: _Band,
    ) -> torch.Tensor:
        w = band.rule.window
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        log_sum_HNW = q.new_empty(q.shape[0], q.shape[2] // w, w)
        queries, keys, values, results = _own(q, w), _with_before(k, w), _with_before(v, w), _own(out, w)
        mask = band.mask(q, doc_start_BT)
        for head, run in band.parts(q.shape[0]):
            weight = band.scores(queries[head, run], keys[head, run], mask, run.start)
            top = weight.amax(2, keepdim=True).clamp_min_(0.0)
            weight.sub_(top).exp_()
            total = weight.sum(2, keepdim=True).add_(top.neg().exp_())
            results[head, run] = torch.bmm(values[head, run], weight.div_(total).transpose(1, 2))
            log_sum_HNW[head, run] = total.log_().add_(top).squeeze(2)
        ctx.save_for_backward(q, k, v, out, log_sum_HNW, doc_start_BT)
        ctx.band = band
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, out, log_sum_HNW, doc_start_BT = ctx.saved_tensors
        band, w = ctx.band, ctx.band.rule.window
        along_HNW = (grad * out).sum(1).view_as(log_sum_HNW)
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        grad_q, grad_k, grad_v = (_own(x, w) for x in grads)
        queries, keys, values, results = _own(q, w), _with_before(k, w), _with_before(v, w), _own(grad, w)
        mask = band.mask(q, doc_start_BT)
        for head, run in band.parts(q.shape[0]):
            weight = band.scores(queries[head, run], keys[head, run], mask, run.start)
            weight.sub_(log_sum_HNW[head, run, :, None]).exp_()
            _add_with_before(grad_v[head], run, torch.bmm(results[head, run], weight))
            change = torch.bmm(results[head, run].transpose(1, 2), values[head, run])
            change.sub_(along_HNW[head, run, :, None]).mul_(weight).mul_(band.rule.scale)
            grad_q[head, run] = torch.bmm(keys[head, run], change.transpose(1, 2))
            _add_with_before(grad_k[head], run, torch.bmm(queries[head, run], change))
        return grads[0], grads[1], grads[2], None, None


def _add_with_before(sum_NQW: torch.Tensor, run: slice, part_nQS: torch.Tensor) -> None:
    """Add gradients of the blocks of `run` and of those before them; the first of all has none before it."""
    w = sum_NQW.shape[2]
    sum_NQW[run].add_(part_nQS[:, :, w:])
    skip = 1 if run.start == 0 else 0
    sum_NQW[run.start - 1 + skip : run.stop - 1].add_(part_nQS[skip:, :, :w])
