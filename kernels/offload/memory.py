"""What a step of an OffloadTrainer moves and holds, in bytes, as a function of sizes alone.

The planner decides with it, and the tests measure it. L layers in N stages, W the bytes of one layer's
matrices, E those of a table (vocabulary * width), S the bytes of one boundary state of the whole batch (rows * context
* width).

What the layers themselves take while they compute is not written down a second time here: `works` runs the layers' own
code on tensors without contents.
"""

from __future__ import annotations

from dataclasses import dataclass

from tscale.kernels.block import Product
from tscale.kernels.model_config import ModelConfig, layer_parameters, layer_reaches
from tscale.kernels.offload.plan import OffloadPlan
from tscale.kernels.offload.works import LayerWorks, Works

FLOAT_BYTES = 4
TOKEN_BYTES = 8


@dataclass(frozen=True)
class StepShape:
    """The batch of one inner step: sequences, and tokens a sequence."""

    rows: int
    context: int


def layer_bytes(cfg: ModelConfig) -> int:
    """W: the float32 matrices of one layer."""
    return layer_parameters(cfg) // cfg.layers * FLOAT_BYTES


def table_bytes(cfg: ModelConfig) -> int:
    """E: the float32 embedding, or the head."""
    return cfg.vocab * cfg.width * FLOAT_BYTES


def state_bytes(cfg: ModelConfig, shape: StepShape) -> int:
    """S: what lies between two layers, of the whole batch."""
    return shape.rows * shape.context * cfg.width * FLOAT_BYTES


@dataclass(frozen=True)
class StepTraffic:
    """Bytes over the bus in one step, each way."""

    to_device_bytes: int
    to_host_bytes: int


def step_traffic(cfg: ModelConfig, plan: OffloadPlan, shape: StepShape) -> StepTraffic:
    """Exactly what a step copies; tokens (8 bytes each) and the loss are not counted.

    In: weights forward, weights of the layers that were not kept, momentum; embedding, head, embedding again, and two
    moments of both. Out: weights and momentum; tables and moments. With boundary activations on the host, in: what
    every stage and the head read, state and gradient of every stage going back, the embedding's gradient. Out: states
    0 to N and their gradients.
    """
    layers, w, e, s = cfg.layers, layer_bytes(cfg), table_bytes(cfg), state_bytes(cfg, shape)
    stages = len(plan.stages(layers))
    to_device = w * (3 * layers - plan.kept_layers(layers)) + e * (3 + 4)
    to_host = w * 2 * layers + e * (2 + 4)
    if plan.boundary == "host":
        to_device += s * ((stages + 1) + (2 * stages + 1))
        to_host += s * 2 * (stages + 1)
    return StepTraffic(to_device, to_host)


@dataclass(frozen=True)
class HostMemory:
    """Host memory of a trainer; the replica's own vectors (anchor, residual) are not in it."""

    weights_bytes: int
    optimizer_bytes: int
    boundary_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.optimizer_bytes + self.boundary_bytes


def host_memory(cfg: ModelConfig, plan: OffloadPlan, shape: StepShape) -> HostMemory:
    """Weights; momentum of the matrices and two moments of the tables; N + 2 boundary states where they are kept here.

    N + 2: states 0 to N and the gradient of the last; going back, a gradient takes the place of a state.
    """
    matrices, tables = cfg.layers * layer_bytes(cfg), 2 * table_bytes(cfg)
    boundary = (len(plan.stages(cfg.layers)) + 2) * state_bytes(cfg, shape) if plan.boundary == "host" else 0
    return HostMemory(matrices + tables, matrices + 2 * tables, boundary)


@dataclass(frozen=True)
class DeviceMemory:
    """Device memory of a step at its peak. `at` names what is computed there."""

    slots_bytes: int
    table_bytes: int
    gradient_bytes: int
    constant_bytes: int
    boundary_bytes: int
    kept_bytes: int
    """Of autograd's graphs, when nothing is computed twice."""
    work_bytes: int
    """Activations, logits and workspace of what is computed at the peak."""
    at: str

    @property
    def total_bytes(self) -> int:
        """All of it."""
        fixed = self.slots_bytes + self.table_bytes + self.gradient_bytes + self.constant_bytes
        return fixed + self.boundary_bytes + self.kept_bytes + self.work_bytes


@dataclass(frozen=True)
class _Stage:
    """Something that may be the peak: its own memory, and what lies between the layers and in graphs meanwhile."""

    at: str
    work_bytes: int
    boundary_bytes: int
    kept_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.work_bytes + self.boundary_bytes + self.kept_bytes


def device_memory(
    cfg: ModelConfig,
    plan: OffloadPlan,
    shape: StepShape,
    product: Product | None = None,
    works: Works | None = None,
) -> DeviceMemory:
    """The peak of one step. `product` must work on tensors without contents.

    The device's own overhead (context, libraries, fragmentation) is not in it. This takes a second, or with long
    micro-batches several; `works` of the plan's micro-batch, found before, save that.
    """
    plan.check(cfg.layers)
    works = LayerWorks(cfg, (min(plan.micro_rows, shape.rows), shape.context), product) if works is None else works
    peak = max(_stages(cfg, plan, shape, works), key=lambda stage: stage.total_bytes)
    w, e = min(plan.stage_layers, cfg.layers) * layer_bytes(cfg), table_bytes(cfg)
    tokens = shape.rows * (shape.context + 1) * TOKEN_BYTES
    return DeviceMemory(
        plan.slots * w,
        e,
        max(w, e),
        works.constant_bytes() + cfg.vocab * FLOAT_BYTES + tokens,
        peak.boundary_bytes,
        peak.kept_bytes,
        peak.work_bytes,
        peak.at,
    )


def _stages(cfg: ModelConfig, plan: OffloadPlan, shape: StepShape, works: Works) -> list[_Stage]:
    s, part = state_bytes(cfg, shape), state_bytes(cfg, StepShape(*works.micro))
    count = -(-shape.rows // works.micro[0])

    def boundary(states: int, making: bool = False) -> int:
        if plan.boundary == "host":
            # state and gradient of two micro-batches; up to two results on their way out
            return (4 + min(2, count - 1)) * part
        # what is being made lacks the part that is computed now, which the work counts
        return states * s + (s - part if making else 0)

    kinds = [tuple(layer_reaches(cfg)[index] for index in stage) for stage in plan.stages(cfg.layers)]
    size, number = len(kinds[0]), len(kinds)
    graphs = dict.fromkeys(kinds, 0)
    if not plan.recompute:
        graphs = {kind: count * (works.stage(kind, "graph").kept_bytes - part) for kind in graphs}
    kept = sum(graphs[kind] for kind in kinds)
    stages = [
        _Stage("head", works.head().peak_bytes, boundary(number + 1, making=True), kept),
        _Stage("embedding", works.embedding().peak_bytes, boundary(1)),
        _Stage("update of a stage", works.update(size).peak_bytes, boundary(number), kept),
        _Stage("update of a table", works.table_update(size).peak_bytes, boundary(number + 1), kept),
    ]
    for kind in graphs:
        # the last stage of a kind finds the most
        last = max(index for index in range(number) if kinds[index] == kind)
        before = sum(graphs[other] for other in kinds[: last + 1]) - graphs[kind] // count
        forward = works.stage(kind, "forward" if plan.recompute else "graph").peak_bytes
        backward = works.stage(kind, "backward").peak_bytes
        windows = "layers with windows of" if len(kind) > 1 else "layer with a window of"
        name = f"{windows} {', '.join(str(window) for window in sorted({reach.window for reach in kind}))}"
        stages.append(_Stage(f"{name}, forward", forward, boundary(last + 1, making=True), before))
        stages.append(_Stage(f"{name}, backward", backward, boundary(last + 2, making=True), before))
    return stages
