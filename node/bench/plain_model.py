"""The tscale transformer and its optimizer as one would write them first: modules over [B, T, D], one tensor at a time.

What a worker's training loop is measured against. It has torch's fused parts (attention, RMS norm, AdamW) and none of
this project's. Suffixes: B sequences, T positions, D width, H heads, Q head width, P = H*Q, R = combine.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from tscale.kernels.block import output_bias
from tscale.kernels.layout import Layout
from tscale.kernels.model_config import LayerReach, ModelConfig, layer_reaches, model_layout
from tscale.kernels.polar import minimax_triples

NORM_EPS = 1e-6
ROPE_THETA = 500000.0
SLOPE_UNIT = 0.693
NEWTON_SCHULZ_STEPS = 5
SMALLEST_SINGULAR = 3e-3


class PlainBlock(torch.nn.Module):
    """One layer."""

    def __init__(self, cfg: ModelConfig, reach: LayerReach) -> None:
        super().__init__()
        self.cfg = cfg
        self.reach = reach
        p, d, f = cfg.projection_width, cfg.width, cfg.relu_width
        self.qc = torch.nn.Parameter(torch.empty(2 * p, d))
        self.kv = torch.nn.Parameter(torch.empty(2 * p, d))
        self.combine = torch.nn.Parameter(torch.empty(d, p * cfg.combine))
        self.expand = torch.nn.Parameter(torch.empty(f, d))
        self.contract = torch.nn.Parameter(torch.empty(d, f))

    def forward(
        self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask_TS: torch.Tensor | None
    ) -> torch.Tensor:
        """The residual state after the layer."""
        cfg = self.cfg
        x_BTD = x_BTD + self._combined(*self._attend(x_BTD, rope, mask_TS))
        hidden = F.linear(self._norm(x_BTD), self.expand) * cfg.width**-0.5
        return x_BTD + F.linear(torch.relu(self._norm(hidden)), self.contract) * cfg.relu_width**-0.5

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        group = self.cfg.head_dim
        return F.rms_norm(x.unflatten(-1, (-1, group)), (group,), eps=NORM_EPS).flatten(-2)

    def _attend(
        self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask_TS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """C and A, each [B, T, P]. Keys and values are moved one back: slot 0 is the virtual entry of zeros."""
        cfg = self.cfg
        z = self._norm(x_BTD)
        before = F.pad(z, (0, 0, 1, 0))[:, :-1]
        q, c = (F.linear(z, self.qc) * cfg.width**-0.5).chunk(2, -1)
        k, v = (F.linear(before, self.kv) * cfg.width**-0.5).chunk(2, -1)
        q, c, v = self._norm(q), self._norm(c), self._norm(v)
        q, k, v = (y.unflatten(-1, (cfg.heads, -1)).transpose(1, 2) for y in (q, k, v))
        cos, sin = rope
        q, k = _turned(q, cos[1:], sin[1:]), _turned(k, cos[:-1], sin[:-1])
        scale = 0.5 * cfg.head_dim**-0.5
        if self.reach.window == 1:
            a = torch.sigmoid((q * k).sum(-1, keepdim=True) * scale) * v
        else:
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TS, is_causal=mask_TS is None, scale=scale)
        return c, a.transpose(1, 2).flatten(2)

    def _combined(self, c_BTP: torch.Tensor, a_BTP: torch.Tensor) -> torch.Tensor:
        cfg = self.cfg
        r = cfg.combine
        bits = (2,) * (r.bit_length() - 1)
        c = c_BTP.unflatten(-1, (-1, *bits))
        # i xor row is a flip along the bits that are set in row
        flips = [
            [axis - len(bits) for axis in range(len(bits)) if row >> (len(bits) - 1 - axis) & 1] for row in range(r)
        ]
        rows = torch.stack([c.flip(axes).flatten(3) if axes else c.flatten(3) for axes in flips], dim=3)
        products = (rows * a_BTP.unflatten(-1, (-1, 1, r))).flatten(2)
        return F.linear(products, self.combine) * (cfg.projection_width * r) ** -0.5


def _turned(x_BHTQ: torch.Tensor, cos_TQ: torch.Tensor, sin_TQ: torch.Tensor) -> torch.Tensor:
    first, second = x_BHTQ.unflatten(-1, (2, 2, -1)).unbind(-2)
    turned = torch.stack((-second, first), dim=-2).flatten(-3)
    return x_BHTQ * cos_TQ + turned * sin_TQ


class PlainModel(torch.nn.Module):
    """The whole model; takes its parameters from a flat vector, as copies."""

    def __init__(self, cfg: ModelConfig, flat: np.ndarray, counts: np.ndarray, positions: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = torch.nn.Parameter(torch.empty(cfg.vocab, cfg.width))
        self.head = torch.nn.Parameter(torch.empty(cfg.vocab, cfg.width))
        self.blocks = torch.nn.ModuleList([PlainBlock(cfg, reach) for reach in layer_reaches(cfg)])
        self.register_buffer("bias_V", output_bias(counts))
        self._rope = _rope_table(cfg.head_dim, positions + 1)
        self._masks = {reach: _mask(reach, positions) for reach in set(layer_reaches(cfg))}
        self._load(model_layout(cfg), flat)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        x_BTD = F.embedding(tokens_BT, self.embed)
        for block in self.blocks:
            x_BTD = block(x_BTD, self._rope, self._masks[block.reach])
        group = self.cfg.head_dim
        z_BTD = F.rms_norm(x_BTD.unflatten(-1, (-1, group)), (group,), eps=NORM_EPS).flatten(-2)
        return F.linear(z_BTD, self.head * self.cfg.width**-0.5, self.bias_V)

    def loss(self, tokens_BT1: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats per token."""
        return F.cross_entropy(self(tokens_BT1[:, :-1]).flatten(0, 1), tokens_BT1[:, 1:].flatten())

    def _load(self, layout: Layout, flat: np.ndarray) -> None:
        with torch.no_grad():
            for spec, view in layout.views(flat):
                kind, _, index = spec.name.partition(".")
                owner = self.blocks[int(index)] if index else self
                getattr(owner, kind).copy_(torch.from_numpy(view))


def _rope_table(head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [T, Q] in the order of a head's values."""
    rates = ROPE_THETA ** (-2.0 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None, None, None] * rates.view(2, 1, -1)
    angles = angles.expand(-1, -1, 2, -1).flatten(1)
    return angles.cos().float(), angles.sin().float()


def _mask(reach: LayerReach, positions: int) -> torch.Tensor | None:
    """What is added to the scores of the slots, [T, S]; None where causal attention says it."""
    if reach.window == 1 or (reach.slope == 0.0 and reach.window >= positions - 1):
        return None
    distance = torch.arange(positions)[:, None] - torch.arange(positions) + 1
    bias = distance * (-SLOPE_UNIT * reach.slope)
    bias = bias.masked_fill((distance < 1) | (distance > reach.window), -math.inf)
    bias[:, 0] = 0.0
    return bias


class PlainMuon(torch.optim.Optimizer):
    """Muon, one parameter after the other; `heads` says how many matrices a parameter fuses by rows."""

    def __init__(self, groups: list[dict[str, object]], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "heads": 1})
        self._triples = minimax_triples(NEWTON_SCHULZ_STEPS, SMALLEST_SINGULAR)

    @torch.no_grad()
    def step(self) -> None:
        """One step on all parameters."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                smooth = state["momentum"].lerp_(weight.grad, 1.0 - group["momentum"])
                x = smooth.view(group["heads"], -1, weight.shape[1])
                rows, columns = x.shape[1:]
                update = self._orthogonal(x).reshape(weight.shape)
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * max(rows, columns) ** 0.5)

    def _orthogonal(self, x: torch.Tensor) -> torch.Tensor:
        tall = x.shape[1] > x.shape[2]
        x = x.mT if tall else x
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-20)
        for a, b, c in self._triples:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.mT if tall else x
