"""How a step is cut: slots, micro-batches, where boundary activations are, and whether layers are computed twice."""

from __future__ import annotations

from dataclasses import dataclass

PLACES = ("device", "host")


@dataclass(frozen=True)
class OffloadPlan:
    """Choices that change memory and traffic, not the mathematics.

    A stage is one layer, or `stage_layers` neighbours that move, are computed again and are updated together: fewer
    and larger operations and fewer boundaries where layers are small. `slots` hold the matrices or the momentum of one
    stage each. Two are enough, from four on all copies run beside the computation, and with two more than there are
    stages every weight is copied once a step. `micro_rows` sequences go through a stage at a time. `boundary` says
    where the activations between stages wait: "host" or "device". `recompute` keeps only those and computes a stage
    again in the backward pass; without it all stages must be resident. Raises ValueError.
    """

    slots: int
    micro_rows: int
    boundary: str = "host"
    recompute: bool = True
    stage_layers: int = 1

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.slots < 2:
            raise ValueError("a step needs at least two slots: a stage's weights and its momentum")
        if self.micro_rows < 1 or self.stage_layers < 1:
            raise ValueError("a micro-batch has at least one sequence, and a stage one layer")
        if self.boundary not in PLACES:
            raise ValueError(f"boundary activations are on the device or the host, not on {self.boundary!r}")

    def stages(self, layers: int) -> tuple[range, ...]:
        """The layers of each stage, in order; the last one may be shorter."""
        size = self.stage_layers
        return tuple(range(first, min(first + size, layers)) for first in range(0, layers, size))

    def kept_stages(self, layers: int) -> int:
        """How many of the last stages stay on the device from the forward to the backward pass."""
        return min(len(self.stages(layers)), max(1, self.slots - 2))

    def kept_layers(self, layers: int) -> int:
        """The same in layers."""
        return sum(len(stage) for stage in self.stages(layers)[-self.kept_stages(layers) :])

    def check(self, layers: int) -> None:
        """Raises ValueError when the plan does not fit a model of `layers` layers."""
        if not self.recompute and self.kept_layers(layers) < layers:
            needed = len(self.stages(layers)) + 2
            raise ValueError(f"to keep what layers computed, all must be resident: {needed} slots")
        if not self.recompute and self.boundary != "device":
            raise ValueError("what layers computed can only be kept on the device")


def resident_plan(layers: int, rows: int) -> OffloadPlan:
    """Everything on the device, the whole batch at once, one layer's gradient at a time."""
    return OffloadPlan(layers + 2, rows, "device", recompute=False)


def joined_plan(layers: int, rows: int) -> OffloadPlan:
    """Everything on the device and all layers updated together: plain training."""
    return OffloadPlan(2, rows, "device", recompute=False, stage_layers=layers)
