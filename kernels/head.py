"""The loss of the head over blocks of tokens, so that the logits of a long batch are never all there at once.

The gradient of a block is known with its logits, so both are computed in one pass over the blocks, and only the
gradients of the state and of the table are kept for the way back. Every trainer calls the same function and adds up
the same blocks in the same order: training in parts gives the bits of training at once.

Suffixes: D width, M positions, m those of a block, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from tscale.kernels.model_config import ModelConfig
from tscale.kernels.model_ops import group_norm

BLOCK_BYTES = 4 << 20
"""What the logits of a block should take."""
LEAST_BLOCK_TOKENS = 256
"""With fewer, reading the table and its gradient for every block would cost more than the products."""


def block_tokens(vocab: int) -> int:
    """Tokens of a block; a function of the vocabulary alone, so that all trainers of a model cut alike."""
    return max(LEAST_BLOCK_TOKENS, BLOCK_BYTES // (4 * vocab))


@dataclass(frozen=True)
class _Head:
    """What is multiplied with what: `logits = scale * z.T @ weight.T + bias`, for the mean over `count` positions."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor
    scale: float
    count: int

    def loss(self, z_Dm: torch.Tensor, targets_m: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of a block in nats."""
        return -self._log_mV(z_Dm).gather(1, targets_m[:, None]).sum()

    def loss_and_gradient(
        self, z_Dm: torch.Tensor, targets_m: torch.Tensor, z_grad_Dm: torch.Tensor, weight_grad_VD: torch.Tensor
    ) -> torch.Tensor:
        """The same; sets the gradient of `z` and adds to that of the table."""
        log_mV, at, factor = self._log_mV(z_Dm), targets_m[:, None], self.scale / self.count
        loss = -log_mV.gather(1, at).sum()
        # softmax minus one at the target
        grad_mV = log_mV.exp_()
        grad_mV.scatter_(1, at, grad_mV.gather(1, at) - 1.0)
        torch.addmm(z_grad_Dm, self.weight_VD.t(), grad_mV.t(), beta=0.0, alpha=factor, out=z_grad_Dm)
        weight_grad_VD.addmm_(grad_mV.t(), z_Dm.t(), alpha=factor)
        return loss

    def _log_mV(self, z_Dm: torch.Tensor) -> torch.Tensor:
        logits_mV = torch.addmm(self.bias_V, z_Dm.t(), self.weight_VD.t(), alpha=self.scale)
        return torch.log_softmax(logits_mV, 1)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, z_DM: torch.Tensor, weight_VD: torch.Tensor, head: _Head, targets_M: torch.Tensor
    ) -> torch.Tensor:
        z_grad_DM, weight_grad_VD = torch.empty_like(z_DM), torch.zeros_like(weight_VD)
        total = torch.zeros((), device=z_DM.device)
        size = block_tokens(weight_VD.shape[0])
        blocks = (x.split(size, -1) for x in (z_DM, targets_M, z_grad_DM))
        for z_Dm, targets_m, z_grad_Dm in zip(*blocks, strict=True):
            total += head.loss_and_gradient(z_Dm, targets_m, z_grad_Dm, weight_grad_VD)
        ctx.gradients = z_grad_DM, weight_grad_VD
        return total / head.count

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("the head's gradient can be asked for once")
        z_grad_DM, weight_grad_VD = ctx.gradients
        # in place and gone: a second copy of a large table would be too much
        ctx.gradients = None
        return z_grad_DM.mul_(grad), weight_grad_VD.mul_(grad), None, None


def head_loss(
    cfg: ModelConfig, weight_VD: torch.Tensor, bias_V: torch.Tensor, state_DM: torch.Tensor, targets_M: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy in nats per token, from the state after the last layer; targets are int64 [M].

    It can be differentiated once.
    """
    z_DM = group_norm(state_DM, cfg.head_dim)
    head = _Head(weight_VD.detach(), bias_V, cfg.width**-0.5, targets_M.numel())
    if torch.is_grad_enabled() and (z_DM.requires_grad or weight_VD.requires_grad):
        return _HeadLoss.apply(z_DM, weight_VD, head, targets_M)
    total = torch.zeros((), device=z_DM.device)
    size = block_tokens(cfg.vocab)
    for z_Dm, targets_m in zip(z_DM.split(size, 1), targets_M.split(size), strict=True):
        total += head.loss(z_Dm, targets_m)
    return total / head.count
