"""The tscale transformer in plain torch, over parameters that are views of one flat vector.

Published as TScale (github.com/Foreseerr/TScale). Its layers are in `tscale.kernels.block`.
Suffixes: B sequences, T positions, M = B*T, D width, V vocabulary, P parameters.
"""

from __future__ import annotations

import numpy as np
import torch

from tscale.kernels.block import (
    BlockPass,
    BlockTables,
    BlockWeights,
    Product,
    block_forward,
    embed,
    logits,
    output_bias,
)
from tscale.kernels.head import head_loss
from tscale.kernels.model_config import ModelConfig, layer_reaches, model_layout


class TscaleModel(torch.nn.Module):
    """The model over `flat` (float32 [P], used in place: writing to it changes the model).

    `product` replaces the matrix products inside the layers; None is float32.
    """

    def __init__(
        self, cfg: ModelConfig, flat: torch.Tensor, counts: np.ndarray, product: Product | None = None
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.layout = model_layout(cfg)
        self.reaches = layer_reaches(cfg)
        self._product = product
        self._bias_V = output_bias(counts).to(flat.device)
        if self._bias_V.numel() != cfg.vocab:
            raise ValueError(f"{self._bias_V.numel()} unigram counts for a vocabulary of {cfg.vocab}")
        for spec, view in zip(self.layout.tensors, self._views(flat), strict=True):
            self.register_parameter(spec.name.replace(".", "_"), torch.nn.Parameter(view))
        weights = dict(zip((spec.name for spec in self.layout.tensors), self.parameters(), strict=True))
        self._blocks = tuple(
            BlockWeights(*(weights[f"{kind}.{index}"] for kind in BlockWeights._fields)) for index in range(cfg.layers)
        )
        self._tables = BlockTables(cfg, flat.device)

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
        return logits(self.cfg, self.head, self._bias_V, self._last_state(tokens_BT, doc_start_BT))

    def loss(self, tokens_BT1: torch.Tensor, doc_start_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Mean cross-entropy in nats per token of predicting `tokens[:, 1:]` from `tokens[:, :-1]`."""
        state_DM = self._last_state(tokens_BT1[:, :-1], doc_start_BT)
        return head_loss(self.cfg, self.head, self._bias_V, state_DM, tokens_BT1[:, 1:].flatten())

    def _last_state(self, tokens_BT: torch.Tensor, doc_start_BT: torch.Tensor | None) -> torch.Tensor:
        batch, positions = tokens_BT.shape
        run = BlockPass(self.cfg, self._tables, (batch, positions), doc_start_BT, self._product)
        state_DM = embed(self.embed, tokens_BT)
        for reach, weights in zip(self.reaches, self._blocks, strict=True):
            state_DM = block_forward(run, reach, weights, state_DM)
        return state_DM
