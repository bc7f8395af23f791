"""Built-in specs by the model's size.

`nano` (0.04M parameters, for tests), `demo` (0.2M), `tiny` (0.9M), `125m` (99M), `350m` (276M), `1.5b` (1.38B).
docs/results/convergence.md has the reason of each setting and the bytes of a round. A rung's gain is that of eight
equal contributions (gains.py). Outer step and codec were measured at 0.2M and 0.9M parameters; no preset above `tiny`
has been trained, so their rates are extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
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

PRESET_NAMES = ("demo", "tiny", "nano", "125m", "350m", "1.5b")

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
        RungSpec("1/64", kept_per_chunk=64, bits=2, gain=5.0, lone_only=False),
        RungSpec("1/32", kept_per_chunk=128, bits=2, gain=4.0, lone_only=False),
        RungSpec("1/16", kept_per_chunk=256, bits=2, gain=3.0, lone_only=False),
        RungSpec("dense32", kept_per_chunk=4096, bits=32, gain=1.0, lone_only=True),
    ),
    small_numel=1024,
)
_DENSER = (
    RungSpec("1/8", kept_per_chunk=512, bits=2, gain=3.0, lone_only=False),
    RungSpec("1/4", kept_per_chunk=1024, bits=2, gain=2.5, lone_only=False),
    RungSpec("dense2", kept_per_chunk=4096, bits=2, gain=2.0, lone_only=False),
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
    base = _BUILDERS[name](_demo(data, owner, t0_unix_s))
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


def _125m(demo: SwarmSpec) -> SwarmSpec:
    """98.6M parameters: cards of 8 GB and more. Two minutes are a few hundred steps of such a card."""
    model = replace(demo.model, width=512, heads=3, head_dim=128, layers=50, window=1024)
    return _large(demo, "125m", model, round_s=120.0, tokens=10_000_000_000)


def _350m(demo: SwarmSpec) -> SwarmSpec:
    """276M parameters."""
    model = replace(demo.model, width=768, heads=7, head_dim=128, layers=40, window=1024)
    return _large(demo, "350m", model, round_s=300.0, tokens=30_000_000_000)


def _1_5b(demo: SwarmSpec) -> SwarmSpec:
    """1.38B parameters. A lone peer's rounds are dense two-bit too: float32 would be 5.5 GB on its disk each time."""
    model = replace(demo.model, width=1280, heads=20, head_dim=128, layers=42, window=1024)
    large = _large(demo, "1-5b", model, round_s=600.0, tokens=130_000_000_000)
    return replace(
        large,
        codec=replace(large.codec, rungs=large.codec.rungs[:-1]),
        caps=replace(large.caps, max_blob_bytes=512 << 20),
    )


def _large(demo: SwarmSpec, name: str, model: ModelSpec, *, round_s: float, tokens: int) -> SwarmSpec:
    """About 100 bytes of text a parameter, which is 20 to 25 tokens of a usual vocabulary. The ladder goes on up to
    dense two-bit contributions, which a small swarm's home lines carry. The caps leave room for a float32 state."""
    inner = replace(
        demo.inner,
        batch=16,
        context=1024,
        lr_muon=0.05,
        lr_adam=0.02,
        warmup_tokens=tokens // 100,
        schedule_tokens=tokens,
    )
    state_bytes = 8 * tokens // 100
    return replace(
        demo,
        name=name,
        model=model,
        inner=inner,
        codec=replace(demo.codec, rungs=(*demo.codec.rungs[:-1], *_DENSER, demo.codec.rungs[-1])),
        rounds=replace(
            demo.rounds,
            length_s=round_s,
            grace_min_s=2.0,
            grace_max_s=round_s / 5,
            step_min_s=2.0,
            step_max_s=round_s / 20,
            snapshot_every=20,
        ),
        caps=replace(
            demo.caps,
            max_blob_bytes=state_bytes,
            max_contribution_tokens=1 << 30,
            max_rms=16.0,
            max_dataset_bytes=16 << 30,
            max_snapshot_bytes=2 * state_bytes,
        ),
    )


_BUILDERS: MappingProxyType[str, Callable[[SwarmSpec], SwarmSpec]] = MappingProxyType(
    {"demo": lambda demo: demo, "tiny": _tiny, "nano": _nano, "125m": _125m, "350m": _350m, "1.5b": _1_5b}
)
