"""What belongs to a layer or a few, to the embedding and to the head, as pieces of flat vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tscale.kernels.block import BlockWeights
from tscale.kernels.layout import Layout
from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.kernels.offload.transfer import Pieces

TABLES = ("embed", "head")
FUSED_KINDS = ("qc", "kv")


@dataclass(frozen=True)
class StagePlaces:
    """Where the matrices of neighbouring layers lie, in pieces [matrices, rows, columns] of equal ones side by side.

    `weights` are places in the flat vector, `momentum` in the one that Muon keeps: all matrices, and nothing else.
    `kinds` say for each kind of BlockWeights in which piece its matrices are, and from which one on. `fused` says for
    each piece whether its matrices are projections of many heads.
    """

    layers: range
    shapes: tuple[tuple[int, int], ...]
    weights: tuple[slice, ...]
    momentum: tuple[slice, ...]
    kinds: tuple[tuple[int, int], ...]
    fused: tuple[bool, ...]

    def views(self, flat: torch.Tensor) -> Pieces:
        """The matrices in a flat parameter vector."""
        return tuple(flat[where].view(-1, *shape) for where, shape in zip(self.weights, self.shapes, strict=True))

    def momentum_views(self, flat: torch.Tensor) -> Pieces:
        """The same in the vector that Muon keeps."""
        return tuple(flat[where].view(-1, *shape) for where, shape in zip(self.momentum, self.shapes, strict=True))

    def packed(self, buffer: torch.Tensor) -> Pieces:
        """The matrices one piece after the other from the start of `buffer`."""
        views, start = [], 0
        for where, shape in zip(self.weights, self.shapes, strict=True):
            size = where.stop - where.start
            views.append(buffer[start : start + size].view(-1, *shape))
            start += size
        return tuple(views)

    def layer(self, pieces: Pieces, place: int) -> BlockWeights:
        """The matrices of the stage's layer number `place`."""
        return BlockWeights(*(pieces[piece][first + place] for piece, first in self.kinds))


@dataclass(frozen=True)
class ModelPlaces:
    """All places of a model. The tables' AdamW moments lie as [embed, head] in vectors of 2*V*D."""

    layout: Layout
    layers: tuple[StagePlaces, ...]
    tables: dict[str, slice]
    layer_numel: int
    table_shape: tuple[int, int]

    @property
    def table_numel(self) -> int:
        """V*D."""
        return self.table_shape[0] * self.table_shape[1]

    @property
    def matrix_numel(self) -> int:
        """Values in all layers."""
        return self.layer_numel * len(self.layers)

    def stage(self, layers: range) -> StagePlaces:
        """The places of neighbouring layers together."""
        return _stage(self.layout, layers)

    def moments(self, table: str) -> slice:
        """Where the moments of "embed" or "head" lie."""
        start = TABLES.index(table) * self.table_numel
        return slice(start, start + self.table_numel)


def model_places(cfg: ModelConfig) -> ModelPlaces:
    """The places of a model's tensors."""
    layout = model_layout(cfg)
    tables = {name: layout.slices[layout.index[name]] for name in TABLES}
    layers = tuple(_stage(layout, range(index, index + 1)) for index in range(cfg.layers))
    layer_numel = (layout.numel - 2 * cfg.vocab * cfg.width) // cfg.layers
    return ModelPlaces(layout, layers, tables, layer_numel, (cfg.vocab, cfg.width))


def _stage(layout: Layout, layers: range) -> StagePlaces:
    first_matrix = layout.slices[layout.index["embed"]].stop
    shapes: list[tuple[int, int]] = []
    weights: list[slice] = []
    fused: list[bool] = []
    kinds = []
    for kind in BlockWeights._fields:
        begin, end = (layout.index[f"{kind}.{layer}"] for layer in (layers.start, layers.stop - 1))
        where = slice(layout.slices[begin].start, layout.slices[end].stop)
        rows, columns = layout.tensors[begin].shape
        own = (rows, columns), kind in FUSED_KINDS
        if weights and weights[-1].stop == where.start and (shapes[-1], fused[-1]) == own:
            kinds.append((len(weights) - 1, (weights[-1].stop - weights[-1].start) // (rows * columns)))
            weights[-1] = slice(weights[-1].start, where.stop)
            continue
        kinds.append((len(weights), 0))
        weights.append(where)
        shapes.append(own[0])
        fused.append(own[1])
    momentum = tuple(slice(where.start - first_matrix, where.stop - first_matrix) for where in weights)
    return StagePlaces(layers, tuple(shapes), tuple(weights), momentum, tuple(kinds), tuple(fused))
