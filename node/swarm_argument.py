"""What `--swarm` names: the built-in demo, a link, a spec file or an id; and where its spec and peers come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tscale.node.specs import DEMO_NAME, demo_spec, read_spec, shipped_book_path
from tscale.protocol.addrs import parse_multiaddr_peer
from tscale.protocol.errors import BadInput
from tscale.protocol.links import parse_link
from tscale.protocol.spec import SwarmSpec


@dataclass(frozen=True)
class SwarmTarget:
    """A swarm to take part in. `spec` None: it must be fetched from a peer and checked against the id."""

    swarm_id: str
    spec: SwarmSpec | None
    seeds: tuple[str, ...]
    dataset_files: tuple[Path, ...] = ()


def resolve_swarm(text: str) -> SwarmTarget:
    """Parse `--swarm`. Raises BadInput with one line that says what to give instead."""
    if text == DEMO_NAME:
        spec = demo_spec()
        return SwarmTarget(spec.swarm_id, spec, (), (shipped_book_path(),))
    if "://" not in text and (_is_file(text) or _looks_like_path(text)):
        spec = read_spec(Path(text))
        return SwarmTarget(spec.swarm_id, spec, spec.seeds)
    link = parse_link(text)
    return SwarmTarget(link.swarm_id, None, link.seeds)


def parse_seeds(texts: Iterable[str]) -> tuple[str, ...]:
    """The addresses given with --seed, each with its peer. Raises BadInput for one that can't be used."""
    return tuple(dict.fromkeys(parse_multiaddr_peer(text.strip())[0] for text in texts))


def stored_spec(path: Path, swarm_id: str) -> SwarmSpec | None:
    """The spec that an earlier run left at `path`, if any. Raises BadInput when it has another id."""
    if not path.exists():
        return None
    try:
        spec = read_spec(path)
    except BadInput as error:
        raise BadInput(f"{error}; remove the file to fetch it again") from error
    if spec.swarm_id != swarm_id:
        raise BadInput(f"{path} is the spec of {spec.swarm_id}, not of {swarm_id}: remove the file to fetch it again")
    return spec


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False


def _looks_like_path(text: str) -> bool:
    return "/" in text or "\\" in text or text.endswith(".bin")
