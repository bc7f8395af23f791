"""The tscale transformer in plain torch, float32, over parameters that are views of one flat vector.

Published as TScale (github.com/Foreseerr/TScale). Suffixes: B sequences, T positions, M = B*T, D width, H heads,
Q head width, P = H*Q, V vocabulary. Inside the model everything is feature-major, [features, M].
`N(x)` divides each group of Q features by its root mean square.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tscale.kernels.attention import SlotBias, band_attention, slot_attention
from tscale.kernels.model_config import LayerReach, ModelConfig, layer_reaches, model_layout
from tscale.kernels.model_ops import (
    combine,
    combine_pairing,
    group_norm,
    rope,
    rope_table,
    shifted,
    single_attention,
    transposed,
)

RopeTable = tuple[torch.Tensor, torch.Tensor]


def output_bias(counts: np.ndarray) -> torch.Tensor:
    """ln(count + 0.5), normalised to log-probabilities: float32 [V] from int64 [V]."""
    raised = torch.from_numpy(np.asarray(counts, np.float64) + 0.5)
    return torch.log(raised / raised.sum()).to(torch.float32)


class TscaleModel(torch.nn.Module):
    """The model over `flat` (float32 [P], used in place: writing to it changes the model)."""

    def __init__(self, cfg: ModelConfig, flat: torch.Tensor, counts: np.ndarray) -> None:
        super().__init__()
        self.cfg = cfg
        self.layout = model_layout(cfg)
        self.reaches = layer_reaches(cfg)
        self._bias_V = output_bias(counts)
        if self._bias_V.numel() != cfg.vocab:
            raise ValueError(f"{self._bias_V.numel()} unigram counts for a vocabulary of {cfg.vocab}")
        for spec, view in zip(self.layout.tensors, self._views(flat), strict=True):
            self.register_parameter(spec.name.replace(".", "_"), torch.nn.Parameter(view))
        self._weights = dict(zip((spec.name for spec in self.layout.tensors), self.parameters(), strict=True))
        self._pairing = combine_pairing(cfg.combine)
        self._rope_table = rope_table(cfg.head_dim, 2)
        self._biases: dict[LayerReach, tuple[SlotBias, torch.Tensor | None]] = {}

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        if flat.dtype != torch.float32 or flat.shape != (self.layout.numel,):
            raise ValueError(f"expected {self.layout.numel} float32 parameters")
        specs = zip(self.layout.tensors, self.layout.slices, strict=True)
        return [flat[where].view(spec.shape) for spec, where in specs]

    def bind(self, flat: torch.Tensor) -> None:
        """Make the parameters views of another flat vector of the same layout."""
        for parameter, view in zip(self.parameters(), self._views(flat), strict=True):
            parameter.data = view

    def bind_grad(self, flat_grad: torch.Tensor) -> None:
        """Let gradients add up in views of `flat_grad` (float32 [P])."""
        for parameter, view in zip(self.parameters(), self._views(flat_grad), strict=True):
            parameter.grad = view

    def forward(self, tokens_BT: torch.Tensor, doc_start_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [M, V] of the token after each position, from int64 [B, T].

        `doc_start_BT` holds for each position the index in its sequence where its document starts: nothing before
        that is attended to.
        """
        batch, positions = tokens_BT.shape
        state_DM = transposed(F.embedding(tokens_BT.flatten(), self.embed))
        for index, reach in enumerate(self.reaches):
            state_DM = self._attend(state_DM, (batch, positions), (index, reach), doc_start_BT)
            state_DM = self._feed_forward(state_DM, index)
        z_DM = group_norm(state_DM, self.cfg.head_dim)
        return torch.addmm(self._bias_V, z_DM.t(), (self.head * self.cfg.width**-0.5).t())

    def loss(self, tokens_BT1: torch.Tensor, doc_start_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Mean cross-entropy in nats per token of predicting `tokens[:, 1:]` from `tokens[:, :-1]`."""
        logits_MV = self.forward(tokens_BT1[:, :-1], doc_start_BT)
        return F.cross_entropy(logits_MV, tokens_BT1[:, 1:].flatten())

    def _weight(self, kind: str, index: int) -> torch.Tensor:
        return self._weights[f"{kind}.{index}"]

    def _attend(
        self,
        state_DM: torch.Tensor,
        shape: tuple[int, int],
        layer: tuple[int, LayerReach],
        doc_start_BT: torch.Tensor | None,
    ) -> torch.Tensor:
        cfg, (index, reach) = self.cfg, layer
        z_DM = group_norm(state_DM, cfg.head_dim)
        # keys and values of slot j belong to token j-1; slot 0 is the virtual entry (kernels/attention.py)
        before_DM = shifted(z_DM, shape[1])
        # N is free of scale, so of these products only K needs its 1/sqrt(D), and that goes into the score's scale
        q, c = group_norm(torch.mm(self._weight("qc", index), z_DM), cfg.head_dim).split(cfg.projection_width)
        k, v = torch.mm(self._weight("kv", index), before_DM).split(cfg.projection_width)
        qkv = (q, k, group_norm(v, cfg.head_dim))
        look = self._look_at_previous if reach.window == 1 else self._look_back
        a_HQM = look(qkv, shape, reach, doc_start_BT)
        by_head = (cfg.heads, cfg.head_dim, -1)
        products = combine(c.view(by_head), a_HQM.view(by_head), self._pairing)
        scale = (cfg.projection_width * cfg.combine) ** -0.5
        return torch.addmm(state_DM, self._weight("combine", index) * scale, products)

    @property
    def _score_scale(self) -> float:
        return 0.5 * (self.cfg.head_dim * self.cfg.width) ** -0.5

    def _look_at_previous(
        self,
        qkv: tuple[torch.Tensor, ...],
        shape: tuple[int, int],
        reach: LayerReach,
        doc_start_BT: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of width 1: no product over positions, and the same turn between q and k everywhere."""
        cos, sin = self._table(2)
        turned = rope(qkv[0], self.cfg.head_dim, (cos[..., 1:], sin[..., 1:]))
        seen_M = None if doc_start_BT is None else (doc_start_BT < torch.arange(shape[1])).flatten()
        q, k, v = (x.view(self.cfg.heads, self.cfg.head_dim, -1) for x in (turned, qkv[1], qkv[2]))
        return single_attention(q, k, v, seen_M, self._score_scale)

    def _look_back(
        self,
        qkv: tuple[torch.Tensor, ...],
        shape: tuple[int, int],
        reach: LayerReach,
        doc_start_BT: torch.Tensor | None,
    ) -> torch.Tensor:
        cfg, positions = self.cfg, shape[1]
        cos, sin = self._table(positions + 1)
        # slot j holds the token of position j-1
        q = rope(qkv[0], cfg.head_dim, (cos[..., 1:], sin[..., 1:]))
        k = rope(qkv[1], cfg.head_dim, (cos[..., :-1], sin[..., :-1]))
        by_position = (*shape, cfg.heads, cfg.head_dim)
        q, k, v = (transposed(x).view(by_position) for x in (q, k, qkv[2]))
        bias = SlotBias(reach, positions)
        if doc_start_BT is not None:
            out = slot_attention(q, k, v, bias.square(doc_start_BT), self._score_scale)
        elif bias.banded:
            out = band_attention(q, k, v, self._kept_bias(bias), self._score_scale)
        else:
            out = slot_attention(q, k, v, self._kept_bias(bias), self._score_scale)
        return transposed(out.reshape(-1, cfg.projection_width))

    def _kept_bias(self, bias: SlotBias) -> torch.Tensor | None:
        """The bias tensor, kept for as long as the length of the sequences stays the same."""
        kept = self._biases.get(bias.reach)
        if kept is None or kept[0] != bias:
            kept = (bias, bias.band() if bias.banded else bias.square())
            self._biases[bias.reach] = kept
        return kept[1]

    def _table(self, positions: int) -> RopeTable:
        if self._rope_table[0].shape[-1] < positions:
            self._rope_table = rope_table(self.cfg.head_dim, positions)
        cos, sin = self._rope_table
        return cos[..., :positions], sin[..., :positions]

    def _feed_forward(self, state_DM: torch.Tensor, index: int) -> torch.Tensor:
        hidden = torch.mm(self._weight("expand", index), group_norm(state_DM, self.cfg.head_dim))
        hidden = torch.relu(group_norm(hidden, self.cfg.head_dim))
        scale = self.cfg.relu_width**-0.5
        return torch.addmm(state_DM, self._weight("contract", index) * scale, hidden)
