"""One step in the order of the layers: load, compute, update, write back, with the next thing on its way meanwhile.

Embedding and head are the first and the last layer. Their matrices have a slot of their own; everything else goes
through the layers' slots. The loss is known before anything is updated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from tscale.kernels.block import BlockWeights
from tscale.kernels.offload.batch import BatchRun, leaf
from tscale.kernels.offload.pieces import ModelPlaces
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.slots import Need, SlotPool
from tscale.kernels.offload.transfer import Ticket, Transfer
from tscale.kernels.offload.update import AdamStep, HostOptimizer, LayerUpdate

_CHUNK_ALIGNMENT = 64


@dataclass(frozen=True)
class Rates:
    """Learning rates of one step, and the weight decay."""

    muon: float
    adam: float
    weight_decay: float


class LayerEngine:
    """The device's side of an OffloadTrainer: slots, one layer's gradient, and the order in which they are used.

    `skipped_updates` counts layers and tables whose gradient was not finite: they and their momentum stay as they are.
    """

    def __init__(self, places: ModelPlaces, plan: OffloadPlan, transfer: Transfer, update: LayerUpdate) -> None:
        self.skipped_updates = 0
        self._places = places
        self._count = len(places.layers)
        self._kept = plan.kept_layers(self._count)
        self._transfer = transfer
        self._update = update
        self._layers = SlotPool(transfer, plan.slots, places.layer_numel)
        self._ends = SlotPool(transfer, 1, places.table_numel)
        self._gradient = transfer.buffer(max(places.layer_numel, places.table_numel))
        self._leaves: dict[int, BlockWeights] = {}
        self._written: deque[tuple[int, Ticket]] = deque()

    def forward(self, run: BatchRun, flat: torch.Tensor) -> torch.Tensor:
        """Bring a batch to the head without a gradient; the head's table, to be released with `end`."""
        self._layers.begin([self._weights_need(flat, index) for index in range(self._count)])
        self._ends.begin([self._table_need(flat, table) for table in ("embed", "head")])
        run.embed(self._ends.take("embed")[0])
        self._ends.release("embed")
        for index in range(self._count):
            run.layer(index, BlockWeights(*self._layers.take(("weights", index))))
            self._layers.release(("weights", index))
            run.forget(index)
        return self._ends.take("head")[0]

    def end(self, run: BatchRun) -> None:
        """After `forward`."""
        run.close()
        self._ends.abandon()
        self._transfer.finish()

    def train(self, run: BatchRun, flat: torch.Tensor, optimizer: HostOptimizer, rates: Rates) -> float:
        """One step on `flat` and `optimizer`; the loss before it. One that is not finite changes nothing."""
        try:
            self._layers.begin(self._training_needs(flat, optimizer))
            self._ends.begin([self._table_need(flat, table) for table in ("embed", "head", "embed")])
            self._forward(run)
            head_VD = self._ends.take("head")[0]
            loss = float(run.loss(leaf(head_VD, self._table_gradient()), self._count))
            if not math.isfinite(loss):
                self._layers.abandon()
                self._ends.abandon()
                return loss
            run.forget(self._count)
            optimizer.adam_steps += 1
            self._update_table("head", flat, optimizer, rates)
            for index in reversed(range(self._count)):
                self._backward(run, index, flat, optimizer, rates)
            run.embed_backward(leaf(self._ends.take("embed")[0], self._table_gradient()))
            self._update_table("embed", flat, optimizer, rates)
            return loss
        finally:
            run.close()
            self._leaves.clear()
            self._transfer.finish()
            self._settle(optimizer, 0)

    def _forward(self, run: BatchRun) -> None:
        run.embed(self._ends.take("embed")[0])
        self._ends.release("embed")
        for index in range(self._count):
            weights = self._layers.take(("weights", index))
            leaves = BlockWeights(*(leaf(w, g) for w, g in zip(weights, self._layer_gradient(index), strict=True)))
            run.layer(index, leaves)
            if index < self._count - self._kept:
                self._layers.release(("weights", index))
            else:
                self._leaves[index] = leaves

    def _backward(self, run: BatchRun, index: int, flat: torch.Tensor, optimizer: HostOptimizer, rates: Rates) -> None:
        weights, gradients = self._layers.take(("weights", index)), self._layer_gradient(index)
        leaves = self._leaves.pop(index, None)
        if leaves is None:
            leaves = BlockWeights(*(leaf(w, g) for w, g in zip(weights, gradients, strict=True)))
        run.layer_backward(index, leaves)
        momentum = self._layers.take(("momentum", index))
        leaving = None
        if self._finite(self._places.layer_numel):
            optimizer.begin_update(index)
            self._update.apply(weights, gradients, momentum, rates.muon)
            place = self._places.layers[index]
            hosts = (*place.views(flat), *place.momentum_views(optimizer.momentum))
            leaving = self._transfer.to_host((*weights, *momentum), hosts)
            self._wrote(index, leaving, optimizer)
        self._layers.release(("weights", index), leaving)
        self._layers.release(("momentum", index), leaving)

    def _update_table(self, table: str, flat: torch.Tensor, optimizer: HostOptimizer, rates: Rates) -> None:
        """AdamW in parts that fit a layer's slot, on the table that is in the ends' slot."""
        (table_VD,) = self._ends.pieces(table)
        weight, gradient = table_VD.view(-1), self._gradient
        step = AdamStep(optimizer.adam_steps, rates.adam, rates.weight_decay)
        finite, unit = self._finite(self._places.table_numel), self.unit(table)
        if finite:
            optimizer.begin_update(unit)
        for chunk, need in self._moment_needs(optimizer, table):
            moments, leaving = self._layers.take(need.key), None
            if finite:
                step.apply(weight[chunk], gradient[chunk], *moments)
                leaving = self._transfer.to_host(moments, need.hosts)
            self._layers.release(need.key, leaving)
        leaving = None
        if finite:
            leaving = self._transfer.to_host((weight,), (flat[self._places.tables[table]],))
            self._wrote(unit, leaving, optimizer)
        self._ends.release(table, leaving)

    def unit(self, table: str) -> int:
        """The number by which an optimizer's state knows a table; layers have their own index."""
        return self._count + ("embed", "head").index(table)

    def _finite(self, numel: int) -> bool:
        finite = math.isfinite(float(self._gradient[:numel].sum()))
        self.skipped_updates += not finite
        return finite

    def _wrote(self, unit: int, ticket: Ticket, optimizer: HostOptimizer) -> None:
        self._written.append((unit, ticket))
        self._settle(optimizer, 2)

    def _settle(self, optimizer: HostOptimizer, pending: int) -> None:
        while len(self._written) > pending:
            unit, ticket = self._written.popleft()
            self._transfer.finish(ticket)
            optimizer.end_update(unit)

    def _layer_gradient(self, index: int) -> tuple[torch.Tensor, ...]:
        return self._places.layers[index].packed(self._gradient)

    def _table_gradient(self) -> torch.Tensor:
        return self._gradient[: self._places.table_numel].view(self._places.table_shape)

    def _weights_need(self, flat: torch.Tensor, index: int) -> Need:
        return Need(("weights", index), self._places.layers[index].views(flat))

    def _table_need(self, flat: torch.Tensor, table: str) -> Need:
        return Need(table, (flat[self._places.tables[table]].view(self._places.table_shape),))

    def _moment_needs(self, optimizer: HostOptimizer, table: str) -> list[tuple[slice, Need]]:
        numel, offset = self._places.table_numel, self._places.moments(table).start
        size = max(self._places.layer_numel // 2 // _CHUNK_ALIGNMENT * _CHUNK_ALIGNMENT, 1)
        needs = []
        for start in range(0, numel, size):
            chunk = slice(start, min(start + size, numel))
            where = slice(offset + chunk.start, offset + chunk.stop)
            key: Hashable = ("moments", table, start)
            needs.append((chunk, Need(key, (optimizer.first[where], optimizer.second[where]))))
        return needs

    def _training_needs(self, flat: torch.Tensor, optimizer: HostOptimizer) -> list[Need]:
        needs = [self._weights_need(flat, index) for index in range(self._count)]
        needs += [need for _, need in self._moment_needs(optimizer, "head")]
        for index in reversed(range(self._count)):
            momentum = self._places.layers[index].momentum_views(optimizer.momentum)
            needs += [self._weights_need(flat, index), Need(("momentum", index), momentum)]
        return needs + [need for _, need in self._moment_needs(optimizer, "embed")]
