"""A SwarmSpec in the kernels' own terms. Importing this imports torch: worker, lab and tests only."""

from dataclasses import dataclass

from tscale.kernels.codec import Rung
from tscale.kernels.fold import OuterRule
from tscale.kernels.inner import InnerConfig
from tscale.kernels.layout import Layout
from tscale.kernels.model_config import ModelConfig, model_layout
from tscale.kernels.precision.capabilities import Capabilities, probe
from tscale.protocol.errors import BadInput
from tscale.protocol.spec import SwarmSpec


def training_machine(device: str = "auto") -> Capabilities:
    """The device that the worker trains on: a card that torch can use, else the processor, or the one asked for.

    Raises BadInput when a card was asked for ("cuda", AMD's included) and there is none.
    """
    found = Capabilities() if device == "cpu" else probe()
    if found.torch_device == "cuda":
        return found
    if device == "cuda":
        raise BadInput('compute.device is "cuda", but torch finds no card: install a driver, or write device = "auto"')
    return Capabilities()


@dataclass(frozen=True)
class KernelConfig:
    """What the kernels need to know of a spec. `rungs` has the spec's order."""

    model: ModelConfig
    inner: InnerConfig
    layout: Layout
    rule: OuterRule
    rungs: tuple[Rung, ...]


def kernel_config(spec: SwarmSpec) -> KernelConfig:
    """Translate a spec.

    Raises:
        BadInput: sizes that this version's kernels can't do.
    """
    m, i = spec.model, spec.inner
    try:
        model = ModelConfig(m.kind, m.width, m.heads, m.head_dim, m.layers, m.window, m.vocab, m.relu, m.combine)
        inner = InnerConfig(
            batch=i.batch,
            context=i.context,
            lr_muon=i.lr_muon,
            lr_adam=i.lr_adam,
            weight_decay=i.weight_decay,
            momentum=i.momentum,
            warmup_tokens=i.warmup_tokens,
            schedule_tokens=i.schedule_tokens,
            final_lr_fraction=i.final_lr_fraction,
        )
        layout = model_layout(model).with_small_numel(spec.codec.small_numel)
        rungs = tuple(Rung(rung.kept_per_chunk, rung.bits) for rung in spec.codec.rungs)
        return KernelConfig(model, inner, layout, OuterRule(spec.outer.eta, spec.outer.mu), rungs)
    except ValueError as error:
        raise BadInput(f"this version can't train the model of the spec: {error}") from None
