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
from tscale.kernels.muon import AdamStep
from tscale.kernels.offload.batch import BatchRun, Layers, leaf
from tscale.kernels.offload.pieces import TABLES, ModelPlaces
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.slots import Need, SlotPool
from tscale.kernels.offload.transfer import Pieces, Ticket, Transfer
from tscale.kernels.offload.update import HostOptimizer, LayerUpdate

_CHUNK_ALIGNMENT = 64


@dataclass(frozen=True)
class Rates:
    """Learning rates of one step, and the weight decay."""

    muon: float
    adam: float
    weight_decay: float


@dataclass(frozen=True)
class _StepNeeds:
    """What every training step on one vector and one optimizer asks for, in order."""

    flat: torch.Tensor
    optimizer: HostOptimizer
    layers: list[Need]
    ends: list[Need]
    moments: dict[str, list[tuple[slice, Need]]]


class LayerEngine:
    """The device's side of an OffloadTrainer: slots, one stage's gradient, and the order in which they are used.

    `skipped_updates` counts stages and tables whose gradient was not finite: they and their momentum stay as they are.
    """

    def __init__(self, places: ModelPlaces, plan: OffloadPlan, transfer: Transfer, update: LayerUpdate) -> None:
        self.skipped_updates = 0
        self._places = places
        self._count = len(places.layers)
        self._stages = [places.stage(layers) for layers in plan.stages(self._count)]
        self._kept = plan.kept_stages(self._count)
        self._transfer = transfer
        self._update = update
        stage_numel = len(self._stages[0].layers) * places.layer_numel
        self._moments_numel = max(stage_numel // 2 // _CHUNK_ALIGNMENT * _CHUNK_ALIGNMENT, 1)
        self._layers = SlotPool(transfer, plan.slots, stage_numel)
        self._ends = SlotPool(transfer, 1, places.table_numel)
        self._gradient = transfer.buffer(max(stage_numel, places.table_numel))
        self._table_gradient = self._gradient[: places.table_numel].view(places.table_shape)
        self._packed = [stage.packed(self._gradient) for stage in self._stages]
        self._leaves: dict[int, tuple[Pieces, Layers]] = {}
        self._needs: _StepNeeds | None = None
        self._written: deque[tuple[tuple[int, ...], Ticket]] = deque()

    def forward(self, run: BatchRun, flat: torch.Tensor) -> torch.Tensor:
        """Bring a batch to the head without a gradient; the head's table, to be given back with `end`."""
        self._layers.begin([self._weights_need(flat, index) for index in range(len(self._stages))])
        self._ends.begin([self._table_need(flat, table) for table in TABLES])
        run.embed(self._ends.take("embed")[0])
        self._ends.release("embed")
        for index, stage in enumerate(self._stages):
            weights = self._layers.take(("weights", index))
            run.stage(index, {layer: stage.layer(weights, place) for place, layer in enumerate(stage.layers)})
            self._layers.release(("weights", index))
            run.forget(index)
        return self._ends.take("head")[0]

    @property
    def stages(self) -> int:
        """How many there are; the head reads the state of this number."""
        return len(self._stages)

    def end(self, run: BatchRun) -> None:
        """After `forward`."""
        run.close()
        self._ends.abandon()
        self._transfer.finish()

    def train(self, run: BatchRun, flat: torch.Tensor, optimizer: HostOptimizer, rates: Rates) -> float:
        """One step on `flat` and `optimizer`; the loss before it, or a number that is not finite if any part of the
        step was left out. A loss or a head's gradient that is not finite changes nothing."""
        try:
            needs = self._training_needs(flat, optimizer)
            self._layers.begin(needs.layers)
            self._ends.begin(needs.ends)
            self._forward(run)
            head_VD = self._ends.take("head")[0]
            loss = float(run.loss(leaf(head_VD, self._table_gradient), len(self._stages)))
            skipped = self.skipped_updates
            if not (math.isfinite(loss) and self._finite(self._places.table_numel)):
                self._layers.abandon()
                self._ends.abandon()
                return math.nan
            run.forget(len(self._stages))
            optimizer.adam_steps += 1
            self._update_table("head", flat, optimizer, rates, finite=True)
            for index in reversed(range(len(self._stages))):
                self._backward(run, index, flat, optimizer, rates)
            run.embed_backward(leaf(self._ends.take("embed")[0], self._table_gradient))
            self._update_table("embed", flat, optimizer, rates, finite=self._finite(self._places.table_numel))
            return loss if self.skipped_updates == skipped else math.nan
        finally:
            run.close()
            self._transfer.finish()
            self._settle(optimizer, 0)

    def _forward(self, run: BatchRun) -> None:
        run.embed(leaf(self._ends.take("embed")[0], self._table_gradient))
        self._ends.release("embed")
        for index in range(len(self._stages)):
            run.stage(index, self._leaves_of(index, self._layers.take(("weights", index))))
            if index < len(self._stages) - self._kept:
                self._layers.release(("weights", index))

    def _backward(self, run: BatchRun, index: int, flat: torch.Tensor, optimizer: HostOptimizer, rates: Rates) -> None:
        stage, weights = self._stages[index], self._layers.take(("weights", index))
        numel = len(stage.layers) * self._places.layer_numel
        run.stage_backward(index, self._leaves_of(index, weights), self._gradient[:numel])
        momentum = self._layers.take(("momentum", index))
        leaving = None
        if self._finite(numel):
            self._begin_update(optimizer, *stage.layers)
            self._update.apply(stage, weights, self._packed[index], momentum, rates.muon)
            hosts = self._layers.hosts(("weights", index)) + self._layers.hosts(("momentum", index))
            leaving = self._transfer.to_host((*weights, *momentum), hosts)
            self._wrote(tuple(stage.layers), leaving, optimizer)
        self._layers.release(("weights", index), leaving)
        self._layers.release(("momentum", index), leaving)

    def _update_table(
        self, table: str, flat: torch.Tensor, optimizer: HostOptimizer, rates: Rates, *, finite: bool
    ) -> None:
        """AdamW in parts that fit a layer's slot, on the table that is in the ends' slot; nothing if not `finite`."""
        (table_VD,) = self._ends.pieces(table)
        weight, gradient = table_VD.view(-1), self._gradient
        step = AdamStep(optimizer.adam_steps, rates.adam, rates.weight_decay)
        unit = self.unit(table)
        if finite:
            self._begin_update(optimizer, unit)
        for chunk, need in self._training_needs(flat, optimizer).moments[table]:
            moments, leaving = self._layers.take(need.key), None
            if finite:
                step.apply(weight[chunk], gradient[chunk], *moments)
                leaving = self._transfer.to_host(moments, need.hosts)
            self._layers.release(need.key, leaving)
        leaving = None
        if finite:
            leaving = self._transfer.to_host((table_VD,), self._ends.hosts(table))
            self._wrote((unit,), leaving, optimizer)
        self._ends.release(table, leaving)

    def unit(self, table: str) -> int:
        """The number by which an optimizer's state knows a table; layers have their own index."""
        return self._count + TABLES.index(table)

    def _finite(self, numel: int) -> bool:
        finite = math.isfinite(float(self._gradient[:numel].sum()))
        self.skipped_updates += not finite
        return finite

    def _begin_update(self, optimizer: HostOptimizer, *units: int) -> None:
        for unit in units:
            optimizer.begin_update(unit)

    def _wrote(self, units: tuple[int, ...], ticket: Ticket, optimizer: HostOptimizer) -> None:
        self._written.append((units, ticket))
        self._settle(optimizer, 2)

    def _settle(self, optimizer: HostOptimizer, pending: int) -> None:
        while len(self._written) > pending:
            units, ticket = self._written.popleft()
            self._transfer.finish(ticket)
            for unit in units:
                optimizer.end_update(unit)

    def _leaves_of(self, index: int, weights: Pieces) -> Layers:
        """A stage's matrices by layer, to be differentiated into the gradient's buffer; the same for the same pieces.

        What never moves has its leaves made once. Between forward and backward, kept graphs need them to be the same.
        """
        known, layers = self._leaves.get(index, (None, {}))
        if known is weights:
            return layers
        stage, layers = self._stages[index], {}
        for place, layer in enumerate(stage.layers):
            pairs = zip(stage.layer(weights, place), stage.layer(self._packed[index], place), strict=True)
            layers[layer] = BlockWeights(*(leaf(weight, gradient) for weight, gradient in pairs))
        self._leaves[index] = weights, layers
        return layers

    def _weights_need(self, flat: torch.Tensor, index: int) -> Need:
        return Need(("weights", index), self._stages[index].views(flat))

    def _table_need(self, flat: torch.Tensor, table: str) -> Need:
        return Need(table, (flat[self._places.tables[table]].view(self._places.table_shape),))

    def _moment_needs(self, optimizer: HostOptimizer, table: str) -> list[tuple[slice, Need]]:
        numel, offset = self._places.table_numel, self._places.moments(table).start
        needs = []
        for start in range(0, numel, self._moments_numel):
            chunk = slice(start, min(start + self._moments_numel, numel))
            where = slice(offset + chunk.start, offset + chunk.stop)
            key: Hashable = ("moments", table, start)
            needs.append((chunk, Need(key, (optimizer.first[where], optimizer.second[where]))))
        return needs

    def _training_needs(self, flat: torch.Tensor, optimizer: HostOptimizer) -> _StepNeeds:
        known = self._needs
        if known is None or known.flat is not flat or known.optimizer is not optimizer:
            moments = {table: self._moment_needs(optimizer, table) for table in TABLES}
            ends = {table: self._table_need(flat, table) for table in TABLES}
            layers = [self._weights_need(flat, index) for index in range(len(self._stages))]
            layers += [need for _, need in moments["head"]]
            for index, stage in reversed(list(enumerate(self._stages))):
                layers += [layers[index], Need(("momentum", index), stage.momentum_views(optimizer.momentum))]
            layers += [need for _, need in moments["embed"]]
            known = _StepNeeds(flat, optimizer, layers, [ends[table] for table in ("embed", "head", "embed")], moments)
            self._needs = known
        return known
