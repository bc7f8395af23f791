"""How fast a model of this size was trained on this machine, by what its nodes have written of themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tscale.kernels.offload.memory import StepShape
from tscale.node.instances import find_folders
from tscale.node.planning.planner import StepTime, TrainingPlan
from tscale.node.statedir import read_regular
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.status import MAX_STATUS_BYTES, StatusSnapshot

PLANNED = "fp32"
"""The precision that plans count with; other ones are emulated on a processor and slower."""


@dataclass(frozen=True)
class MeasuredRate:
    """`tokens_per_s` of the node whose swarm is `swarm_name`."""

    tokens_per_s: float
    swarm_name: str


def find_rate(base: Path, parameters: int) -> MeasuredRate | None:
    """The rate of the node below `base` that trained a model with as many parameters last."""
    newest: StatusSnapshot | None = None
    for state in find_folders(base, None):
        try:
            snapshot = StatusSnapshot.from_json(read_regular(state.status, MAX_STATUS_BYTES + 1))
        except (OSError, RefuseFrame):
            continue
        training = snapshot.training
        if (
            snapshot.model.parameters != parameters
            or training.tokens_per_s <= 0.0
            or not training.precision.startswith(PLANNED)
        ):
            continue
        if newest is None or snapshot.updated_unix_s > newest.updated_unix_s:
            newest = snapshot
    return None if newest is None else MeasuredRate(newest.training.tokens_per_s, newest.swarm_name)


def with_rate(plan: TrainingPlan, shape: StepShape, rate: MeasuredRate) -> TrainingPlan:
    """The plan with the step's time as it was measured."""
    seconds = shape.rows * shape.context / rate.tokens_per_s
    return replace(plan, step=StepTime(seconds, 0.0, hidden=True))
