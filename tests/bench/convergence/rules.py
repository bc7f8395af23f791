"""Rules of other methods, for comparison only, from their published descriptions. Nothing of this is in the product.

SparseLoCo (arXiv 2508.15706): top-k per chunk with error feedback, a 4-bin quantizer, the mean over those who sent a
coordinate, no outer momentum, outer rate 1, and a restart from the bare anchor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from tscale.kernels.codec import CHUNK
from tscale.kernels.inner import InnerTrainer
from tscale.kernels.layout import Layout
from tscale.kernels.muon import AdamW

FIXED_TRIPLE = (3.4445, -4.7750, 2.0315)
"""Muon as it was first published: the same quintic in every Newton-Schulz step."""
BINS = 4
BIN_RANGE_DEVIATIONS = 6.0

Compressor = Callable[[np.ndarray, Layout, int], tuple[np.ndarray, float]]
"""(residual [P], layout, kept per chunk) -> (what arrives, float32 [P]; its size in bits)."""


class AdamWTrainer(InnerTrainer):
    """The production trainer with AdamW, at the rate `lr_adam`, on every tensor."""

    def __init__(self, *args: object) -> None:
        """As InnerTrainer."""
        super().__init__(*args)
        self._optimizer = _AdamWEverywhere(self.layout, self.inner_cfg.weight_decay)


class _AdamWEverywhere:
    def __init__(self, layout: Layout, weight_decay: float) -> None:
        self._adam = AdamW((slice(0, layout.numel),), weight_decay)

    def step(self, flat: torch.Tensor, grad: torch.Tensor, lr_muon: float, lr_adam: float) -> None:
        """One step; the rate for Muon is not used."""
        del lr_muon
        self._adam.step(flat, grad, lr_adam)


def use_fixed_triple(trainer: InnerTrainer) -> None:
    """Newton-Schulz with one triple for all steps."""
    muon = trainer._optimizer._muon
    polar = replace(muon.rule.polar, triples=(FIXED_TRIPLE,) * len(muon.rule.polar.triples))
    muon.rule = replace(muon.rule, polar=polar)


def attacked(sent: np.ndarray, layout: Layout, attack: str, draw: np.random.Generator) -> np.ndarray:
    """What a hostile peer sends instead of `sent` [P]: with the other sign, ten times as large, or at random places."""
    if attack == "random":
        return np.concatenate([draw.permutation(sent[where]) for where in layout.slices])
    return sent * np.float32({"sign-flip": -1, "times-ten": 10}[attack])


def keep_largest(residual: np.ndarray, layout: Layout, kept: int) -> tuple[np.ndarray, float]:
    """Top-k of each tensor's chunks as float32. Positions are counted at their entropy."""
    sent, bits = np.zeros_like(residual), 0.0
    for places in _tops(residual, layout, kept):
        sent[places] = residual[places]
        bits += 32.0 * places.size
    return sent, bits + _position_bits(layout, kept)


def one_magnitude(residual: np.ndarray, layout: Layout, kept: int) -> tuple[np.ndarray, float]:
    """Top-k of each tensor's chunks as a sign times the chunk's mean magnitude: one bit each, 8 bits a chunk."""
    sent, bits = np.zeros_like(residual), 0.0
    for places in _tops(residual, layout, kept):
        values = residual[places]
        sent[places] = np.sign(values) * np.abs(values).mean(dtype=np.float64).astype(np.float32)
        bits += places.size + 8.0
    return sent, bits + _position_bits(layout, kept)


def rotating(residual: np.ndarray, layout: Layout, kept: int, turn: int) -> tuple[np.ndarray, float]:
    """Every `CHUNK / kept`-th value, all peers the same ones, in turns: what Streaming DiLoCo (arXiv 2501.18512) does
    with layers. Positions cost nothing. A value is a sign and one of two magnitudes, as in a dense contribution.
    """
    sent, bits, period = np.zeros_like(residual), 0.0, CHUNK // kept
    for where in layout.slices:
        places = np.arange(where.start + turn % period, where.stop, period)
        for first in range(0, places.size, CHUNK):
            part = places[first : first + CHUNK]
            sizes = np.abs(residual[part])
            upper = sizes > sizes.mean()
            for group in (upper, ~upper):
                if group.any():
                    sent[part[group]] = np.sign(residual[part[group]]) * sizes[group].mean()
            bits += 2.0 * part.size + 16.0
    return sent, bits


def four_bins(residual: np.ndarray, layout: Layout, kept: int) -> tuple[np.ndarray, float]:
    """SparseLoCo's wire: top-k per chunk, 12-bit positions, and 2-bit codes of one quantizer per tensor.

    Four equal bins over six deviations around the kept values' mean; a code is decoded as the mean of its bin.
    """
    sent, bits = np.zeros_like(residual), 0.0
    for tensor, where in zip(layout.tensors, layout.slices, strict=True):
        places = np.concatenate([where.start + top for top in _tensor_tops(residual[where], kept)])
        values = residual[places]
        centre = values.mean()
        width = np.float32(BIN_RANGE_DEVIATIONS / BINS) * values.std(ddof=1) if values.size > 1 else np.float32(0)
        codes = np.zeros(values.size, np.int64)
        if width > 0:
            codes = np.clip(np.rint((values - centre) / width + BINS // 2), 0, BINS - 1).astype(np.int64)
        counts = np.bincount(codes, minlength=BINS)
        means = np.bincount(codes, weights=values, minlength=BINS) / np.maximum(counts, 1)
        sent[places] = means[codes].astype(np.float32)
        bits += 14.0 * places.size + 32.0 * (BINS + 2)
        del tensor
    return sent, bits


def mean_over_senders(anchor: np.ndarray, sent: Sequence[np.ndarray], eta: float) -> np.ndarray:
    """The next anchor [P]: each coordinate moves by the mean over the contributions in which it isn't zero."""
    total, senders = np.zeros(anchor.size), np.zeros(anchor.size, np.int64)
    for values in sent:
        total += values
        senders += values != 0
    return anchor - np.float32(eta) * (total / np.maximum(senders, 1)).astype(np.float32)


def _tops(residual: np.ndarray, layout: Layout, kept: int) -> list[np.ndarray]:
    return [w.start + top for w in layout.slices for top in _tensor_tops(residual[w], kept)]


def _tensor_tops(values: np.ndarray, kept: int) -> list[np.ndarray]:
    """Per chunk the positions, in the tensor, of its `kept` largest values; a short chunk keeps its share."""
    tops = []
    for first in range(0, values.size, CHUNK):
        chunk = np.abs(values[first : first + CHUNK])
        k = max(1, math.ceil(kept * chunk.size / CHUNK))
        tops.append(first + np.sort(np.argsort(-chunk, kind="stable")[:k]))
    return tops


def _position_bits(layout: Layout, kept: int) -> float:
    share = kept / CHUNK
    if share >= 1:
        return 0.0
    return layout.numel * -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
