"""Swarms created on this machine: the spec and the owner's key are kept, so that the same command resumes its swarm."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from tscale.node.instances import find_folders
from tscale.node.specs import DEMO_NAME, NewSwarm, new_spec, read_spec
from tscale.node.statedir import (
    StateDir,
    atomic_write,
    open_state_dir,
    read_identity,
    write_identity,
)
from tscale.protocol.errors import BadInput
from tscale.protocol.identity import SECRET_BYTES, Identity
from tscale.protocol.spec import NO_OWNER, SwarmSpec

OWNER_KEY = "owner.key"


@dataclass(frozen=True)
class CreatedSwarm:
    """A swarm of this machine. `resumed` tells whether it existed before."""

    spec: SwarmSpec
    state: StateDir
    resumed: bool


@dataclass(frozen=True)
class CreateOptions:
    """What the creator chose. `fresh` makes a new swarm even when the same one exists."""

    name: str
    preset: str
    files: tuple[Path, ...]
    round_seconds: float | None
    t0_unix_s: float
    seed: int
    fresh: bool = False


def create_swarm(options: CreateOptions, base: Path) -> CreatedSwarm:
    """Make the swarm, or find the one that the same options made here before.

    Writes `spec.bin` and `owner.key` (mode 0600) into its folder under `base`. Raises BadInput for
    options or files that can't be used, DiskFull.
    """
    if options.name == DEMO_NAME:
        raise BadInput(f"{DEMO_NAME!r} is the built-in swarm's name: choose another --name")
    wanted = NewSwarm(options.name, options.preset, NO_OWNER, options.t0_unix_s, options.seed, options.round_seconds)
    draft = new_spec(wanted, options.files)
    if not options.fresh:
        found = _find_same(draft, base)
        if found is not None:
            return found
    owner = Identity.from_secret(secrets.token_bytes(SECRET_BYTES))
    spec = replace(draft, owner=owner.public)
    spec.validate()
    state = open_state_dir(base, spec.swarm_id)
    write_identity(state.path / OWNER_KEY, owner)
    atomic_write(state.spec, spec.to_bytes())
    return CreatedSwarm(spec, state, resumed=False)


def _find_same(draft: SwarmSpec, base: Path) -> CreatedSwarm | None:
    """The newest swarm in the folder that differs from `draft` only in its start, seed and owner, which is ours."""
    same: list[CreatedSwarm] = []
    for state in find_folders(base, None):
        if not (state.path / OWNER_KEY).exists() or not state.spec.exists():
            continue
        spec = read_spec(state.spec)
        if anonymous(spec) == anonymous(draft) and spec.owner == read_identity(state.path / OWNER_KEY).public:
            same.append(CreatedSwarm(spec, state, resumed=True))
    return max(same, key=lambda swarm: swarm.spec.rounds.t0_unix_s, default=None)


def anonymous(spec: SwarmSpec) -> SwarmSpec:
    """`spec` without what is drawn anew for each swarm."""
    return replace(spec, owner=NO_OWNER, seed=0, rounds=replace(spec.rounds, t0_unix_s=0.0))
