"""Built-in specs by the model's size: `demo` (0.2M parameters), `tiny` (0.9M) and `nano` (0.05M, for tests).

The demo's settings were measured on its book (docs/LOG.md, 2026-11-30).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tscale.protocol.errors import BadInput
from tscale.protocol.hashing import BlobRef
from tscale.protocol.spec import (
    SPEC_VERSION,
    AdmissionSpec,
    CapsSpec,
    CodecSpec,
    DataSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RoundSpec,
    RungSpec,
    SwarmSpec,
)

PRESET_NAMES = ("demo", "tiny", "nano")

_MODEL = ModelSpec("tscale", width=64, heads=2, head_dim=32, layers=4, window=128, vocab=256, relu=1, combine=4)
_INNER = InnerSpec(
    batch=4,
    context=128,
    lr_muon=0.07,
    lr_adam=0.03,
    weight_decay=0.0,
    momentum=0.9,
    warmup_tokens=40_000,
    schedule_tokens=1_600_000,
    final_lr_fraction=0.1,
)
_CODEC = CodecSpec(
    (
        RungSpec("1/64", kept_per_chunk=64, bits=2, gain=2.0, lone_only=False),
        RungSpec("1/32", kept_per_chunk=128, bits=2, gain=2.0, lone_only=False),
        RungSpec("1/16", kept_per_chunk=256, bits=2, gain=2.0, lone_only=False),
        RungSpec("dense32", kept_per_chunk=4096, bits=32, gain=1.0, lone_only=True),
    ),
    small_numel=1024,
)
_CAPS = CapsSpec(
    max_blob_bytes=8 << 20,
    max_contribution_tokens=1_000_000,
    max_rms=4.0,
    max_dataset_bytes=256 << 20,
    max_snapshot_bytes=32 << 20,
)


def preset(name: str, /, *, data: tuple[BlobRef, ...], owner: bytes, t0_unix_s: float, **overrides: Any) -> SwarmSpec:
    """A validated spec over `data` (the shards). `overrides` replace fields of SwarmSpec (`name=`, `seeds=`, ...).

    Raises BadInput for an unknown preset or field, or an override that makes the spec invalid.
    """
    if name not in PRESET_NAMES:
        raise BadInput(f"there is no preset {name[:32]!r}: choose one of {', '.join(PRESET_NAMES)}")
    base = _demo(data, owner, t0_unix_s)
    if name == "tiny":
        base = _tiny(base)
    elif name == "nano":
        base = _nano(base)
    unknown = sorted(overrides.keys() - set(SwarmSpec.__dataclass_fields__))
    if unknown:
        raise BadInput(f"a spec has no field {unknown[0]!r}")
    spec = replace(base, **overrides)
    spec.validate()
    return spec


def _demo(data: tuple[BlobRef, ...], owner: bytes, t0_unix_s: float) -> SwarmSpec:
    return SwarmSpec(
        version=SPEC_VERSION,
        name="demo",
        seed=1,
        model=_MODEL,
        data=DataSpec("bytes", data, heldout_per_mille=60),
        inner=_INNER,
        outer=OuterSpec(eta=1.0, mu=0.0, rho=0.5, beta=0.95, age_factor=0.5),
        codec=_CODEC,
        rounds=RoundSpec(
            t0_unix_s=t0_unix_s,
            length_s=2.0,
            grace_min_s=0.15,
            grace_max_s=0.5,
            step_min_s=0.1,
            step_max_s=0.25,
            snapshot_every=5,
            max_contributions=64,
        ),
        caps=_CAPS,
        admission=AdmissionSpec(open=True, keys=()),
        owner=owner,
        seeds=(),
    )


def _tiny(demo: SwarmSpec) -> SwarmSpec:
    """0.93M parameters: an hour on a laptop's processor."""
    model = replace(demo.model, width=128, heads=3, layers=7, window=256)
    inner = replace(demo.inner, context=256, schedule_tokens=20_000_000)
    rounds = replace(
        demo.rounds, length_s=20.0, grace_min_s=0.5, grace_max_s=4.0, step_min_s=0.5, step_max_s=2.0, snapshot_every=10
    )
    return replace(demo, name="tiny", model=model, inner=inner, rounds=rounds)


def _nano(demo: SwarmSpec) -> SwarmSpec:
    """About 0.05M parameters and short batches: a round takes milliseconds."""
    model = replace(demo.model, width=32, heads=2, head_dim=16, layers=2, window=32)
    inner = replace(demo.inner, batch=4, context=32, warmup_tokens=2_000, schedule_tokens=200_000)
    return replace(demo, name="nano", model=model, inner=inner)
