"""Swarms created on this machine: the spec and the owner's key are kept, so that the same command resumes its swarm."""

from __future__ import annotations

import secrets
from collections.abc import Callable
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
    """A swarm of this machine. `resumed` tells whether it existed before; `notice` why it is not an older one of the
    same name, empty when there is none."""

    spec: SwarmSpec
    state: StateDir
    resumed: bool
    notice: str = ""


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


def create_swarm(
    options: CreateOptions, base: Path, check: Callable[[SwarmSpec], None] = lambda spec: None
) -> CreatedSwarm:
    """Make the swarm, or find the one that the same options made here before.

    `check` may refuse the spec before anything is written. Writes `spec.bin` and `owner.key` (mode 0600) into its
    folder under `base`. Raises BadInput for options or files that can't be used, DiskFull.
    """
    if options.name == DEMO_NAME:
        raise BadInput(f"{DEMO_NAME!r} is the built-in swarm's name: choose another --name")
    wanted = NewSwarm(options.name, options.preset, NO_OWNER, options.t0_unix_s, options.seed, options.round_seconds)
    draft = new_spec(wanted, options.files)
    check(draft)
    notice = ""
    if not options.fresh:
        mine = _find_mine(options.name, base)
        same = [swarm for swarm in mine if anonymous(swarm.spec) == anonymous(draft)]
        if same:
            return same[-1]
        # over the same text rather than the newest
        mine.sort(key=lambda swarm: swarm.spec.data.shards == draft.data.shards)
        notice = _why_new(mine[-1].spec, draft, options.files) if mine else ""
    owner = Identity.from_secret(secrets.token_bytes(SECRET_BYTES))
    spec = replace(draft, owner=owner.public)
    spec.validate()
    state = open_state_dir(base, spec.swarm_id)
    write_identity(state.path / OWNER_KEY, owner)
    atomic_write(state.spec, spec.to_bytes())
    return CreatedSwarm(spec, state, resumed=False, notice=notice)


def _find_mine(name: str, base: Path) -> list[CreatedSwarm]:
    """The swarms of that name whose owner's key is in the folder, the newest last."""
    mine: list[CreatedSwarm] = []
    for state in find_folders(base, None):
        if not (state.path / OWNER_KEY).exists() or not state.spec.exists():
            continue
        spec = read_spec(state.spec)
        if spec.name == name and spec.owner == read_identity(state.path / OWNER_KEY).public:
            mine.append(CreatedSwarm(spec, state, resumed=True))
    return sorted(mine, key=lambda swarm: swarm.spec.rounds.t0_unix_s)


def _why_new(old: SwarmSpec, draft: SwarmSpec, files: tuple[Path, ...]) -> str:
    """One line for a person who may have meant the old swarm."""
    before, now = old.data.shards, draft.data.shards
    if before == now:
        changed = "other settings than before make another swarm"
    elif len(before) != len(now):
        changed = f"{len(now)} instead of {len(before)} files make another swarm"
    else:
        others = [
            f"{file} (hash {is_now.root.hex()[:12]}, was {was.root.hex()[:12]})"
            for file, was, is_now in zip(files, before, now, strict=True)
            if was != is_now
        ]
        changed = f"another text makes another swarm: {', '.join(others)}"
    return f"{changed}; to go on with the old one: tscale-node join --swarm {old.swarm_id}"


def anonymous(spec: SwarmSpec) -> SwarmSpec:
    """`spec` without what is drawn anew for each swarm."""
    return replace(spec, owner=NO_OWNER, seed=0, rounds=replace(spec.rounds, t0_unix_s=0.0))
