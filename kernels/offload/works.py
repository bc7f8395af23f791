"""What is alive while a micro-batch goes through a stage, the head or an update: `footprint` on the layers' own code.

Memory grows in proportion to the sequences, plus what does not depend on them. `AffineWorks` measures one and two
sequences and knows the rest; for the head, which works in blocks of tokens, it measures one full block and one sequence
more. A test holds it against the layers themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tscale.kernels.block import BlockPass, BlockTables, BlockWeights, Product, block_forward, embed
from tscale.kernels.head import block_tokens, head_loss
from tscale.kernels.model_config import LayerReach, ModelConfig, layer_reaches
from tscale.kernels.muon import MuonRule
from tscale.kernels.offload.batch import leaf
from tscale.kernels.offload.footprint import Footprint, footprint
from tscale.kernels.offload.pieces import model_places
from tscale.kernels.offload.transfer import Pieces
from tscale.kernels.offload.update import LayerUpdate
from tscale.kernels.polar import polar_rule

FLOAT_BYTES = 4


class Works(Protocol):
    """The footprints of everything a micro-batch meets; `micro` is its sequences and their tokens."""

    @property
    def micro(self) -> tuple[int, int]:
        """Sequences, tokens a sequence."""
        ...

    def constant_bytes(self) -> int:
        """The blocks' tables."""
        ...

    def stage(self, kind: tuple[LayerReach, ...], how: str) -> Footprint:
        """One stage: "forward" only, with its "graph" kept, or computed again and "backward"."""
        ...

    def head(self) -> Footprint:
        """Logits, loss and their derivative."""
        ...

    def embedding(self) -> Footprint:
        """The derivative of the embedding."""
        ...

    def update(self, layers: int) -> Footprint:
        """Muon on one stage."""
        ...

    def table_update(self, layers: int) -> Footprint:
        """AdamW on a part of a table."""
        ...


class LayerWorks:
    """The footprints of everything a micro-batch meets."""

    def __init__(self, cfg: ModelConfig, micro: tuple[int, int], product: Product | None = None) -> None:
        self.cfg = cfg
        self.micro = micro
        self._product = product
        self._places = model_places(cfg)
        self._tokens = micro[0] * micro[1]

    def constant_bytes(self) -> int:
        """The blocks' tables."""
        return footprint(lambda: None, lambda _: self._pass().tables).kept_bytes

    def stage(self, kind: tuple[LayerReach, ...], how: str) -> Footprint:
        """One stage: "forward" only, with its "graph" kept, or computed again and "backward"."""

        def prepare() -> tuple[BlockPass, list[BlockWeights], torch.Tensor, torch.Tensor]:
            leaves = [BlockWeights(*(leaf(w, torch.empty_like(w)) for w in self._weights())) for _ in kind]
            return self._pass(), leaves, self._state(), self._state()

        def work(given: tuple[BlockPass, list[BlockWeights], torch.Tensor, torch.Tensor]) -> object:
            run, leaves, state_DM, gradient_DM = given
            with torch.set_grad_enabled(how != "forward"):
                start = leaf(state_DM)
                out = start
                for reach, weights in zip(kind, leaves, strict=True):
                    out = block_forward(run, reach, weights, out)
            if how == "backward":
                torch.autograd.backward(out, gradient_DM)
                return start.grad
            return start, out

        return footprint(prepare, work)

    def head(self) -> Footprint:
        """Logits, loss and their derivative."""

        def work(given: tuple[torch.Tensor, ...]) -> object:
            table_VD, bias_V, state_DM, targets_M = given
            start = leaf(state_DM)
            head_loss(self.cfg, table_VD, bias_V, start, targets_M).backward()
            return start.grad

        return footprint(lambda: (self._table(), torch.empty(self.cfg.vocab), self._state(), self._ids()), work)

    def embedding(self) -> Footprint:
        """The derivative of the embedding."""

        def work(given: tuple[torch.Tensor, ...]) -> object:
            table_VD, gradient_DM, tokens_M = given
            return torch.autograd.backward(embed(table_VD, tokens_M), gradient_DM)

        return footprint(lambda: (self._table(), self._state(), self._ids()), work)

    def update(self, layers: int) -> Footprint:
        """Muon on one stage."""
        update = LayerUpdate(self.cfg.head_dim, MuonRule(0.9, 0.0, polar_rule("cpu")))
        stage = self._places.stage(range(layers))

        def pieces() -> Pieces:
            return stage.views(torch.empty(self._places.layout.numel))

        def work(given: tuple[Pieces, Pieces, Pieces]) -> None:
            with torch.no_grad():
                update.apply(stage, *given, lr=1e-3)

        return footprint(lambda: (pieces(), pieces(), pieces()), work)

    def table_update(self, layers: int) -> Footprint:
        """AdamW on as much of a table as two halves of a slot hold moments for."""
        size = min(self._places.table_numel, layers * self._places.layer_numel // 2)
        return Footprint(size * FLOAT_BYTES, 0)

    def _pass(self) -> BlockPass:
        tables = BlockTables(self.cfg)
        if any(reach.window > 1 for reach in layer_reaches(self.cfg)):
            tables.rope(self.micro[1] + 1)
        return BlockPass(self.cfg, tables, self.micro, product=self._product)

    def _weights(self) -> BlockWeights:
        layer = self._places.layers[0]
        return layer.layer(layer.views(torch.empty(self._places.layout.numel)), 0)

    def _table(self) -> torch.Tensor:
        table_VD = torch.empty(self._places.table_shape)
        return leaf(table_VD, torch.empty_like(table_VD))

    def _state(self) -> torch.Tensor:
        return torch.empty(self.cfg.width, self._tokens)

    def _ids(self) -> torch.Tensor:
        return torch.zeros(self._tokens, dtype=torch.int64)


class AffineWorks:
    """The works of micro-batches of any number of sequences, from those of one and of two."""

    def __init__(self, cfg: ModelConfig, context: int, product: Product | None = None) -> None:
        self._ends = tuple(LayerWorks(cfg, (rows, context), product) for rows in (1, 2))
        self._cfg = cfg
        self._found: dict[object, tuple[Footprint, Footprint]] = {}
        self._heads: dict[int, Footprint] = {}

    def at(self, rows: int) -> Works:
        """For micro-batches of `rows` sequences."""
        return _WorksAt(self, (rows, self._ends[0].micro[1]))

    def head(self, micro: tuple[int, int]) -> Footprint:
        """The head's, which grows in another way until a block of its tokens is full."""
        full = -(-block_tokens(self._cfg.vocab) // micro[1])
        if micro[0] <= full + 1:
            return self._head_of(micro[0], micro[1])
        return _grown(self._head_of(full, micro[1]), self._head_of(full + 1, micro[1]), micro[0] - full)

    def _head_of(self, rows: int, context: int) -> Footprint:
        if rows not in self._heads:
            self._heads[rows] = LayerWorks(self._cfg, (rows, context)).head()
        return self._heads[rows]

    def ends(self, key: object, measure: Callable[[LayerWorks], Footprint]) -> tuple[Footprint, Footprint]:
        """What `measure` says of one sequence and of two; asked once for a key."""
        if key not in self._found:
            one, two = (measure(works) for works in self._ends)
            self._found[key] = one, two
        return self._found[key]


class _WorksAt:
    """As LayerWorks, without measuring."""

    def __init__(self, works: AffineWorks, micro: tuple[int, int]) -> None:
        self.micro = micro
        self._works = works

    def constant_bytes(self) -> int:
        return self._at("constant", lambda works: Footprint(0, works.constant_bytes())).kept_bytes

    def stage(self, kind: tuple[LayerReach, ...], how: str) -> Footprint:
        return self._at((kind, how), lambda works: works.stage(kind, how))

    def head(self) -> Footprint:
        """In proportion only beyond the tokens of one block of logits."""
        return self._works.head(self.micro)

    def embedding(self) -> Footprint:
        return self._at("embedding", lambda works: works.embedding())

    def update(self, layers: int) -> Footprint:
        return self._at(("update", layers), lambda works: works.update(layers))

    def table_update(self, layers: int) -> Footprint:
        return self._at(("table", layers), lambda works: works.table_update(layers))

    def _at(self, key: object, measure: Callable[[LayerWorks], Footprint]) -> Footprint:
        return _grown(*self._works.ends(key, measure), self.micro[0] - 1)


def _grown(one: Footprint, two: Footprint, more: int) -> Footprint:
    return Footprint(
        one.peak_bytes + more * (two.peak_bytes - one.peak_bytes),
        one.kept_bytes + more * (two.kept_bytes - one.kept_bytes),
    )
