"""Answering other peers: every request gets a reply, whatever is in it, and nothing it says is believed unchecked."""

from __future__ import annotations

from collections.abc import Callable

from tscale.protocol.effects import ChunkSource
from tscale.protocol.errors import RefuseFrame
from tscale.protocol.messages import (
    RECORDS_BUDGET_BYTES,
    Ack,
    ChainReply,
    ChunkReply,
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

    def answer(self, peer: bytes, frame: bytes, take_pushed: TakePushed) -> tuple[Message, ChunkSource | None]:
        """The reply, and the chunk that goes with it."""
        contact = self.view.members.contact(peer)
        if contact.strikes > MAX_STRIKES:
            return Refused("too many malformed frames from this peer"), None
        try:
            envelope = decode(frame)
            if envelope.swarm != self.view.spec.swarm_id:
                return Refused("another swarm"), None
            return self._reply(peer, envelope.message, envelope.bulk, take_pushed)
        except RefuseFrame as error:
            contact.strikes += 1
            return Refused(str(error)[:200]), None

    def _reply(
        self, peer: bytes, message: Message, bulk: bytes, take_pushed: TakePushed
    ) -> tuple[Message, ChunkSource | None]:
        if isinstance(message, Gossip):
            return self.spread.answer_gossip(peer, message), None
        if isinstance(message, Push):
            return self.spread.answer_push(peer, message), None
        if isinstance(message, GetChunk):
            return self._chunk(message)
        if isinstance(message, GetHashes):
            return self._hashes(message), None
        if isinstance(message, PutChunk):
            return (Ack() if take_pushed(peer, message, bulk) else Refused("not wanted here")), None
        if isinstance(message, GetChain):
            return self._chain(message), None
        if isinstance(message, GetSpec):
            return SpecReply(self.view.spec.to_bytes()), None
        return Refused("a reply is not a request"), None

    def _chunk(self, message: GetChunk) -> tuple[Message, ChunkSource | None]:
        found = self.view.transfers.complete.get(message.root)
        if found is None or message.index >= found[0].chunks:
            return Refused("not here"), None
        return ChunkReply(message.root, message.index), ChunkSource(message.root, message.index)

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
