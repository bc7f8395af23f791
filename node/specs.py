"""Specs made on this machine: a new swarm over text files, the built-in demo swarm, and spec files."""

from __future__ import annotations

import importlib.resources
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tscale.protocol.errors import BadInput, RefuseFrame
from tscale.protocol.hashing import BlobRef, blob_ref
from tscale.protocol.presets import preset
from tscale.protocol.spec import MAX_SPEC_BYTES, NO_OWNER, RoundSpec, SwarmSpec

DEMO_NAME = "demo"
DEMO_T0_UNIX_S = 1_767_225_600.0
"""Round 0 of the built-in demo swarm (2026-01-01): a constant, so that every machine computes the same swarm id."""


@dataclass(frozen=True)
class NewSwarm:
    """What a creator chooses; everything else comes from the preset. `round_seconds` None keeps the preset's."""

    name: str
    preset: str
    owner: bytes
    t0_unix_s: float
    seed: int
    round_seconds: float | None = None


def shipped_book_path() -> Path:
    """The text that the demo trains on."""
    return Path(str(importlib.resources.files("tscale.node.data").joinpath("moby_dick.txt")))


def demo_spec() -> SwarmSpec:
    """The built-in demo swarm; it has no owner."""
    return preset(DEMO_NAME, data=(file_ref(shipped_book_path()),), owner=NO_OWNER, t0_unix_s=DEMO_T0_UNIX_S)


def new_spec(wanted: NewSwarm, files: Sequence[Path]) -> SwarmSpec:
    """The spec of a new swarm over text files. Raises BadInput for files or choices that can't be used."""
    if not files:
        raise BadInput("a swarm needs data: give at least one text file with --data FILE")
    shards = tuple(file_ref(path) for path in files)
    if len(set(shards)) != len(shards):
        raise BadInput("the same text was given twice with --data: give each file once")
    spec = preset(
        wanted.preset,
        data=shards,
        owner=wanted.owner,
        t0_unix_s=wanted.t0_unix_s,
        name=wanted.name,
        seed=wanted.seed,
    )
    _require_length(spec, files)
    if wanted.round_seconds is None:
        return spec
    spec = replace(spec, rounds=with_length(spec.rounds, wanted.round_seconds))
    spec.validate()
    return spec


def _require_length(spec: SwarmSpec, files: Sequence[Path]) -> None:
    """Raises BadInput when the texts are too short to train on."""
    from tscale.node.data.corpus import ByteCorpus, load_text_file

    # the worker reads the shards as one text; a key of zeros stands for any peer's
    text = b"".join(load_text_file(path) for path in files)
    ByteCorpus(text, spec.data.heldout_per_mille).batch(bytes(32), 0, 1, spec.inner.context)


def with_length(rounds: RoundSpec, length_s: float) -> RoundSpec:
    """`rounds` with another length; the waits inside a round keep their share of it."""
    scale = length_s / rounds.length_s
    return replace(
        rounds,
        length_s=length_s,
        grace_min_s=rounds.grace_min_s * scale,
        grace_max_s=rounds.grace_max_s * scale,
        step_min_s=rounds.step_min_s * scale,
        step_max_s=rounds.step_max_s * scale,
    )


def file_ref(path: Path) -> BlobRef:
    """The content address of a text file. Raises BadInput when it can't be trained on."""
    from tscale.node.data.corpus import load_text_file

    return blob_ref(load_text_file(path))


def read_spec(path: Path) -> SwarmSpec:
    """The spec in a file. Raises BadInput when there is none, with the reason."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        raise BadInput(f"can't read {path}: {error.strerror or error}") from error
    try:
        return SwarmSpec.from_bytes(data)
    except RefuseFrame as error:
        raise BadInput(f"{path} is not a swarm spec this node can use: {error}") from error


def random_seed() -> int:
    """A new swarm's seed: initial parameters and batches follow from it."""
    return secrets.randbits(62)
