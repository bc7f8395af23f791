"""The models that can be planned: the presets of swarms, and larger ones that no swarm has yet."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from tscale.kernels.model_config import PRESETS, ModelConfig
from tscale.kernels.offload.memory import StepShape
from tscale.node.worker.kernel_config import kernel_config
from tscale.protocol.errors import BadInput
from tscale.protocol.hashing import BlobRef
from tscale.protocol.presets import PRESET_NAMES, preset
from tscale.protocol.spec import NO_OWNER, SwarmSpec

STEP_TOKENS = 65_536
"""Tokens of a step of a model that no preset has settings for."""
CONTEXT = 1024
PLANNED_ROUND_S = 600.0


@dataclass(frozen=True)
class WantedModel:
    """A model, its inner batch, and the spec whose ladder its contributions follow."""

    config: ModelConfig
    shape: StepShape
    spec: SwarmSpec


def wanted_model(name: str, context: int | None) -> WantedModel:
    """The model of a preset, or a larger one by name. Raises BadInput for an unknown one."""
    nothing = BlobRef(bytes(32), 1)
    if name in PRESET_NAMES:
        spec = preset(name, data=(nothing,), owner=NO_OWNER, t0_unix_s=0.0)
        config = kernel_config(spec).model
        shape = StepShape(spec.inner.batch, spec.inner.context)
    elif name in PRESETS:
        spec = preset(PRESET_NAMES[-1], data=(nothing,), owner=NO_OWNER, t0_unix_s=0.0)
        spec = replace(spec, rounds=replace(spec.rounds, length_s=PLANNED_ROUND_S))
        config, shape = PRESETS[name], StepShape(STEP_TOKENS // CONTEXT, CONTEXT)
    else:
        known = sorted({*PRESETS, *PRESET_NAMES})
        if "/" in name or name.endswith(".bin"):
            raise BadInput(f"a model is named, not given as a link or a file: choose one of {', '.join(known)}")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
        raise BadInput(f"there is no model {name[:32]!r}: {hint}")
    if context is not None:
        shape = StepShape(max(1, shape.rows * shape.context // context), context)
    return WantedModel(config, shape, spec)
