"""What belongs to a layer or a few, to the embedding and to the head, as pieces of flat vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tscale.kernels.block import BlockWeights
from tscale.kernels.layout import Layout
from tscale.kernels.model_config import ModelConfig, model_layout

TABLES = ("embed", "head")


@dataclass(frozen=True)
class StagePlaces:
    """Where the matrices of neighbouring layers lie, by kind in the order of BlockWeights.

    `weights` are places in the flat vector, `momentum` in the one that Muon keeps: all matrices, and nothing else. A
    kind's matrices of all these layers lie side by side, so a kind is one piece [layers, rows, columns].
    """

    layers: range
    shapes: tuple[tuple[int, int], ...]
    weights: tuple[slice, ...]
    momentum: tuple[slice, ...]

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The matrices in a flat parameter vector."""
        return tuple(flat[where].view(-1, *shape) for where, shape in zip(self.weights, self.shapes, strict=True))

    def momentum_views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same in the vector that Muon keeps."""
        return tuple(flat[where].view(-1, *shape) for where, shape in zip(self.momentum, self.shapes, strict=True))

    def packed(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The matrices one kind after the other from the start of `buffer`."""
        views, start = [], 0
        for where, shape in zip(self.weights, self.shapes, strict=True):
            size = where.stop - where.start
            views.append(buffer[start : start + size].view(-1, *shape))
            start += size
        return tuple(views)


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
        first, last = self.layers[layers.start], self.layers[layers.stop - 1]
        weights, momentum = (
            tuple(slice(one.start, other.stop) for one, other in zip(begin, end, strict=True))
            for begin, end in ((first.weights, last.weights), (first.momentum, last.momentum))
        )
        return StagePlaces(layers, first.shapes, weights, momentum)

    def moments(self, table: str) -> slice:
        """Where the moments of "embed" or "head" lie."""
        start = TABLES.index(table) * self.table_numel
        return slice(start, start + self.table_numel)


def model_places(cfg: ModelConfig) -> ModelPlaces:
    """The places of a model's tensors."""
    layout = model_layout(cfg)
    where = {spec.name: place for spec, place in zip(layout.tensors, layout.slices, strict=True)}
    shape = {spec.name: (spec.shape[0], spec.shape[1]) for spec in layout.tensors}
    first_matrix = where["embed"].stop

    def layer(index: int) -> StagePlaces:
        names = [f"{kind}.{index}" for kind in BlockWeights._fields]
        weights = tuple(where[name] for name in names)
        momentum = tuple(slice(w.start - first_matrix, w.stop - first_matrix) for w in weights)
        return StagePlaces(range(index, index + 1), tuple(shape[name] for name in names), weights, momentum)

    table_shape = (cfg.vocab, cfg.width)
    layer_numel = (layout.numel - 2 * cfg.vocab * cfg.width) // cfg.layers
    tables = {name: where[name] for name in TABLES}
    return ModelPlaces(layout, tuple(layer(i) for i in range(cfg.layers)), tables, layer_numel, table_shape)
