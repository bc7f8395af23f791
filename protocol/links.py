"""Swarm links: `tscale://<swarm id>?seed=<multiaddr>&seed=...`, what a creator shares and a volunteer pastes."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

from tscale.protocol.addrs import parse_addr, parse_multiaddr_peer
from tscale.protocol.errors import BadInput
from tscale.protocol.fields import is_swarm_id

__all__ = ["MAX_LINK_CHARS", "SwarmLink", "format_link", "parse_addr", "parse_link", "parse_multiaddr_peer"]

SCHEME = "tscale://"
MAX_LINK_CHARS = 8192
MAX_LINK_SEEDS = 16


@dataclass(frozen=True, slots=True)
class SwarmLink:
    """A swarm id and addresses of peers that know it; each address names its peer."""

    swarm_id: str
    seeds: tuple[str, ...]


def format_link(link: SwarmLink) -> str:
    """The text of a link. Only characters that need it are escaped, so that people can read it."""
    query = "&".join("seed=" + quote(seed, safe="/:.-_~") for seed in link.seeds)
    return SCHEME + link.swarm_id + ("?" + query if query else "")


def parse_link(text: str) -> SwarmLink:
    """Parse what a person pasted: a link, or a bare swarm id. Raises BadInput with one line that says what to do."""
    if len(text) > MAX_LINK_CHARS:
        raise BadInput(f"the link is longer than {MAX_LINK_CHARS} characters: paste one link only")
    text = text.strip()
    if not text.isascii() or not text.isprintable() or " " in text:
        raise BadInput("the link has spaces or characters that no link has: copy it again")
    scheme, mark, rest = text.partition("://")
    if mark and scheme + mark != SCHEME:
        raise BadInput(f"a swarm link starts with {SCHEME}, not with {(scheme + mark)[:32]!r}")
    if "://" in rest:
        raise BadInput("this is two links pasted as one: paste one of them")
    swarm_id, _, query = (rest if mark else text).partition("?")
    if not is_swarm_id(swarm_id):
        raise BadInput(f"{swarm_id[:80]!r} is not a swarm id (<name>-<26 characters of a-z and 2-7>): copy it in full")
    return SwarmLink(swarm_id, _parse_seeds(query))


def _parse_seeds(query: str) -> tuple[str, ...]:
    seeds: list[str] = []
    for item in query.split("&") if query else ():
        key, _, value = item.partition("=")
        if key != "seed":
            raise BadInput(f"the link has the unknown part {item[:32]!r}: after ? come only seed=<address>, with &")
        addr, _ = parse_multiaddr_peer(_unquote(value))
        if addr not in seeds:
            seeds.append(addr)
    if len(seeds) > MAX_LINK_SEEDS:
        raise BadInput(f"the link has more than {MAX_LINK_SEEDS} seeds: remove some")
    return tuple(seeds)


def _unquote(value: str) -> str:
    try:
        return unquote_to_bytes(value).decode("ascii")
    except UnicodeDecodeError:
        raise BadInput("an address in the link has characters that no address has: copy it again") from None
