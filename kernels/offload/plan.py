"""How a step is cut: slots, micro-batches, where boundary activations are, and whether layers are computed twice."""

from __future__ import annotations

from dataclasses import dataclass

PLACES = ("device", "host")


@dataclass(frozen=True)
class OffloadPlan:
    """Choices that change memory and traffic, not the mathematics.

    `slots` hold the matrices or the momentum of one layer each; two are enough, from four on all copies run beside the
    computation, and with `layers + 2` every layer's weights are copied once a step. `micro_rows` sequences go through
    a layer at a time. `boundary` says where the activations between layers wait: "host" or "device". `recompute`
    keeps only those and computes a layer again in the backward pass; without it all layers must be resident.
    Raises ValueError.
    """

    slots: int
    micro_rows: int
    boundary: str = "host"
    recompute: bool = True

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.slots < 2:
            raise ValueError("a step needs at least two slots: a layer's weights and its momentum")
        if self.micro_rows < 1:
            raise ValueError("a micro-batch has at least one sequence")
        if self.boundary not in PLACES:
            raise ValueError(f"boundary activations are on the device or the host, not on {self.boundary!r}")

    def kept_layers(self, layers: int) -> int:
        """How many of the last layers stay on the device from the forward to the backward pass."""
        return min(layers, max(1, self.slots - 2))

    def check(self, layers: int) -> None:
        """Raises ValueError when the plan does not fit a model of `layers` layers."""
        if not self.recompute and self.kept_layers(layers) < layers:
            raise ValueError(f"to keep what layers computed, all must be resident: {layers + 2} slots")
        if not self.recompute and self.boundary != "device":
            raise ValueError("what layers computed can only be kept on the device")


def resident_plan(layers: int, rows: int) -> OffloadPlan:
    """Everything on the device, the whole batch at once: plain training."""
    return OffloadPlan(layers + 2, rows, "device", recompute=False)
