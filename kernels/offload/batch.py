"""One batch on its way through the layers, all micro-batches through one stage before the next, there and back.

A stage is a layer, or a few neighbours. Between stages only the boundary keeps something, or, where nothing is
computed twice, autograd's graph of each stage. Every public method is a transaction: when it runs out of memory nothing
of it has happened, and it starts again with micro-batches half as long; what was done before stays.

Suffixes: B sequences, T positions, M = rows * T, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import torch

from tscale.kernels.block import BlockPass, BlockTables, BlockWeights, Product, block_forward, embed, logits
from tscale.kernels.head import head_loss
from tscale.kernels.model_config import LayerReach, ModelConfig
from tscale.kernels.offload.boundary import Boundary, Ranges, halves
from tscale.kernels.offload.errors import OutOfDeviceMemory, is_out_of_memory
from tscale.kernels.offload.transfer import Pieces

Result = TypeVar("Result")
Layers = dict[int, BlockWeights]
"""The weights of a stage's layers, by their number, in order."""


@dataclass(frozen=True)
class Network:
    """What a model is beside its parameters, on one device."""

    cfg: ModelConfig
    reaches: tuple[LayerReach, ...]
    tables: BlockTables
    bias_V: torch.Tensor
    product: Product | None


def leaf(view: torch.Tensor, gradient: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor over the same memory whose gradient autograd adds up in `gradient`."""
    # detach() would share autograd's count of changes with all views of a flat vector, and an update of one layer
    # would look like a change of every other
    made = view.data.requires_grad_()
    made.grad = gradient
    return made


def _gradient_key(index: int) -> Hashable:
    return ("gradient", index)


class BatchRun:
    """The states of one batch. State `i` is what stage `i` reads, and with N stages state N is what the head reads.

    `ranges` are the micro-batches and `recompute` says how layers get their derivative; both may change when memory
    is short.
    """

    def __init__(self, network: Network, tokens_BT1: torch.Tensor, boundary: Boundary, ranges: Ranges) -> None:
        self.network = network
        self.ranges = ranges
        self.recompute = True
        self._inputs_BT = tokens_BT1[:, :-1]
        self._targets_BT = tokens_BT1[:, 1:]
        self._boundary = boundary
        self._embedded: dict[range, torch.Tensor] = {}
        self._graphs: dict[tuple[int, range], tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self, index: int) -> None:
        """Drop state `index`."""
        self._boundary.drop(index)

    def close(self) -> None:
        """Drop everything."""
        self._forget_graphs()
        self._boundary.clear()

    def embed(self, table_VD: torch.Tensor) -> None:
        """State 0. With a table that requires a gradient and without `recompute` the graph is kept."""

        def work() -> None:
            self._boundary.drop(0)
            keep = not self.recompute and table_VD.requires_grad
            for rows in self.ranges:
                with torch.set_grad_enabled(keep):
                    out = embed(table_VD, self._inputs(rows))
                if keep:
                    self._embedded[rows] = out
                self._boundary.put(0, rows, out.detach())

        self._transaction(work)

    def stage(self, index: int, layers: Layers) -> None:
        """State `index + 1`. With weights that require a gradient and without `recompute` the graph is kept."""

        def work() -> None:
            self._boundary.drop(index + 1)
            keep = not self.recompute and next(iter(layers.values())).qc.requires_grad
            with closing(self._boundary.stream((index,), self.ranges)) as states:
                for rows, (state_DM,) in states:
                    with torch.set_grad_enabled(keep):
                        start = leaf(state_DM) if keep else state_DM
                        out = self._through(layers, start, rows)
                    if keep:
                        self._graphs[index, rows] = (start, out)
                    self._boundary.put(index + 1, rows, out.detach())

        self._transaction(work)

    def loss(self, table_VD: torch.Tensor, index: int) -> torch.Tensor:
        """Mean cross-entropy in nats per token, on the device, from state `index`.

        When the table has a gradient buffer, that is set to the head's gradient and the states' gradients are kept.
        """
        train = table_VD.grad is not None

        def work() -> torch.Tensor:
            if table_VD.grad is not None:
                table_VD.grad.zero_()
            self._boundary.drop(_gradient_key(index))
            total = torch.zeros((), device=table_VD.device)
            with closing(self._boundary.stream((index,), self.ranges)) as states, torch.set_grad_enabled(train):
                for rows, (state_DM,) in states:
                    start = leaf(state_DM)
                    part = self._share(rows, self._cross_entropy(table_VD, start, rows))
                    total += part.detach()
                    if train:
                        part.backward()
                        self._put_gradient(index, rows, start)
            return total

        return self._transaction(work)

    def stage_backward(self, index: int, layers: Layers, gradient: torch.Tensor) -> None:
        """Set `gradient`, the buffer of the stage's weights; keep that of state `index`; drop what is done with."""

        def work() -> None:
            gradient.zero_()
            self._boundary.drop(_gradient_key(index))
            keys = (index, _gradient_key(index + 1))
            with closing(self._boundary.stream(keys, self.ranges)) as states:
                for rows, (state_DM, gradient_DM) in states:
                    start, out = self._graphs.pop((index, rows), None) or self._again(layers, state_DM, rows)
                    torch.autograd.backward(out, gradient_DM)
                    del out
                    self._put_gradient(index, rows, start)

        self._transaction(work)
        self._boundary.drop(index)
        self._boundary.drop(_gradient_key(index + 1))

    def embed_backward(self, table_VD: torch.Tensor) -> None:
        """Set the gradient buffer of the embedding."""

        def work() -> None:
            assert table_VD.grad is not None
            table_VD.grad.zero_()
            with closing(self._boundary.stream((_gradient_key(0),), self.ranges)) as states:
                for rows, (gradient_DM,) in states:
                    out = self._embedded.pop(rows, None)
                    torch.autograd.backward(embed(table_VD, self._inputs(rows)) if out is None else out, gradient_DM)

        self._transaction(work)
        self.close()

    def last_logits(self, table_VD: torch.Tensor, index: int) -> torch.Tensor:
        """Logits [V] of the token after the last position of the last sequence, from state `index`."""
        network = self.network
        with closing(self._boundary.stream((index,), self.ranges[-1:])) as states, torch.no_grad():
            _, (state_DM,) = next(iter(states))
            return logits(network.cfg, table_VD, network.bias_V, state_DM[:, -1:])[0]

    def _inputs(self, rows: range) -> torch.Tensor:
        return self._inputs_BT[rows.start : rows.stop]

    def _through(self, layers: Layers, state_DM: torch.Tensor, rows: range) -> torch.Tensor:
        network = self.network
        shape = (len(rows), self._inputs_BT.shape[1])
        run = BlockPass(network.cfg, network.tables, shape, product=network.product)
        for index, weights in layers.items():
            state_DM = block_forward(run, network.reaches[index], weights, state_DM)
        return state_DM

    def _again(self, layers: Layers, state_DM: torch.Tensor, rows: range) -> Pieces:
        start = leaf(state_DM)
        return start, self._through(layers, start, rows)

    def _cross_entropy(self, table_VD: torch.Tensor, state_DM: torch.Tensor, rows: range) -> torch.Tensor:
        network = self.network
        targets_M = self._targets_BT[rows.start : rows.stop].flatten()
        return head_loss(network.cfg, table_VD, network.bias_V, state_DM, targets_M)

    def _share(self, rows: range, loss: torch.Tensor) -> torch.Tensor:
        total = self._inputs_BT.shape[0]
        return loss if len(rows) == total else loss * (len(rows) / total)

    def _put_gradient(self, index: int, rows: range, start: torch.Tensor) -> None:
        assert start.grad is not None
        self._boundary.put(_gradient_key(index), rows, start.grad)

    def _transaction(self, work: Callable[[], Result]) -> Result:
        while True:
            try:
                return work()
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                said = str(error).splitlines()[0]
            # outside of the handler, where the failed attempt's tensors are gone
            self._make_room(said)

    def _make_room(self, said: str) -> None:
        """First stop keeping graphs, then halve the micro-batches. Raises OutOfDeviceMemory at single sequences."""
        if not self.recompute:
            self.recompute = True
            self._forget_graphs()
        elif all(len(rows) == 1 for rows in self.ranges):
            raise OutOfDeviceMemory(f"one sequence of {self._inputs_BT.shape[1]} tokens does not fit: {said}")
        else:
            self.ranges = tuple(half for rows in self.ranges for half in halves(rows))
        if self._inputs_BT.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forget_graphs(self) -> None:
        self._embedded.clear()
        self._graphs.clear()
