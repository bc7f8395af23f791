"""One block of the tscale transformer, the embedding and the head, as pure functions over explicit weights.

A model that holds all layers and an engine that holds a few of them at a time call the same functions.
Suffixes: B sequences, T positions, M = B*T, D width, H heads, Q head width, P = H*Q, V vocabulary, N rows and K
columns of a weight. Everything is feature-major, [features, M]. `N(x)` divides each group of Q features by its root
mean square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from tscale.kernels.attention import window_attention
from tscale.kernels.attention_rule import ScoreRule
from tscale.kernels.model_config import LayerReach, ModelConfig
from tscale.kernels.model_ops import (
    combine,
    group_norm,
    rope,
    rope_table,
    shifted,
    single_attention,
    transposed,
)

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`weight [N, K], x [K, M] -> weight @ x [N, M]` in float32, with a derivative for both."""
RopeTable = tuple[torch.Tensor, torch.Tensor]


class BlockWeights(NamedTuple):
    """The matrices of one layer, in the order of the layout's kinds. R = combine, F = feed-forward width."""

    qc: torch.Tensor
    """[2P, D]: heads of Q, then of C."""
    kv: torch.Tensor
    """[2P, D]: heads of K, then of V."""
    combine: torch.Tensor
    """[D, R*P]"""
    expand: torch.Tensor
    """[F, D]"""
    contract: torch.Tensor
    """[D, F]"""


class BlockTables:
    """Constants of a model's blocks on one device: RoPE angles, grown as needed."""

    def __init__(self, cfg: ModelConfig, device: torch.device | str = "cpu") -> None:
        self.head_dim = cfg.head_dim
        self.device = torch.device(device)
        self._rope = self._new_rope(2)

    def rope(self, positions: int) -> RopeTable:
        """Cosines and sines of the first `positions` positions."""
        if self._rope[0].shape[-1] < positions:
            self._rope = self._new_rope(positions)
        cos, sin = self._rope
        return cos[..., :positions], sin[..., :positions]

    def _new_rope(self, positions: int) -> RopeTable:
        cos, sin = rope_table(self.head_dim, positions)
        return cos.to(self.device), sin.to(self.device)


@dataclass(frozen=True)
class BlockPass:
    """What all layers of one pass share: the model's sizes, its tables, the batch's shape, and how to multiply.

    `doc_start_BT` holds for each position the index in its sequence where its document starts: nothing before that
    is attended to. `product` replaces the five matrix products of a layer (None: float32, fused with the addition).
    """

    cfg: ModelConfig
    tables: BlockTables
    shape: tuple[int, int]
    doc_start_BT: torch.Tensor | None = None
    product: Product | None = None

    def multiply(self, weight_NK: torch.Tensor, x_KM: torch.Tensor) -> torch.Tensor:
        """`weight @ x`."""
        return (self.product or torch.mm)(weight_NK, x_KM)

    def add_product(
        self, state_NM: torch.Tensor, weight_NK: torch.Tensor, x_KM: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`state + scale * weight @ x`."""
        if self.product is None:
            return torch.addmm(state_NM, weight_NK * scale, x_KM)
        return torch.add(state_NM, self.product(weight_NK, x_KM), alpha=scale)


def block_forward(run: BlockPass, reach: LayerReach, weights: BlockWeights, state_DM: torch.Tensor) -> torch.Tensor:
    """The residual state [D, M] after one layer."""
    return feed_forward(run, weights, attend(run, reach, weights, state_DM))


def embed(weight_VD: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """The residual state [D, M] before the first layer, from int64 [B, T]."""
    return transposed(F.embedding(tokens_BT.flatten(), weight_VD))


def output_bias(counts: np.ndarray) -> torch.Tensor:
    """ln(count + 0.5), normalised to log-probabilities: float32 [V] from int64 [V]."""
    raised = torch.from_numpy(np.asarray(counts, np.float64) + 0.5)
    return torch.log(raised / raised.sum()).to(torch.float32)


def logits(cfg: ModelConfig, weight_VD: torch.Tensor, bias_V: torch.Tensor, state_DM: torch.Tensor) -> torch.Tensor:
    """Logits [M, V] of the token after each position."""
    z_DM = group_norm(state_DM, cfg.head_dim)
    return torch.addmm(bias_V, z_DM.t(), (weight_VD * cfg.width**-0.5).t())


def attend(run: BlockPass, reach: LayerReach, weights: BlockWeights, state_DM: torch.Tensor) -> torch.Tensor:
    """The residual state after the attention half of a layer."""
    cfg = run.cfg
    z_DM = group_norm(state_DM, cfg.head_dim)
    # keys and values of slot j belong to token j-1; slot 0 is the virtual entry (kernels/attention.py)
    before_DM = shifted(z_DM, run.shape[1])
    # N is free of scale, so of these products only K needs its 1/sqrt(D), and that goes into the score's scale
    q, c = group_norm(run.multiply(weights.qc, z_DM), cfg.head_dim).split(cfg.projection_width)
    k, v = run.multiply(weights.kv, before_DM).split(cfg.projection_width)
    qkv = (q, k, group_norm(v, cfg.head_dim))
    a_HQM = look_at_previous(run, qkv) if reach.window == 1 else look_back(run, reach, qkv)
    by_head = (cfg.heads, cfg.head_dim, -1)
    products = combine(c.view(by_head), a_HQM.view(by_head), cfg.combine)
    scale = (cfg.projection_width * cfg.combine) ** -0.5
    return run.add_product(state_DM, weights.combine, products, scale)


def look_at_previous(run: BlockPass, qkv: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Attention of width 1: no product over positions, and the same turn between q and k everywhere."""
    cfg = run.cfg
    cos, sin = run.tables.rope(2)
    turned = rope(qkv[0], cfg.head_dim, (cos[..., 1:], sin[..., 1:]))
    seen_M = None
    if run.doc_start_BT is not None:
        seen_M = (run.doc_start_BT < torch.arange(run.shape[1], device=turned.device)).flatten()
    q, k, v = (x.view(cfg.heads, cfg.head_dim, -1) for x in (turned, qkv[1], qkv[2]))
    return single_attention(q, k, v, seen_M, _score_scale(cfg))


def look_back(run: BlockPass, reach: LayerReach, qkv: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Attention over a window or everything before, [P, M]."""
    cfg, positions = run.cfg, run.shape[1]
    cos, sin = run.tables.rope(positions + 1)
    # slot j holds the token of position j-1
    q = rope(qkv[0], cfg.head_dim, (cos[..., 1:], sin[..., 1:]))
    k = rope(qkv[1], cfg.head_dim, (cos[..., :-1], sin[..., :-1]))
    q, k, v = (x.view(cfg.heads, cfg.head_dim, -1) for x in (q, k, qkv[2]))
    rule = ScoreRule(reach.window, reach.slope, _score_scale(cfg))
    return window_attention(q, k, v, run.shape, rule, run.doc_start_BT).view(cfg.projection_width, -1)


def feed_forward(run: BlockPass, weights: BlockWeights, state_DM: torch.Tensor) -> torch.Tensor:
    """The residual state after the feed-forward half of a layer."""
    cfg = run.cfg
    hidden = run.multiply(weights.expand, group_norm(state_DM, cfg.head_dim))
    hidden = torch.relu(group_norm(hidden, cfg.head_dim))
    return run.add_product(state_DM, weights.contract, hidden, cfg.relu_width**-0.5)


def _score_scale(cfg: ModelConfig) -> float:
    return 0.5 * (cfg.head_dim * cfg.width) ** -0.5
