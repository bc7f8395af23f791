"""What of a status snapshot strangers may see: no addresses, no local paths, no text that can misbehave."""

import dataclasses
import ipaddress
import re
import unicodedata
from typing import Any

from tscale.protocol.status import StatusSnapshot

MAX_TEXT_CHARS = 300
MAX_NAME_CHARS = 32
ADDRESS_MARK = "[address]"

_MULTIADDR = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6|dnsaddr)/[^\s,;]+")
_IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w)")
_MAYBE_IPV6 = re.compile(r"(?<!\w)[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*(?!\w)")
# C*: control, format (bidi overrides, zero width), surrogate, private use, unassigned; Zl and Zp break lines
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_MAX_MARKS_IN_A_ROW = 2


def inert_text(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """`text` without control, bidi, invisible and stacked combining characters, without addresses, cut to `max_chars`.

    HTML stays as it is: the page only ever writes text nodes, and hiding what a peer calls itself would be a lie.
    """
    kept: list[str] = []
    marks = 0
    for char in text[: 4 * max_chars]:
        category = unicodedata.category(char)
        if category in _UNSAFE_CATEGORIES:
            if char in "\t\n\r":
                kept.append(" ")
            continue
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks <= _MAX_MARKS_IN_A_ROW:
            kept.append(char)
    clean = "".join(kept)
    for pattern in (_MULTIADDR, _IPV4):
        clean = pattern.sub(ADDRESS_MARK, clean)
    clean = _MAYBE_IPV6.sub(_hide_ipv6, clean)
    clean = " ".join(clean.split())
    return clean if len(clean) <= max_chars else clean[: max_chars - 1] + "…"


def _hide_ipv6(match: re.Match[str]) -> str:
    """The mark in place of an IPv6 address; anything else with colons in it (a time of day) stays."""
    candidate = match.group().rstrip(".")
    try:
        ipaddress.IPv6Address(candidate)
    except ValueError:
        return match.group()
    return ADDRESS_MARK + match.group()[len(candidate) :]


def _inert(value: Any) -> Any:
    """`value` with every string in it made inert, through dataclasses and tuples."""
    if isinstance(value, str):
        return inert_text(value)
    if isinstance(value, tuple):
        return tuple(_inert(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: _inert(getattr(value, name)) for name in names})
    return value


def public_snapshot(snapshot: StatusSnapshot) -> StatusSnapshot:
    """The snapshot as the page, `/status.json` and `/metrics` show it.

    The node's own addresses, its process id and its state directory are left empty: the page may be open to
    strangers. The history holds numbers only and is taken over as it is.
    """
    node = dataclasses.replace(snapshot.node, addrs=(), pid=0, state_dir="")
    training = snapshot.training
    bare = dataclasses.replace(snapshot, node=node, training=dataclasses.replace(training, history=()))
    clean: StatusSnapshot = _inert(bare)
    peers = tuple(dataclasses.replace(peer, name=inert_text(peer.name, MAX_NAME_CHARS)) for peer in clean.peers)
    restored = dataclasses.replace(clean.training, history=training.history)
    return dataclasses.replace(clean, peers=peers, training=restored)
