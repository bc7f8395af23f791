"""Answering other peers: every request gets a reply, whatever is in it, and nothing it says is believed unchecked."""

from __future__ import annotations

from collections.abc import Callable

from tscale.protocol.effects import ChunkSource
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.hashing import CHUNK_BYTES
from tscale.protocol.messages import (
    RECORDS_BUDGET_BYTES,
    Ack,
    BlobsReply,
    ChainReply,
    ChunkReply,
    GetBlobs,
    GetChain,
    GetChunk,
    GetHashes,
    GetSpec,
    Gossip,
    HashesReply,
    Message,
    Push,
    PutChunk,
    Refused,
    SpecReply,
    decode,
    split_hashes,
)
from tscale.protocol.spread import Spread
from tscale.protocol.sync import Sync
from tscale.protocol.view import View

MAX_STRIKES = 16

TakePushed = Callable[[bytes, PutChunk, bytes], bool]


class Serve:
    """The answering side of a peer."""

    def __init__(self, view: View, spread: Spread, sync: Sync) -> None:
        self.view = view
        self.spread = spread
        self.sync = sync

    def answer(self, peer: bytes, frame: bytes, take_pushed: TakePushed) -> tuple[Message, tuple[ChunkSource, ...]]:
        """The reply, and the chunks that go with it."""
        contact = self.view.members.contact(peer)
        if contact.strikes > MAX_STRIKES:
            return Refused("too many malformed frames from this peer"), ()
        try:
            envelope = decode(frame)
            if envelope.swarm != self.view.spec.swarm_id:
                return Refused("another swarm"), ()
            return self._reply(peer, envelope.message, envelope.bulk, take_pushed)
        except RefuseFrame as error:
            contact.strikes += 1
            return Refused(str(error)[:200]), ()

    def _reply(
        self, peer: bytes, message: Message, bulk: bytes, take_pushed: TakePushed
    ) -> tuple[Message, tuple[ChunkSource, ...]]:
        if isinstance(message, GetChunk):
            return self._chunk(message)
        if isinstance(message, GetBlobs):
            return self._blobs(message)
        return self._record_reply(peer, message, bulk, take_pushed), ()

    def _record_reply(self, peer: bytes, message: Message, bulk: bytes, take_pushed: TakePushed) -> Message:
        if isinstance(message, Gossip):
            return self.spread.answer_gossip(peer, message)
        if isinstance(message, Push):
            return self.spread.answer_push(peer, message)
        if isinstance(message, GetHashes):
            return self._hashes(message)
        if isinstance(message, PutChunk):
            return Ack() if take_pushed(peer, message, bulk) else Refused("not wanted here")
        if isinstance(message, GetChain):
            return self._chain(message)
        if isinstance(message, GetSpec):
            return SpecReply(self.view.spec.to_bytes())
        return Refused("a reply is not a request")

    def _chunk(self, message: GetChunk) -> tuple[Message, tuple[ChunkSource, ...]]:
        found = self.view.transfers.complete.get(message.root)
        if found is None or message.index >= found[0].chunks:
            return Refused("not here"), ()
        return ChunkReply(message.root, message.index), (ChunkSource(message.root, message.index),)

    def _blobs(self, message: GetBlobs) -> tuple[Message, tuple[ChunkSource, ...]]:
        """Those of the asked blobs that are here and have one chunk, as many as one frame carries."""
        here: list[bytes] = []
        size_bytes = 0
        for root in dict.fromkeys(split_hashes(message.roots)):
            found = self.view.transfers.complete.get(root)
            if found is None or found[0].chunks != 1 or size_bytes + found[0].size_bytes > CHUNK_BYTES:
                continue
            size_bytes += found[0].size_bytes
            here.append(root)
        return BlobsReply(b"".join(here)), tuple(ChunkSource(root, 0) for root in here)

    def _hashes(self, message: GetHashes) -> Message:
        found = self.view.transfers.complete.get(message.root)
        if found is None:
            return Refused("not here")
        return HashesReply(message.root, b"".join(found[1]))

    def _chain(self, message: GetChain) -> Message:
        links, floor = self.view.chain.after(message.locator, self.sync.target())
        records: list[bytes] = []
        size = 0
        for link in links[:512]:
            data = link.signed.bytes if link.signed is not None else b""
            size += len(data) + 8
            if records and size > RECORDS_BUDGET_BYTES:
                break
            records.append(data)
        return ChainReply(tuple(records), floor)
