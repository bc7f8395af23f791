"""Operations of the tscale transformer whose derivative is written out, because autograd's takes many more passes.

All work feature-major, [features, M]: M = B*T positions lie side by side, so that norms over a group of features,
RoPE pairs half a block apart and the combiner's `i xor r` all move whole rows of memory.
"""

from __future__ import annotations

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
    def forward(ctx: FunctionCtx, c_HQM: torch.Tensor, a_HQM: torch.Tensor, combine: int) -> torch.Tensor:
        h, q, m = c_HQM.shape
        c, a = _by_entry(c_HQM, combine), _by_entry(a_HQM, combine)
        out = c_HQM.new_empty(h, q // combine, combine, combine, m)
        for row in range(combine):
            for entry in range(combine):
                torch.mul(c[entry ^ row], a[entry], out=out[:, :, row, entry])
        ctx.save_for_backward(c_HQM, a_HQM)
        ctx.combine = combine
        return out.view(-1, m)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        c_HQM, a_HQM = ctx.saved_tensors
        combine = ctx.combine
        c, a = _by_entry(c_HQM, combine), _by_entry(a_HQM, combine)
        grad_c, grad_a = torch.empty_like(c_HQM), torch.empty_like(a_HQM)
        to_c, to_a = _by_entry(grad_c, combine), _by_entry(grad_a, combine)
        products = grad.view(*c_HQM.shape[:1], -1, combine, combine, grad.shape[-1])
        for entry in range(combine):
            torch.mul(products[:, :, 0, entry], c[entry], out=to_a[entry])
            torch.mul(products[:, :, 0, entry], a[entry], out=to_c[entry])
        for row in range(1, combine):
            for entry in range(combine):
                to_a[entry].addcmul_(products[:, :, row, entry], c[entry ^ row])
                to_c[entry ^ row].addcmul_(products[:, :, row, entry], a[entry])
        return grad_c, grad_a, None


def _by_entry(x_HQM: torch.Tensor, combine: int) -> tuple[torch.Tensor, ...]:
    """The features `i` with each value of `i mod R`, as views [H, Q/R, M]."""
    return x_HQM.view(x_HQM.shape[0], -1, combine, x_HQM.shape[-1]).unbind(2)


def combine(c_HQM: torch.Tensor, a_HQM: torch.Tensor, combine: int) -> torch.Tensor:
    """The products `C[h, i xor r] * A[h, i]` for r below R = `combine`, [R*P, M]. Both must be contiguous.

    Rows are ordered by head, then i div R, then r, then i mod R: the order of the columns of the combine matrix.
    """
    return _Combine.apply(c_HQM, a_HQM, combine)
