"""Blobs on the move: asks holders for what is wanted, takes chunks that come, and pushes own contributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from tscale.protocol.effects import ChunkSource, DatasetReady, StoreChunk
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.hashing import CHUNK_BYTES, HASH_BYTES, BlobRef
from tscale.protocol.messages import (
    Ack,
    BlobsReply,
    ChunkReply,
    Envelope,
    GetBlobs,
    GetChunk,
    GetHashes,
    HashesReply,
    Message,
    PutChunk,
    split_hashes,
)
from tscale.protocol.records import Announcement, SignedRecord
from tscale.protocol.spread import Spread
from tscale.protocol.transfer import Ask, single_chunk_size_bytes
from tscale.protocol.view import View

PUSH_PEERS = 2
PUSH_AFTER_GOSSIPS = 0.5  # what few have asked for by then is pushed: nobody may be able to dial its author
PUSH_ROUNDS = 1  # after its close, a contribution may still be in the manifest after the next
MAX_GUESSES = 8  # wants in one go


@dataclass
class _Unpushed:
    """An own contribution, and who has asked for it."""

    signed: SignedRecord[Announcement]
    hashes: bytes
    due_s: float
    asked_by: set[bytes] = field(default_factory=set)


class Fetching:
    """The blob traffic of one peer. `on_whole(root)` is called for every blob that became complete."""

    def __init__(self, view: View, spread: Spread, on_whole: Callable[[bytes], None]) -> None:
        self.view = view
        self.spread = spread
        self.on_whole = on_whole
        self.on_hashes: Callable[[BlobRef], None] = lambda blob: None
        self._dataset_told = False
        self._guess_at = 0.0
        self._unpushed: _Unpushed | None = None
        self.undelivered_bytes = 0  # size of the last own contribution, when the uplink was too slow for it

    # -- asking -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Make the requests that have become possible, and push what nobody asks for."""
        view = self.view
        if self._unpushed is not None and view.now >= self._unpushed.due_s:
            self._push_unasked(self._unpushed)
        if not view.fetch_due:
            return
        view.fetch_due = False
        if view.transfers.wants:
            self._guess_holders()
            for ask in view.transfers.schedule(view.dice, view.now, self._can_ask):
                self._ask(ask)

    def _guess_holders(self) -> None:
        """A want whose known holders don't answer is asked of any living peer: most have it soon after a close."""
        view, patience_s = self.view, self.view.transfers.patience_s
        if view.now < self._guess_at:
            return
        self._guess_at = view.now + 0.25 * patience_s
        stuck = (w for w in view.transfers.wants.values() if w.is_stuck(view.now, patience_s, self._can_ask))
        for want in islice(stuck, MAX_GUESSES):
            want.holders.update(view.members.push_targets(view.dice, view.now, 1))

    def _can_ask(self, peer: bytes) -> int:
        """2 for a peer that answers, 1 for one that has been silent, 0 for one to leave alone for now."""
        contact = self.view.members.contacts.get(peer)
        if contact is None or contact.retry_unix_s > self.view.now:
            return 0
        if not self.view.members.is_ready(contact, self.view.now):
            return 1
        return 2 if self.view.members.is_alive(contact, self.view.swarm_now) else 1

    def _ask(self, ask: Ask) -> None:
        view = self.view
        if ask.more:
            self._ask_batch(ask)
            return

        def done(env: Envelope | None, reason: str) -> None:
            message = env.message if env is not None else None
            good = False
            if ask.index < 0 and isinstance(message, HashesReply) and message.root == ask.blob.root:
                good = view.transfers.take_hashes(ask.blob, split_hashes(message.hashes))
                self.on_hashes(ask.blob)
            elif isinstance(message, ChunkReply) and env is not None and message.root == ask.blob.root:
                good = self._take(ask.peer, ask.blob, ask.index, env.bulk)
            view.transfers.ended(ask, good, view.now)
            view.fetch_due = True

        root = ask.blob.root
        message = GetHashes(root) if ask.index < 0 else GetChunk(root, ask.index)
        view.request(ask.peer, message, done)

    def _ask_batch(self, ask: Ask) -> None:
        view = self.view
        blobs = {blob.root: blob for blob in (ask.blob, *ask.more)}

        def done(env: Envelope | None, reason: str) -> None:
            lacking = list(blobs.values())
            if env is not None and isinstance(env.message, BlobsReply):
                got = self._take_batch(ask.peer, env.message, env.bulk, blobs)
                lacking = [blob for blob in lacking if blob not in got]
            view.transfers.ended(ask, env is not None, view.now, lacking)
            view.fetch_due = True

        view.request(ask.peer, GetBlobs(b"".join(blobs)), done)

    def _take_batch(self, peer: bytes, reply: BlobsReply, bulk: bytes, blobs: dict[bytes, BlobRef]) -> set[BlobRef]:
        """Cut the bulk at the sizes that the wants name; everything is checked against its root as it is taken.

        Bytes that do not fit may be the fault of whoever announced a size: these blobs are then asked for one by one.
        """
        named = [reply.roots[i : i + HASH_BYTES] for i in range(0, len(reply.roots), HASH_BYTES)]
        if any(root not in blobs for root in named):
            self.view.members.contact(peer).strikes += 1
            return set()
        got, at = set(), 0
        for blob in (blobs[root] for root in named):
            data = bulk[at : at + blob.size_bytes]
            at += blob.size_bytes
            if self._is_needless(blob) or self.store(blob, 0, data):
                got.add(blob)
            else:
                self.view.transfers.wants[blob].alone = True
        return got

    # -- taking -------------------------------------------------------------------------------------------------

    def _is_needless(self, blob: BlobRef) -> bool:
        return self.view.holds(blob.root) or blob not in self.view.transfers.wants

    def _take(self, peer: bytes, blob: BlobRef, index: int, data: bytes) -> bool:
        """A chunk that was asked for. A wrong one counts against the peer, unless the announced size may be wrong."""
        transfers = self.view.transfers
        if self._is_needless(blob) or self.store(blob, index, data):
            return True
        proven = transfers.wants[blob].hashes is not None
        size_bytes = None if proven else single_chunk_size_bytes(blob.root, data)
        if size_bytes:
            transfers.refute(blob)
            self.store(BlobRef(blob.root, size_bytes), 0, data)
        elif proven or size_bytes == 0:
            self.view.members.contact(peer).strikes += 1
        return False

    def store(self, blob: BlobRef, index: int, data: bytes) -> bool:
        """Check a chunk of a wanted blob and keep it."""
        transfers = self.view.transfers
        if not transfers.check_chunk(blob, index, data):
            return False
        self.view.emit(StoreChunk(blob, index, data))
        if transfers.took_chunk(blob, index, self.view.now):
            self.on_whole(blob.root)
        return True

    def take_pushed(self, peer: bytes, message: PutChunk, data: bytes) -> bool:
        """A pushed chunk of a contribution; the announcement that comes with it is taken in first.

        Returns whether exactly this chunk is here now.
        """
        try:
            signed = self.view.config.open_record(message.record, (Announcement,))
            hashes = split_hashes(message.hashes)
        except RefuseFrame:
            self.view.members.contact(peer).strikes += 1
            return False
        self.spread.admit(signed, peer)
        blob, transfers = signed.record.blob, self.view.transfers
        if self.view.holds(blob.root):
            return transfers.is_same(blob, hashes, message.index, data)
        return transfers.take_hashes(blob, hashes) and self.store(blob, message.index, data)

    # -- pushing ------------------------------------------------------------------------------------------------

    def push_blob(self, signed: SignedRecord[Announcement], hashes: tuple[bytes, ...]) -> None:
        """See to it that an own contribution gets to a few peers, chunk by chunk when they don't ask for it."""
        due_s = self.view.now + PUSH_AFTER_GOSSIPS * self.view.pace.gossip_s
        self._unpushed = _Unpushed(signed, b"".join(hashes), due_s)

    def note_asked(self, peer: bytes, message: Message, chunks: tuple[ChunkSource, ...]) -> None:
        """A peer gets these chunks or hashes: what it can reach need not be pushed to it over the same uplink."""
        unpushed = self._unpushed
        if unpushed is None:
            return
        root = unpushed.signed.record.blob.root
        if any(chunk.root == root for chunk in chunks) or (isinstance(message, HashesReply) and message.root == root):
            unpushed.asked_by.add(peer)

    def _push_unasked(self, unpushed: _Unpushed) -> None:
        self._unpushed = None
        signed, view = unpushed.signed, self.view
        others = view.members.push_targets(view.dice, view.swarm_now, PUSH_PEERS + len(unpushed.asked_by))
        others = [peer for peer in others if peer not in unpushed.asked_by]
        for peer in others[: max(0, PUSH_PEERS - len(unpushed.asked_by))]:
            if not self.view.holds(signed.record.blob.root) or not self._may_push(signed, 0):
                return
            self._push_chunk(peer, signed, unpushed.hashes, 0)

    def _may_push(self, signed: SignedRecord[Announcement], index: int) -> bool:
        """Whether the chunk gets out in time, and while the contribution may still be in a manifest."""
        record, view, uplink = signed.record, self.view, self.spread.uplink
        size_bytes = _chunk_bytes(record.blob, index)
        ends = view.swarm_now + uplink.bulk_s(size_bytes)
        if uplink.is_slow and ends > view.times.closes_unix_s(record.round + PUSH_ROUNDS):
            return False
        return uplink.reserve(size_bytes, view.now)

    def can_deliver(self, blob: BlobRef) -> bool:
        """Whether an own contribution of this size gets out before it can be in no manifest any more."""
        uplink = self.spread.uplink
        if not uplink.is_slow:
            return True
        return uplink.fits(blob.size_bytes) and uplink.bulk_s(blob.size_bytes) <= PUSH_ROUNDS * self.view.times.length_s

    def may_serve(self, chunks: tuple[ChunkSource, ...]) -> bool:
        """Whether these chunks, which are here, reach the asker before it gives up."""
        held = self.view.transfers.complete
        size_bytes = sum(_chunk_bytes(held[chunk.root][0], chunk.index) for chunk in chunks)
        return not chunks or self.spread.uplink.reserve(size_bytes, self.view.now)

    def _push_chunk(self, peer: bytes, signed: SignedRecord[Announcement], hashes: bytes, index: int) -> None:
        blob = signed.record.blob

        def done(env: Envelope | None, reason: str) -> None:
            taken = env is not None and isinstance(env.message, Ack)
            if taken and index + 1 < blob.chunks and self.view.holds(blob.root) and self._may_push(signed, index + 1):
                self._push_chunk(peer, signed, hashes, index + 1)

        message = PutChunk(signed.bytes, hashes, index)
        self.view.request(peer, message, done, ChunkSource(blob.root, index))

    # -- dataset ------------------------------------------------------------------------------------------------

    def want_dataset(self) -> None:
        """Fetch the dataset's shards, and say so once when all are here."""
        view = self.view
        if self._dataset_told:
            return
        lacking = [shard for shard in view.spec.data.shards if not view.holds(shard.root)]
        for shard in lacking:
            view.want(shard, "dataset")
        if not lacking:
            self._dataset_told = True
            for shard in view.spec.data.shards:
                view.kinds[shard.root] = "dataset"
            view.emit(DatasetReady())


def _chunk_bytes(blob: BlobRef, index: int) -> int:
    return min(CHUNK_BYTES, blob.size_bytes - index * CHUNK_BYTES)
