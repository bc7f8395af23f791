"""The SwarmSpec: everything that peers of one training run must agree on. Its hash is the swarm id."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tscale.protocol.addrs import find_problem
from tscale.protocol.canonical import pack, unpack
from tscale.protocol.errors import BadInput, RefuseFrame
from tscale.protocol.fields import SWARM_ID_CHARS, is_swarm_name
from tscale.protocol.hashing import HASH_BYTES, MAX_BLOB_BYTES, BlobRef, digest
from tscale.protocol.schema import WIRE, from_plain, to_plain

SPEC_VERSION = 1
MAX_SPEC_BYTES = 128 * 1024
NO_OWNER = bytes(HASH_BYTES)
"""The owner of a swarm that nobody may correct."""

NEST_SHARE = 0.8
"""The longest wait for a manifest (the grace and four candidates) fits into this share of a round."""


@dataclass(frozen=True)
class ModelSpec:
    """The network; the fields of the kernels' ModelConfig."""

    kind: str
    width: int
    heads: int
    head_dim: int
    layers: int
    window: int
    vocab: int
    relu: int
    combine: int


@dataclass(frozen=True)
class DataSpec:
    """The dataset: raw bytes in content-addressed shards, and how much of it is held out for evaluation."""

    format: str
    shards: tuple[BlobRef, ...]
    heldout_per_mille: int


@dataclass(frozen=True)
class InnerSpec:
    """The inner optimizer; the fields of the kernels' InnerConfig."""

    batch: int
    context: int
    lr_muon: float
    lr_adam: float
    weight_decay: float
    momentum: float
    warmup_tokens: int
    schedule_tokens: int
    final_lr_fraction: float


@dataclass(frozen=True)
class OuterSpec:
    """The outer step: step size `eta`, Nesterov momentum `mu`, the part `rho` of its residual that a peer keeps
    applied, the residual's decay `beta` a round, and the weight of a contribution that is one manifest old."""

    eta: float
    mu: float
    rho: float
    beta: float
    age_factor: float


@dataclass(frozen=True)
class RungSpec:
    """One density of the ladder. `lone_only`: used by a peer that is alone, its blob is never sent."""

    name: str
    kept_per_chunk: int
    bits: int
    gain: float
    lone_only: bool


@dataclass(frozen=True)
class CodecSpec:
    """The ladder of densities, and up to how many values a tensor travels as float16."""

    rungs: tuple[RungSpec, ...]
    small_numel: int


@dataclass(frozen=True)
class RoundSpec:
    """The swarm's clock: round r spans [t0 + r*length, t0 + (r+1)*length). Grace and step adapt within bounds."""

    t0_unix_s: float
    length_s: float
    grace_min_s: float
    grace_max_s: float
    step_min_s: float
    step_max_s: float
    snapshot_every: int
    max_contributions: int


@dataclass(frozen=True)
class CapsSpec:
    """What is refused unread. `max_rms` bounds the root mean square of every tensor of a decoded contribution."""

    max_blob_bytes: int
    max_contribution_tokens: int
    max_rms: float
    max_dataset_bytes: int
    max_snapshot_bytes: int


@dataclass(frozen=True)
class AdmissionSpec:
    """Who may contribute: everybody, or the listed public keys (sorted)."""

    open: bool
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class SwarmSpec:
    """One training run. `owner` is a public key or NO_OWNER; `seeds` are addresses that name their peer."""

    version: int
    name: str
    seed: int
    model: ModelSpec
    data: DataSpec
    inner: InnerSpec
    outer: OuterSpec
    codec: CodecSpec
    rounds: RoundSpec
    caps: CapsSpec
    admission: AdmissionSpec
    owner: bytes
    seeds: tuple[str, ...]

    @cached_property
    def encoded(self) -> bytes:
        """The canonical bytes."""
        return pack(to_plain(self, WIRE))

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of the canonical bytes. 32 bytes."""
        return digest("spec", self.encoded)

    @cached_property
    def swarm_id(self) -> str:
        """`<name>-<26 base32 characters of the digest>`."""
        return f"{self.name}-{base64.b32encode(self.digest).decode('ascii').lower()[:SWARM_ID_CHARS]}"

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        return self.encoded

    @classmethod
    def from_bytes(cls, data: bytes) -> SwarmSpec:
        """Parse and validate. Raises RefuseFrame for anything that no valid spec encodes to."""
        spec = from_plain(cls, unpack(data, MAX_SPEC_BYTES), WIRE)
        problem = spec.find_problem()
        if problem is not None:
            raise RefuseFrame(f"the spec is refused: {problem}")
        return spec

    def find_problem(self) -> str | None:
        """The first thing that makes the spec unusable, in one line, or None."""
        return next(_problems(self), None)

    def validate(self) -> None:
        """Check types, ranges and that the times nest. Raises BadInput with the first problem."""
        try:
            from_plain(SwarmSpec, to_plain(self, WIRE), WIRE)
        except RefuseFrame as error:
            raise BadInput(f"the spec is refused: {error}") from error
        problem = self.find_problem()
        if problem is not None:
            raise BadInput(f"the spec is refused: {problem}")


def _problems(spec: SwarmSpec) -> Iterator[str]:
    if spec.version != SPEC_VERSION:
        yield f"its version is {spec.version}, this node knows version {SPEC_VERSION}: update the older one"
    if not is_swarm_name(spec.name):
        yield "its name must be 1 to 32 of a-z, 0-9 and -, without - at the ends"
    yield from _outside("seed", spec.seed, 0, (1 << 63) - 1)
    yield from _model_problems(spec.model)
    yield from _data_problems(spec)
    yield from _inner_problems(spec.inner)
    yield from _outer_problems(spec.outer)
    yield from _codec_problems(spec.codec)
    yield from _round_problems(spec.rounds)
    yield from _caps_problems(spec.caps)
    yield from _people_problems(spec)


def _outside(name: str, value: float, low: float, high: float) -> Iterator[str]:
    if not low <= value <= high:
        yield f"{name} is {value}, it must be from {low} to {high}"


def _model_problems(model: ModelSpec) -> Iterator[str]:
    if model.kind != "tscale":
        yield f"model.kind {model.kind[:16]!r} is unknown, this node knows 'tscale'"
    for name, value, high in (
        ("width", model.width, 65536),
        ("heads", model.heads, 1024),
        ("head_dim", model.head_dim, 1024),
        ("layers", model.layers, 1024),
        ("window", model.window, 1 << 20),
        ("vocab", model.vocab, 1 << 20),
        ("combine", model.combine, 64),
    ):
        yield from _outside(f"model.{name}", value, 1, high)
    yield from _outside("model.relu", model.relu, 0, 16)


def _data_problems(spec: SwarmSpec) -> Iterator[str]:
    data = spec.data
    if data.format != "bytes":
        yield f"data.format {data.format[:16]!r} is unknown, this node knows 'bytes'"
    if not data.shards:
        yield "data.shards is empty"
    for shard in data.shards:
        if len(shard.root) != HASH_BYTES:
            yield "the root of a shard must be 32 bytes"
        yield from _outside("the size of a shard", shard.size_bytes, 1, MAX_BLOB_BYTES)
    if sum(shard.size_bytes for shard in data.shards) > spec.caps.max_dataset_bytes:
        yield "the shards are larger than caps.max_dataset_bytes"
    yield from _outside("data.heldout_per_mille", data.heldout_per_mille, 1, 500)


def _inner_problems(inner: InnerSpec) -> Iterator[str]:
    yield from _outside("inner.batch", inner.batch, 1, 1 << 20)
    yield from _outside("inner.context", inner.context, 1, 1 << 20)
    yield from _outside("inner.lr_muon", inner.lr_muon, 0.0, 10.0)
    yield from _outside("inner.lr_adam", inner.lr_adam, 0.0, 10.0)
    yield from _outside("inner.weight_decay", inner.weight_decay, 0.0, 1.0)
    yield from _outside("inner.momentum", inner.momentum, 0.0, 0.9999)
    yield from _outside("inner.warmup_tokens", inner.warmup_tokens, 0, 1 << 53)
    yield from _outside("inner.schedule_tokens", inner.schedule_tokens, 1, 1 << 53)
    yield from _outside("inner.final_lr_fraction", inner.final_lr_fraction, 0.0, 1.0)


def _outer_problems(outer: OuterSpec) -> Iterator[str]:
    yield from _outside("outer.eta", outer.eta, 1e-6, 10.0)
    yield from _outside("outer.mu", outer.mu, 0.0, 0.9999)
    yield from _outside("outer.rho", outer.rho, 0.0, 1.0)
    yield from _outside("outer.beta", outer.beta, 0.0, 1.0)
    yield from _outside("outer.age_factor", outer.age_factor, 0.0, 1.0)


def _codec_problems(codec: CodecSpec) -> Iterator[str]:
    if not 1 <= len(codec.rungs) <= 16 or all(rung.lone_only for rung in codec.rungs):
        yield "codec.rungs must have 1 to 16 densities, one of them not lone_only"
    if len({rung.name for rung in codec.rungs}) != len(codec.rungs):
        yield "two of codec.rungs have the same name"
    for rung in codec.rungs:
        if not 1 <= len(rung.name) <= 16 or not rung.name.isascii() or not rung.name.isprintable():
            yield "the name of a rung must be 1 to 16 printable ASCII characters"
        yield from _outside("codec.rungs.kept_per_chunk", rung.kept_per_chunk, 1, 4096)
        yield from _outside("codec.rungs.gain", rung.gain, 1e-3, 64.0)
        if rung.bits not in (2, 32) or (rung.bits == 32 and rung.kept_per_chunk != 4096):
            yield "codec.rungs.bits must be 2, or 32 with all 4096 values of a chunk kept"
    yield from _outside("codec.small_numel", codec.small_numel, 0, 1 << 20)


def _round_problems(rounds: RoundSpec) -> Iterator[str]:
    yield from _outside("rounds.t0_unix_s", rounds.t0_unix_s, 0.0, 1e11)
    yield from _outside("rounds.length_s", rounds.length_s, 0.1, 86_400.0)
    if not 0.0 < rounds.grace_min_s <= rounds.grace_max_s:
        yield "rounds.grace_min_s must be above 0 and at most rounds.grace_max_s"
    if not 0.0 < rounds.step_min_s <= rounds.step_max_s:
        yield "rounds.step_min_s must be above 0 and at most rounds.step_max_s"
    longest_s = rounds.grace_max_s + 4 * rounds.step_max_s
    if longest_s > NEST_SHARE * rounds.length_s:
        yield (
            f"its times can't nest: grace_max_s + 4 * step_max_s is {longest_s:g} s, "
            f"more than {NEST_SHARE:g} of a round of {rounds.length_s:g} s: make rounds longer or the waits shorter"
        )
    yield from _outside("rounds.snapshot_every", rounds.snapshot_every, 1, 10_000)
    yield from _outside("rounds.max_contributions", rounds.max_contributions, 1, 1024)


def _caps_problems(caps: CapsSpec) -> Iterator[str]:
    yield from _outside("caps.max_blob_bytes", caps.max_blob_bytes, 1, MAX_BLOB_BYTES)
    yield from _outside("caps.max_contribution_tokens", caps.max_contribution_tokens, 1, 1 << 40)
    yield from _outside("caps.max_rms", caps.max_rms, 1e-9, 1e6)
    yield from _outside("caps.max_dataset_bytes", caps.max_dataset_bytes, 1, MAX_BLOB_BYTES)
    yield from _outside("caps.max_snapshot_bytes", caps.max_snapshot_bytes, 1, MAX_BLOB_BYTES)


def _people_problems(spec: SwarmSpec) -> Iterator[str]:
    keys = spec.admission.keys
    if any(len(key) != HASH_BYTES for key in (*keys, spec.owner)):
        yield "admission.keys and owner must be public keys of 32 bytes"
    if list(keys) != sorted(set(keys)):
        yield "admission.keys must be sorted and different"
    if spec.admission.open == bool(keys):
        yield "admission must be open, or list at least one key"
    if len(spec.seeds) > 16 or len(set(spec.seeds)) != len(spec.seeds):
        yield "seeds must be at most 16 different addresses"
    for seed in spec.seeds:
        if "/p2p/" not in seed:
            yield "an address in seeds names no peer: it must end in /p2p/<peer id>"
        problem = find_problem(seed)
        if problem is not None:
            yield problem
