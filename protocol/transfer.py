"""Fetching blobs by hash: which chunk to ask which peer for, and what to do with the answers.

A want is a blob this peer lacks. Its chunk hashes come first (a one-chunk blob needs none: the root is their hash),
then the chunks, each checked before it is stored. Wants with few holders go first; a holder that fails or lies is
left out for that blob for a while. What was stored before a restart is not fetched again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tscale.protocol.dice import Dice
from tscale.protocol.hashing import BlobRef, blob_root, chunk_hash

MAX_IN_FLIGHT = 8
MAX_PER_PEER = 2
MAX_HEDGES = 3
HEDGE_FLOOR_BPS = 2_000_000.0  # an answer slower than this is worth asking another holder, too
HOLDER_REST_S = 4.0


@dataclass
class Want:
    """A blob being fetched. Lower `priority` goes first. `flying` maps a chunk index (-1: the hashes) to its asks."""

    blob: BlobRef
    priority: int
    hashes: tuple[bytes, ...] | None = None
    have: set[int] = field(default_factory=set)
    flying: dict[int, list[tuple[float, bytes]]] = field(default_factory=dict)
    holders: set[bytes] = field(default_factory=set)
    resting: dict[bytes, float] = field(default_factory=dict)
    since_unix_s: float = 0.0

    def missing(self) -> list[int]:
        """Indices neither here nor on their way."""
        return [i for i in range(self.blob.chunks) if i not in self.have and i not in self.flying]

    def overdue(self, now: float, patience_s: float) -> list[int]:
        """Indices whose last ask is out for long, and that may be asked of another holder."""
        late_s = patience_s + 8.0 * min(self.blob.size_bytes, 1 << 20) / HEDGE_FLOOR_BPS
        return [i for i, asks in self.flying.items() if len(asks) < MAX_HEDGES and asks[-1][0] < now - late_s]


@dataclass(frozen=True)
class Ask:
    """One request to make: chunk `index` of `root` (-1: its chunk hashes) from `peer`."""

    root: bytes
    index: int
    peer: bytes


class Transfers:
    """All wants, and what is complete. `complete` maps roots to their chunk hashes (None when only the store knows)."""

    def __init__(self, patience_s: float = 1.0) -> None:
        self.patience_s = patience_s
        self.wants: dict[bytes, Want] = {}
        self.complete: dict[bytes, tuple[BlobRef, tuple[bytes, ...]]] = {}
        self.partial: dict[bytes, tuple[tuple[bytes, ...], set[int]]] = {}
        self.busy: dict[bytes, int] = {}
        self.index: dict[bytes, tuple[bytes, int]] = {}  # chunk hash -> where it lies, of complete multi-chunk blobs

    def add_complete(self, blob: BlobRef, hashes: tuple[bytes, ...]) -> None:
        """A blob lies whole in the store."""
        self.wants.pop(blob.root, None)
        self.partial.pop(blob.root, None)
        self.complete[blob.root] = (blob, hashes)
        if blob.chunks > 1:
            for i, item in enumerate(hashes):
                self.index[item] = (blob.root, i)

    def want(self, blob: BlobRef, priority: int, now: float) -> Want | None:
        """Start (or go on) fetching a blob; None when it is here."""
        if blob.root in self.complete:
            return None
        found = self.wants.get(blob.root)
        if found is None:
            found = self.wants[blob.root] = Want(blob, priority, since_unix_s=now)
            if blob.root in self.partial:
                hashes, have = self.partial.pop(blob.root)
                found.hashes, found.have = hashes, set(have)
        found.priority = min(found.priority, priority)
        return found

    def forget(self, root: bytes) -> None:
        """Drop a blob or a want."""
        self.wants.pop(root, None)
        self.partial.pop(root, None)
        gone = self.complete.pop(root, None)
        if gone is not None:
            for item in gone[1]:
                if self.index.get(item, (b"",))[0] == root:
                    del self.index[item]

    def schedule(self, dice: Dice, now: float, can_ask: Callable[[bytes], int]) -> list[Ask]:
        """The requests to make now: by priority, then fewest holders; least busy holder first.

        `can_ask` ranks a peer: those of the highest rank above 0 are asked.
        """
        asks: list[Ask] = []
        flying = sum(len(asks) for w in self.wants.values() for asks in w.flying.values())
        if flying >= MAX_IN_FLIGHT:
            return asks
        order = sorted(self.wants.values(), key=lambda w: (w.priority, len(w.holders), w.blob.root))
        for want in order:
            if flying >= MAX_IN_FLIGHT:
                break
            while flying < MAX_IN_FLIGHT:
                index = self._next_index(want, dice, now)
                if index is None:
                    break
                asked = {p for _, p in want.flying.get(index, ())}
                peer = self._holder(want, dice, now, lambda p, asked=asked: 0 if p in asked else can_ask(p))  # type: ignore[misc]
                if peer is None:
                    break
                want.flying.setdefault(index, []).append((now, peer))
                self.busy[peer] = self.busy.get(peer, 0) + 1
                flying += 1
                asks.append(Ask(want.blob.root, index, peer))
        return asks

    def _next_index(self, want: Want, dice: Dice, now: float) -> int | None:
        if want.blob.chunks > 1 and want.hashes is None and -1 not in want.flying:
            return -1
        missing = want.missing() if want.blob.chunks == 1 or want.hashes is not None else []
        missing = missing or want.overdue(now, self.patience_s)
        return dice.choice(missing) if missing else None

    def _holder(self, want: Want, dice: Dice, now: float, can_ask: Callable[[bytes], int]) -> bytes | None:
        best: list[bytes] = []
        best_key = (1, -MAX_PER_PEER + 1)  # at least a peer of rank 1 with room for one more request
        for peer in sorted(want.holders):
            if want.resting.get(peer, 0.0) > now:
                continue
            key = (can_ask(peer), -self.busy.get(peer, 0))
            if key[1] <= -MAX_PER_PEER or key < best_key:
                continue
            if key > best_key:
                best, best_key = [], key
            best.append(peer)
        return dice.choice(best) if best else None

    def ended(self, ask: Ask, ok: bool, now: float) -> None:
        """A request came back. A failed holder rests for this blob."""
        self.busy[ask.peer] = max(0, self.busy.get(ask.peer, 0) - 1)
        want = self.wants.get(ask.root)
        if want is not None:
            left = [(at, p) for at, p in want.flying.get(ask.index, ()) if p != ask.peer]
            if left:
                want.flying[ask.index] = left
            else:
                want.flying.pop(ask.index, None)
            if not ok:
                want.resting[ask.peer] = now + HOLDER_REST_S

    def take_hashes(self, root: bytes, hashes: tuple[bytes, ...]) -> bool:
        """Accept a blob's chunk hashes if they give its root."""
        want = self.wants.get(root)
        if want is None or want.hashes is not None:
            return want is not None
        if len(hashes) != want.blob.chunks or blob_root(want.blob.size_bytes, hashes) != root:
            return False
        want.hashes = hashes
        return True

    def check_chunk(self, root: bytes, index: int, data: bytes) -> bool:
        """Whether the bytes are chunk `index` of a wanted blob whose hashes are known (or that has one chunk)."""
        want = self.wants.get(root)
        if want is None or not 0 <= index < want.blob.chunks or len(data) != want.blob.chunk_bytes(index):
            return False
        item = chunk_hash(data)
        if want.hashes is None:
            if want.blob.chunks != 1 or blob_root(want.blob.size_bytes, (item,)) != root:
                return False
            want.hashes = (item,)
            return True
        return want.hashes[index] == item

    def took_chunk(self, root: bytes, index: int) -> bool:
        """A chunk was stored; True when the blob is whole now."""
        want = self.wants.get(root)
        if want is None or want.hashes is None:
            return False
        want.have.add(index)
        if len(want.have) < want.blob.chunks:
            return False
        self.add_complete(want.blob, want.hashes)
        return True

    def local_copies(self, root: bytes) -> list[tuple[int, bytes, int]]:
        """(index, source root, source index) of missing chunks that lie in another stored blob."""
        want = self.wants.get(root)
        if want is None or want.hashes is None or want.blob.chunks < 2:
            return []
        found = []
        for i in want.missing():
            source = self.index.get(want.hashes[i])
            if source is not None:
                found.append((i, *source))
        return found
