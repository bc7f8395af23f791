"""Operations of the tscale transformer whose derivative is written out, because autograd's takes many more passes.

All work feature-major, [features, M]: M = B*T positions lie side by side, so that norms over a group of features,
RoPE pairs half a block apart and the combiner's `i xor r` all move whole rows of memory.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import FunctionCtx

NORM_EPS = 1e-6
ROPE_THETA = 500000.0


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_GQM: torch.Tensor) -> torch.Tensor:
        mean_square = (x_GQM * x_GQM).sum(1, keepdim=True).mul_(1.0 / x_GQM.shape[1])
        inverse_rms = mean_square.add_(NORM_EPS).rsqrt_()
        y = x_GQM * inverse_rms
        ctx.save_for_backward(y, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        y, inverse_rms = ctx.saved_tensors
        along = (grad * y).sum(1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1.0 / y.shape[1]).mul_(inverse_rms)


def group_norm(x: torch.Tensor, group: int) -> torch.Tensor:
    """`N(x)`: groups of `group` features of [features, M] scaled to a mean square of 1; zeros stay zeros."""
    return _GroupNorm.apply(x.view(-1, group, x.shape[-1])).view(x.shape)


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return grad.t().contiguous()


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The transpose of a matrix in memory of its own, also on the way back."""
    return _Transpose.apply(x)


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_DBT: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x_DBT)
        out[..., 0] = 0.0
        out[..., 1:] = x_DBT[..., :-1]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(grad)
        out[..., -1] = 0.0
        out[..., :-1] = grad[..., 1:]
        return out


def shifted(x_DM: torch.Tensor, positions: int) -> torch.Tensor:
    """Every run of `positions` columns moved one to the right, with zeros in its first."""
    return _Shift.apply(x_DM.view(x_DM.shape[0], -1, positions)).view(x_DM.shape)


class _SingleAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        weight = (q * k).sum(1, keepdim=True).mul_(scale).sigmoid_()
        slope = torch.addcmul(weight, weight, weight, value=-1.0).mul_(scale)
        if seen is not None:
            weight.mul_(seen)
            slope.mul_(seen)
        ctx.save_for_backward(q, k, v, weight, slope)
        return v * weight

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, weight, slope = ctx.saved_tensors
        along = (grad * v).sum(1, keepdim=True).mul_(slope)
        return k * along, q * along, grad * weight, None, None


def single_attention(
    q_HQM: torch.Tensor, k_HQM: torch.Tensor, v_HQM: torch.Tensor, seen_M: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention to one key and the virtual entry, `sigmoid(scale * q.k) * v` per head: no product over positions.

    `seen_M` (1 or 0) says where the one key may be seen at all; None means everywhere.
    """
    return _SingleAttention.apply(q_HQM, k_HQM, v_HQM, seen_M, scale)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    first, second = x.unbind(2)
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[:, :, 0]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[:, :, 1]).addcmul_(first, sin, value=sign)
    return out


def rope_table(head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [2, head_dim/4, 1, positions] by which RoPE turns pair `j` at each position.

    A head has two blocks, and in each the first half's features pair with the second half's; pairs are numbered
    through both blocks and pair `j` turns by `theta**(-2j/head_dim)` a position.
    """
    rates = torch.tensor([ROPE_THETA ** (-2.0 * j / head_dim) for j in range(head_dim // 2)], dtype=torch.float64)
    angles = rates.view(2, -1, 1, 1) * torch.arange(positions, dtype=torch.float64)
    return angles.cos().to(torch.float32), angles.sin().to(torch.float32)


def rope(x_PM: torch.Tensor, head_dim: int, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the pairs of every head of [P, M]; M is read as any number of runs of the table's positions."""
    cos, sin = table
    shape = (-1, 2, 2, head_dim // 4, x_PM.shape[1] // cos.shape[-1], cos.shape[-1])
    return _Rope.apply(x_PM.view(shape), cos, sin).view(x_PM.shape)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, c_HQM: torch.Tensor, a_HQM: torch.Tensor, pairing: torch.Tensor) -> torch.Tensor:
        r = math.isqrt(pairing.numel())
        h, _, m = c_HQM.shape
        c = c_HQM.view(h, -1, r, m).index_select(2, pairing % r).view(h, -1, r, r, m)
        a = a_HQM.reshape(h, -1, 1, r, m)
        ctx.save_for_backward(c, a, pairing)
        return (c * a).view(-1, m)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        c, a, pairing = ctx.saved_tensors
        h, _, r, _, m = c.shape
        grad = grad.view(c.shape)
        grad_a = (grad * c).sum(2).view(h, -1, m)
        # the pairing is its own inverse: what C gave to row r, entry i of the products comes back from there
        grad_c = (grad * a).view(h, -1, r * r, m).index_select(2, pairing).view(c.shape).sum(2).view(h, -1, m)
        return grad_c, grad_a, None


def combine_pairing(combine: int) -> torch.Tensor:
    """For every row r and entry b of `combine` x `combine`, the flat place of (r, b xor r): int64 [combine**2]."""
    return torch.tensor([row * combine + (entry ^ row) for row in range(combine) for entry in range(combine)])


def combine(c_HQM: torch.Tensor, a_HQM: torch.Tensor, pairing: torch.Tensor) -> torch.Tensor:
    """The products `C[h, i xor r] * A[h, i]` for r below R, [R*P, M].

    Rows are ordered by head, then i div R, then r, then i mod R: the order of the columns of the combine matrix.
    `pairing` is `combine_pairing(R)`.
    """
    return _Combine.apply(c_HQM, a_HQM, pairing)
