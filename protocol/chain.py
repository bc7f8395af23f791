"""The manifest chain: what makes a manifest valid, and which one is the head when there are several.

Manifests form a tree under the genesis digest. At every branching the child with more accepted tokens *behind* it
wins, counted along the chain that this rule itself follows from there; between children with nothing behind them, the
earlier round, then the earlier sealer in the candidates' order, then the lower digest. The rule depends on the set of
manifests alone, not on the order of arrival, so peers that know the same manifests follow the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tscale.protocol.gains import effective_peers, scaled_gain
from tscale.protocol.hashing import digest
from tscale.protocol.records import Announcement, Manifest, SignedRecord
from tscale.protocol.spec import SwarmSpec

MAX_KEPT_BYTES = 128 << 20  # of the followed chain: less than what a node reads back after a restart
MAX_PLACES = 4096  # remembered of one parent's candidates
MAX_PER_SEALER = 4  # manifests of one sealer for one round on one parent
JUDGED = 3  # contributions; of two nobody can say which claims too much
LARGEST_SHARE = 4.0  # of the lower median


@dataclass(eq=False)
class Link:
    """A manifest in the tree. `tokens` are its own, `total` includes its ancestors'."""

    digest: bytes
    parent: Link | None = field(repr=False)
    round: int
    tokens: int
    total: int
    order: tuple[int, bytes, bytes] = (0, b"", b"")
    signed: SignedRecord[Manifest] | None = field(default=None, repr=False)
    children: list[Link] = field(default_factory=list, repr=False)
    invalid: bool = False
    depth: int = 0
    seen_s: float = 0.0  # local time at which it came
    authors: frozenset[bytes] = frozenset()
    taken: frozenset[tuple[bytes, int]] = frozenset()  # (author, round) of its contributions
    blobs: frozenset[bytes] = frozenset()  # roots of its contributions
    places: dict[tuple[int, bytes], tuple[int, bytes]] = field(default_factory=dict, repr=False)

    @property
    def size_bytes(self) -> int:
        """The length of the manifest."""
        return len(self.signed.bytes) if self.signed is not None else 0

    def __post_init__(self) -> None:
        """Work out what is asked for often."""
        if self.signed is not None:
            self.taken = frozenset((c.public, c.record.round) for c in self.signed.contributions)
            self.authors = frozenset(author for author, _ in self.taken)
            self.blobs = frozenset(c.record.blob.root for c in self.signed.contributions)


@dataclass(frozen=True)
class Part:
    """One contribution of a manifest, its share (tokens * age factor) and its rung's gain for so many peers.

    Its weight is gain * share over the shares of all that the screen of the fold keeps.
    """

    announcement: SignedRecord[Announcement]
    share: float
    gain: float


def genesis_digest(swarm_id: str) -> bytes:
    """The digest that stands for the state before the first manifest."""
    return digest("genesis", swarm_id.encode())


def candidate_order(parent: Link, round_: int, public: bytes) -> tuple[int, bytes]:
    """A peer's place among the candidates to seal a round on `parent`: its contributors first, then by hash."""
    found = parent.places.get((round_, public))
    if found is None:
        if len(parent.places) >= MAX_PLACES:
            parent.places.clear()  # somebody has many keys
        place = digest("sealer", parent.digest, round_.to_bytes(8, "little"), public)
        found = parent.places[(round_, public)] = (0 if public in parent.authors else 1, place)
    return found


def _find_flood(signed: SignedRecord[Manifest], parent: Link) -> str:
    """Why a manifest is one too many of its sealer's, or ''. An honest one signs one, two when it restarts."""
    own = [c for c in parent.children if c.signed is not None and c.signed.public == signed.public]
    same = sum(c.round == signed.record.round for c in own)
    return "its sealer has signed others for this round" if same >= MAX_PER_SEALER else ""


class Chain:
    """The tree of known manifests, kept `keep` links deep below the head."""

    def __init__(self, spec: SwarmSpec, keep: int = 512) -> None:
        self.spec = spec
        self.keep = keep
        self.genesis = Link(genesis_digest(spec.swarm_id), None, -1, 0, 0)
        self.links: dict[bytes, Link] = {self.genesis.digest: self.genesis}
        self.root = self.genesis
        self.size_bytes = 0  # of the manifests known
        self.version = 0  # grows with every change, for caches

    def get(self, digest_: bytes) -> Link | None:
        """The link of a manifest, if known."""
        return self.links.get(digest_)

    def insert(self, signed: SignedRecord[Manifest], as_floor: bool = False) -> tuple[Link | None, str]:
        """Add a manifest whose parent is known. Returns the link, or None and the reason.

        `as_floor` accepts one with an unknown parent directly under the root: the answerer keeps no older ones.
        """
        if signed.digest in self.links:
            return self.links[signed.digest], "known"
        manifest = signed.record
        parent = self.links.get(manifest.parent)
        if parent is None:
            if not as_floor:
                return None, "its parent is not known"
            most = self.spec.rounds.max_contributions * self.spec.caps.max_contribution_tokens
            if manifest.total_tokens > (manifest.round + 1) * most:
                return None, "its total of tokens is more than its rounds can have"
            parent = self.root
            tokens = manifest.total_tokens - parent.total
        else:
            reason = self.find_fault(signed, parent) or _find_flood(signed, parent)
            if reason:
                return None, reason
            tokens = manifest.total_tokens - parent.total
        order = (*candidate_order(parent, manifest.round, signed.public), signed.digest)
        link = Link(signed.digest, parent, manifest.round, tokens, manifest.total_tokens, order, signed)
        link.depth, link.invalid = parent.depth + 1, parent.invalid
        parent.children.append(link)
        self.links[signed.digest] = link
        self.size_bytes += link.size_bytes
        self.version += 1
        return link, "added"

    def find_fault(self, signed: SignedRecord[Manifest], parent: Link) -> str:
        """Why a manifest is invalid on `parent`, or '': a function of the manifest, the spec and the chain alone."""
        manifest, parts = signed.record, signed.contributions
        if manifest.swarm != self.spec.swarm_id:
            return "it is of another swarm"
        if manifest.round <= parent.round:
            return "its round is not after its parent's"
        if len(parts) > self.spec.rounds.max_contributions:
            return "it has more contributions than the spec allows"
        if manifest.total_tokens != parent.total + sum(p.record.tokens for p in parts):
            return "its total of tokens does not add up"
        if not self.admits(signed.public):
            return "its sealer is not admitted"
        for part in parts:
            reason = self.find_contribution_fault(part, parent, manifest.round)
            if reason:
                return reason
        if len(parts) > 1 and any(self.spec.codec.rungs[p.record.rung].lone_only for p in parts):
            return "it has a contribution that only a lone peer may make"
        if len({p.record.blob.root for p in parts}) < len(parts):
            return "it has one blob twice"
        majority = majority_state(parts, parent.digest)
        if majority is not None and majority != manifest.parent_state:
            return "its sealer's state differs from the majority of its contributors'"
        return ""

    def find_contribution_fault(self, part: SignedRecord[Announcement], parent: Link, round_: int) -> str:
        """Why a contribution can't be in a manifest of `round_` on `parent`, or ''."""
        a, spec = part.record, self.spec
        if a.swarm != spec.swarm_id or not self.admits(part.public):
            return "a contribution's author is not admitted"
        if not round_ - 1 <= a.round <= round_:
            return "a contribution is of another round"
        if self.age(a.base, parent) is None:
            return "a contribution has an older base"
        if a.tokens > spec.caps.max_contribution_tokens or a.blob.size_bytes > spec.caps.max_blob_bytes:
            return "a contribution is over the spec's caps"
        if a.rung >= len(spec.codec.rungs):
            return "a contribution has a rung that the spec lacks"
        if (part.public, a.round) in parent.taken:
            return "a contribution is in the parent already"
        if a.blob.root in parent.blobs:
            return "a contribution's blob is in the parent already"
        return ""

    def admits(self, public: bytes) -> bool:
        """Whether a key may contribute and seal."""
        return self.spec.admission.open or public in self.spec.admission.keys

    @staticmethod
    def age(base: bytes, parent: Link) -> int | None:
        """0 when a contribution was trained from `parent`, 1 from the one before, else None."""
        if base == parent.digest:
            return 0
        if parent.signed is not None and base == parent.signed.record.parent:
            return 1
        return None

    def parts(self, link: Link) -> tuple[Part, ...]:
        """The contributions of a link that have a share, authors sorted.

        Of JUDGED or more, none has more than LARGEST_SHARE times the lower median: tokens are claims, and one claim
        must not outweigh all others.
        """
        if link.signed is None or link.parent is None:
            return ()
        shared: list[tuple[SignedRecord[Announcement], float]] = []
        for part in link.signed.contributions:
            factor = 1.0 if part.record.base == link.signed.record.parent else self.spec.outer.age_factor
            share = float(part.record.tokens) * factor
            if share > 0.0:
                shared.append((part, share))
        if len(shared) >= JUDGED:
            cap = LARGEST_SHARE * sorted(share for _, share in shared)[(len(shared) - 1) // 2]
            shared = [(part, min(share, cap)) for part, share in shared]
        peers, rungs = effective_peers([share for _, share in shared]), self.spec.codec.rungs
        return tuple(Part(part, share, scaled_gain(rungs[part.record.rung].gain, peers)) for part, share in shared)

    def best(self, usable: Callable[[Link], bool] | None = None, top: Link | None = None) -> Link:
        """The head among the valid manifests for which `usable` holds, with all their ancestors up to `top`."""
        here = top or self.root
        behind: dict[bytes, int] | None = None
        while True:
            ready = [c for c in here.children if not c.invalid and (usable is None or usable(c))]
            if not ready:
                return here
            if len(ready) == 1:
                here = ready[0]
                continue
            if behind is None:
                behind = _tokens_behind(here, usable)
            weights = behind
            here = min(ready, key=lambda c: _rank(c, weights))

    def path(self, ancestor: Link, link: Link) -> list[Link] | None:
        """The links after `ancestor` up to `link`, oldest first; None when `ancestor` is not one."""
        steps: list[Link] = []
        here: Link | None = link
        while here is not None and here is not ancestor:
            if here.depth <= ancestor.depth:
                return None
            steps.append(here)
            here = here.parent
        return None if here is None else steps[::-1]

    def locator(self, head: Link) -> tuple[bytes, ...]:
        """Digests from the head back, thinning out, ending with the root: where do our chains part?"""
        found: list[bytes] = []
        here: Link | None = head
        step = 1
        while here is not None and len(found) < 40:
            found.append(here.digest)
            step = step * 2 if len(found) > 8 else 1
            for _ in range(step):
                here = here.parent if here is not None else None
        if self.root.digest not in found:
            found.append(self.root.digest)
        return tuple(found)

    def after(self, locator: tuple[bytes, ...], head: Link) -> tuple[list[Link], bool]:
        """The links of `head`'s chain after the first locator entry on it, oldest first, and whether from the floor."""
        on_chain: dict[bytes, Link] = {}
        here: Link | None = head
        while here is not None:
            on_chain[here.digest] = here
            here = here.parent
        for known in locator:
            if known in on_chain:
                return self.path(on_chain[known], head) or [], False
        return self.path(self.root, head) or [], True

    def mark_invalid(self, link: Link) -> None:
        """A manifest with an invalid contribution is invalid, with all that builds on it."""
        stack = [link]
        while stack:
            here = stack.pop()
            here.invalid = True
            stack.extend(child for child in here.children if not child.invalid)
        self.version += 1

    def remove(self, link: Link) -> list[Link]:
        """Forget a manifest and all that builds on it; returns what went, the manifest first."""
        gone = [link]
        for here in gone:  # grows while it is walked
            gone.extend(here.children)
        if link.parent is not None:
            link.parent.children.remove(link)
        for here in gone:
            del self.links[here.digest]
            self.size_bytes -= here.size_bytes
        self.version += 1
        return gone

    def prune(self, head: Link) -> list[bytes]:
        """Forget what lies more than `keep` links or MAX_KEPT_BYTES behind the head; returns the digests that went."""
        new_root, size_bytes = head, head.size_bytes
        while (parent := new_root.parent) is not None and head.depth - new_root.depth < self.keep:
            size_bytes += parent.size_bytes
            if size_bytes > MAX_KEPT_BYTES:
                break
            new_root = parent
        if new_root is self.root:
            return []
        kept: dict[bytes, Link] = {}
        stack = [new_root]
        while stack:
            link = stack.pop()
            kept[link.digest] = link
            stack.extend(link.children)
        gone = [d for d in self.links if d not in kept]
        new_root.parent = None
        self.root, self.links = new_root, kept
        self.size_bytes = sum(link.size_bytes for link in kept.values())
        self.version += 1
        return gone


def majority_state(parts: tuple[SignedRecord[Announcement], ...], base: bytes) -> bytes | None:
    """The state digest that more than half of the tokens trained from `base` vouch for, if any."""
    votes: dict[bytes, int] = {}
    for part in parts:
        if part.record.base == base:
            votes[part.record.base_state] = votes.get(part.record.base_state, 0) + part.record.tokens
    total = sum(votes.values())
    for state, tokens in votes.items():
        if 2 * tokens > total:
            return state
    return None


def _rank(link: Link, behind: dict[bytes, int]) -> tuple[int, int, tuple[int, bytes, bytes]]:
    """A link's place among its siblings, the lowest first."""
    return (-behind[link.digest], link.round, link.order)


def _tokens_behind(top: Link, usable: Callable[[Link], bool] | None) -> dict[bytes, int]:
    """For every valid, usable link below `top`: the tokens on the chain that the rule follows below it, its own apart.

    Not on the heaviest one: a claim beside that chain would count for it without ever being followed and found empty.
    """
    order = [top]
    ready: dict[bytes, list[Link]] = {}
    for link in order:  # grows while it is walked: parents before children
        ready[link.digest] = [c for c in link.children if not c.invalid and (usable is None or usable(c))]
        order.extend(ready[link.digest])
    behind: dict[bytes, int] = {}
    for link in reversed(order):
        first = min(ready[link.digest], key=lambda c: _rank(c, behind), default=None)
        behind[link.digest] = first.tokens + behind[first.digest] if first is not None else 0
    return behind
