"""Fetching blobs by hash: which chunk to ask which peer for, and what to do with the answers.

A want is a blob this peer lacks. Its chunk hashes come first (a one-chunk blob needs none: the root is their hash),
then the chunks, each checked before it is stored. Wants with few holders go first; a holder that fails or lies is
left out for that blob for a while. Small blobs are asked for several at a time. What was stored before a restart is
not fetched again.

A root covers the size, so of several sizes that are announced with one root only one can be true. Each gets its want:
whoever lies about a size must not keep the blob from those who want it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tscale.protocol.dice import Dice
from tscale.protocol.hashing import CHUNK_BYTES, BlobRef, blob_root, chunk_hash

MAX_IN_FLIGHT = 8
MAX_PER_PEER = 2
MAX_HEDGES = 3  # asks for one chunk at a time
MAX_SMALL_HEDGES = 8  # for a blob so small that asking again costs next to nothing, and a round hangs on it
HEDGE_FLOOR_BPS = 2_000_000.0  # an answer slower than this is worth asking another holder, too
HOLDER_REST_S = 4.0
BATCH_BYTES = 128 * 1024  # of small blobs in one request: the round trip saved is worth more than the wait
MAX_BATCH = 32
MAX_DOUBTFUL = 4  # of the requests in flight, to peers that may never answer


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
    single: bool = False  # one chunk
    alone: bool = False  # an answer that it shared with others did not fit: it is asked for by itself
    refuted: bool = False  # the blob has another size: there is nothing to ask for
    since_s: float = 0.0  # local time of the want, and of the last chunk that came
    moved_s: float = 0.0

    def missing(self) -> list[int]:
        """Indices neither here nor on their way."""
        return [i for i in range(self.blob.chunks) if i not in self.have and i not in self.flying]

    def overdue(self, now: float, patience_s: float) -> list[int]:
        """Indices whose last ask is out for long, and that may be asked of another holder."""
        late_s = patience_s + 8.0 * min(self.blob.size_bytes, 1 << 20) / HEDGE_FLOOR_BPS
        most = MAX_SMALL_HEDGES if self.blob.size_bytes < BATCH_BYTES else MAX_HEDGES
        return [i for i, asks in self.flying.items() if len(asks) < most and asks[-1][0] < now - late_s]

    def next_index(self, dice: Dice, now: float, patience_s: float) -> int | None:
        """What to ask for next: the hashes (-1), a missing chunk, or one that is overdue."""
        if self.single and not self.flying:
            return 0
        if self.blob.chunks > 1 and self.hashes is None and -1 not in self.flying:
            return -1
        missing = self.missing() if self.blob.chunks == 1 or self.hashes is not None else []
        missing = missing or self.overdue(now, patience_s)
        return dice.choice(missing) if missing else None

    def is_stuck(self, now: float, patience_s: float, can_ask: Callable[[bytes], int]) -> bool:
        """Whether it waits for long and no known holder is likely to answer."""
        if self.refuted or self.since_s > now - patience_s or (self.flying and not self.overdue(now, patience_s)):
            return False
        asked = {p for asks in self.flying.values() for _, p in asks}
        return not any(p not in asked and self.resting.get(p, 0.0) <= now and can_ask(p) == 2 for p in self.holders)

    def is_open(self, late: float) -> bool:
        """Whether there may be something to ask for; `late` is when an ask that is out for long was made."""
        return not self.refuted and (not self.single or not self.flying or self.flying[0][-1][0] < late)

    def may_share(self, peer: bytes, now: float) -> bool:
        """Whether nothing of it is on its way, and this peer may be asked for it together with other blobs."""
        if not self.single or self.alone or self.flying:
            return False
        return peer in self.holders and self.resting.get(peer, 0.0) <= now


@dataclass(frozen=True)
class Ask:
    """One request to make: chunk `index` of a blob (-1: its chunk hashes) from `peer`.

    `more` are further blobs of one chunk that are asked for in the same request. `doubtful`: the peer may never answer.
    """

    blob: BlobRef
    index: int
    peer: bytes
    more: tuple[BlobRef, ...] = ()
    doubtful: bool = False


class Transfers:
    """All wants, and what is complete: `complete` maps roots to their reference (the true one) and chunk hashes.

    `spin` (0 to 255) turns the order of equal wants, so that peers don't all ask the same holder first.
    """

    def __init__(self, patience_s: float = 1.0, spin: int = 0) -> None:
        self.patience_s = patience_s
        self.spin = spin
        self.wants: dict[BlobRef, Want] = {}
        self.complete: dict[bytes, tuple[BlobRef, tuple[bytes, ...]]] = {}
        self.partial: dict[BlobRef, tuple[tuple[bytes, ...], set[int]]] = {}
        self.busy: dict[bytes, int] = {}
        self.in_flight = 0
        self.doubtful = 0  # of those
        self._sizes: dict[bytes, set[int]] = {}  # root -> the sizes that are wanted
        self.index: dict[bytes, tuple[bytes, int]] = {}  # chunk hash -> where it lies, of complete multi-chunk blobs

    def add_complete(self, blob: BlobRef, hashes: tuple[bytes, ...]) -> None:
        """A blob lies whole in the store. Wants of its root under other sizes end with it."""
        self._drop_wants(blob.root)
        self.partial.pop(blob, None)
        self.complete[blob.root] = (blob, hashes)
        if blob.chunks > 1:
            for i, item in enumerate(hashes):
                self.index[item] = (blob.root, i)

    def want(self, blob: BlobRef, priority: int, now: float) -> Want | None:
        """Start (or go on) fetching a blob; None when it is here, of whatever size."""
        if blob.root in self.complete:
            return None
        found = self.wants.get(blob)
        if found is None:
            found = self.wants[blob] = Want(blob, priority, single=blob.chunks == 1, since_s=now, moved_s=now)
            self._sizes.setdefault(blob.root, set()).add(blob.size_bytes)
            if blob in self.partial:
                hashes, have = self.partial.pop(blob)
                found.hashes, found.have = hashes, set(have)
        found.priority = min(found.priority, priority)
        return found

    def is_wanted(self, root: bytes) -> bool:
        """Whether a blob is being fetched, under whatever size."""
        return root in self._sizes

    def refute(self, blob: BlobRef) -> None:
        """Nobody can have a blob of this root and size: its root turned out to be that of another size."""
        want = self.wants.get(blob)
        if want is not None:
            want.refuted = True

    def _drop_wants(self, root: bytes) -> None:
        for size_bytes in self._sizes.pop(root, ()):
            del self.wants[BlobRef(root, size_bytes)]

    def forget(self, root: bytes) -> None:
        """Drop a blob, or what is wanted and half here of it."""
        for blob in [blob for blob in self.partial if blob.root == root]:
            del self.partial[blob]
        self._drop_wants(root)
        gone = self.complete.pop(root, None)
        if gone is not None:
            for item in gone[1]:
                if self.index.get(item, (b"",))[0] == root:
                    del self.index[item]

    # -- asking -------------------------------------------------------------------------------------------------

    def schedule(self, dice: Dice, now: float, can_ask: Callable[[bytes], int]) -> list[Ask]:
        """The requests to make now: by priority, then fewest holders; least busy holder first.

        `can_ask` ranks a peer: those of the highest rank above 0 are asked, few of rank 1 at a time.
        """
        asks: list[Ask] = []
        if self.in_flight >= MAX_IN_FLIGHT:
            return asks
        late = now - self.patience_s
        order = sorted((w for w in self.wants.values() if w.holders and w.is_open(late)), key=self._urgency)
        ranks = {peer: can_ask(peer) for want in order for peer in want.holders}
        for want in order:
            while self.in_flight < MAX_IN_FLIGHT:
                if max(map(ranks.__getitem__, want.holders)) < self._lowest_rank:
                    break
                index = want.next_index(dice, now, self.patience_s)
                found = None if index is None else self._holder(want, index, dice, now, ranks)
                if index is None or found is None:
                    break
                ask = Ask(want.blob, index, found[0], self._book(want, index, found[0], order, now), found[1] < 2)
                self.doubtful += ask.doubtful
                asks.append(ask)
            if self.in_flight >= MAX_IN_FLIGHT:
                break
        return asks

    def _urgency(self, want: Want) -> tuple[int, int, int, bytes]:
        root = want.blob.root
        return (want.priority, len(want.holders), root[0] ^ self.spin, root)

    def _book(self, want: Want, index: int, peer: bytes, order: list[Want], now: float) -> tuple[BlobRef, ...]:
        """Book a request, and return as many other small blobs of the same holder as fit into it."""
        want.flying.setdefault(index, []).append((now, peer))
        self.busy[peer] = self.busy.get(peer, 0) + 1
        self.in_flight += 1
        more: list[BlobRef] = []
        size_bytes = want.blob.size_bytes
        if want.single and not want.alone and size_bytes < BATCH_BYTES:
            roots = {want.blob.root}
            for other in order:
                if other.may_share(peer, now) and other.blob.root not in roots:
                    size_bytes += other.blob.size_bytes
                    if size_bytes > BATCH_BYTES or len(more) + 1 >= MAX_BATCH:
                        break
                    other.flying[0] = [(now, peer)]
                    roots.add(other.blob.root)
                    more.append(other.blob)
        return tuple(more)

    @property
    def _lowest_rank(self) -> int:
        return 1 if self.doubtful < MAX_DOUBTFUL else 2

    def _holder(
        self, want: Want, index: int, dice: Dice, now: float, ranks: dict[bytes, int]
    ) -> tuple[bytes, int] | None:
        """A peer to ask, and its rank."""
        asked = {p for _, p in want.flying.get(index, ())}
        best: list[bytes] = []
        best_key = (self._lowest_rank, -MAX_PER_PEER + 1)  # with room for one more request
        for peer in sorted(want.holders):
            if peer in asked or want.resting.get(peer, 0.0) > now:
                continue
            busy = self.busy.get(peer, 0)
            if busy >= MAX_PER_PEER:
                continue
            key = (ranks[peer], -busy)
            if key < best_key:
                continue
            if key > best_key:
                best, best_key = [], key
            best.append(peer)
        return (dice.choice(best), best_key[0]) if best else None

    def ended(self, ask: Ask, ok: bool, now: float, lacking: Iterable[BlobRef] = ()) -> None:
        """A request came back. A failed holder rests for the blob; of a batch, for those it was `lacking`."""
        self.in_flight = max(0, self.in_flight - 1)
        self.doubtful = max(0, self.doubtful - ask.doubtful)
        left_busy = self.busy.pop(ask.peer, 0) - 1
        if left_busy > 0:
            self.busy[ask.peer] = left_busy
        bad = set(lacking)
        for blob, index in ((ask.blob, ask.index), *((other, 0) for other in ask.more)):
            want = self.wants.get(blob)
            if want is None:
                continue
            left = [(at, p) for at, p in want.flying.get(index, ()) if p != ask.peer]
            if left:
                want.flying[index] = left
            else:
                want.flying.pop(index, None)
            if not ok or blob in bad:
                want.resting[ask.peer] = now + HOLDER_REST_S

    # -- taking -------------------------------------------------------------------------------------------------

    def take_hashes(self, blob: BlobRef, hashes: tuple[bytes, ...]) -> bool:
        """Accept a wanted blob's chunk hashes if they give its root."""
        want = self.wants.get(blob)
        if want is None:
            return False
        if want.hashes is not None:
            return want.hashes == hashes
        if len(hashes) != blob.chunks or blob_root(blob.size_bytes, hashes) != blob.root:
            return False
        want.hashes = hashes
        return True

    def check_chunk(self, blob: BlobRef, index: int, data: bytes) -> bool:
        """Whether the bytes are chunk `index` of a wanted blob whose hashes are known (or that has one chunk)."""
        want = self.wants.get(blob)
        if want is None or not 0 <= index < blob.chunks or len(data) != blob.chunk_bytes(index):
            return False
        item = chunk_hash(data)
        if want.hashes is None:
            if blob.chunks != 1 or blob_root(blob.size_bytes, (item,)) != blob.root:
                return False
            want.hashes = (item,)
            return True
        return want.hashes[index] == item

    def took_chunk(self, blob: BlobRef, index: int, now: float = 0.0) -> bool:
        """A chunk was stored; True when the blob is whole now."""
        want = self.wants.get(blob)
        if want is None or want.hashes is None:
            return False
        want.moved_s = max(want.moved_s, now)
        want.have.add(index)
        if len(want.have) < blob.chunks:
            return False
        self.add_complete(blob, want.hashes)
        return True

    def is_same(self, blob: BlobRef, hashes: tuple[bytes, ...], index: int, data: bytes) -> bool:
        """Whether a blob is here under this size and these hashes, and the bytes are its chunk `index`."""
        if self.complete.get(blob.root) != (blob, hashes) or not index < blob.chunks:
            return False
        return chunk_hash(data) == hashes[index]

    def local_copies(self, blob: BlobRef) -> list[tuple[int, bytes, int]]:
        """(index, source root, source index) of missing chunks that lie in another stored blob."""
        want = self.wants.get(blob)
        if want is None or want.hashes is None or blob.chunks < 2:
            return []
        found = []
        for i in want.missing():
            source = self.index.get(want.hashes[i])
            if source is not None:
                found.append((i, *source))
        return found


def single_chunk_size_bytes(root: bytes, data: bytes) -> int | None:
    """The size of the blob of this root if the bytes are all of it, 0 if they can't even begin it, None if unknown.

    Less than a whole chunk at the start of a blob is all of it, or not its start.
    """
    if data and blob_root(len(data), (chunk_hash(data),)) == root:
        return len(data)
    return None if len(data) == CHUNK_BYTES else 0
