"""Executes a peer's effects: requests on the transport, chunks in the store, training in the worker."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tscale.node.blobs import BlobStore
from tscale.node.recordfile import RecordFile
from tscale.node.screening import Screening
from tscale.node.trainer import Trainer
from tscale.node.transport.base import Transport, TransportError
from tscale.protocol import effects as fx
from tscale.protocol import events as ev
from tscale.protocol.errors import RefuseFrame, SkipRound, StopNode
from tscale.protocol.messages import Refused, with_bulk
from tscale.protocol.peer import PeerMachine

_LOG = logging.getLogger("tscale.peer")
PUBLISH_EVERY_S = 30.0
CHECK_STORE_EVERY_S = 2.0
ROUNDS_FILE_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class DriverParts:
    """What the driver works with."""

    machine: PeerMachine
    transport: Transport
    store: BlobStore
    records: RecordFile
    rounds_file: Path
    on_fatal: Callable[[StopNode], None]
    on_notice: Callable[[str], None]
    now_unix_s: Callable[[], float] = time.time


class Driver:
    """The one place where the state machine meets the world. Everything runs in the event loop's thread."""

    def __init__(self, parts: DriverParts) -> None:
        self.machine = parts.machine
        self.parts = parts
        self.screening = Screening(parts.machine, parts.on_notice)
        self.trainer: Trainer | None = None
        self.on_dataset: Callable[[], None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._published_s = float("-inf")
        self._published_addrs: tuple[str, ...] = ()

    def feed(self, event: ev.Event) -> None:
        """Step the machine and do what it asks for."""
        self._run(self.machine.step(event, self.parts.now_unix_s()))
        if isinstance(event, ev.Folded):
            self._log_round(event)
            self.screening.take(event)

    async def answer(self, peer: bytes, payload: bytes) -> bytes:
        """The transport's handler: answer a peer's request."""
        reply, effects = self.machine.answer(peer, payload, self.parts.now_unix_s())
        frame = reply.payload
        for chunk in reply.chunks:
            data = self.parts.store.read_chunk(chunk.root, chunk.index)
            if data is None:
                frame = self.machine.view.frame(Refused("the chunk is not here any more"))
                self._soon_missing(chunk.root)
                break
            frame = with_bulk(frame, data)
        self._run(effects)
        return frame

    def blob_missing(self, root: bytes) -> None:
        """What should lie in the store does not: forget the rest of it too, so that all of it is fetched again."""
        self.parts.store.drop(root)
        self.feed(ev.BlobMissing(root))
        for shard in self.machine.view.spec.data.shards:
            if shard.root == root:
                self.machine.view.want(shard, "dataset")

    async def check_store(self) -> float:
        """Notice when somebody removes the store's files, before they are needed. Returns when to look again."""
        lost = self.parts.store.find_lost()
        for root in lost:
            self.blob_missing(root)
        if lost:
            self.parts.on_notice(f"files are gone from the blobs folder ({len(lost)}): what is needed is fetched again")
        return CHECK_STORE_EVERY_S

    def _soon_missing(self, root: bytes) -> None:
        # not now: the machine is in the middle of a step
        asyncio.get_running_loop().call_soon(self.blob_missing, root)

    async def close(self) -> None:
        """End all requests that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def settle(self, timeout_s: float) -> None:
        """Wait for the requests that are under way, a moment at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _run(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            try:
                self._execute(effect)
            except StopNode as error:
                self.parts.on_fatal(error)

    def _execute(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.Request):
            self._spawn(self._request(effect))
        elif isinstance(effect, (fx.StoreChunk, fx.CopyChunk)):
            self._store(effect)
        elif isinstance(effect, fx.DropBlob):
            self.parts.store.drop(effect.root)
        elif isinstance(effect, fx.KeepRecord):
            self.parts.records.append(effect.record)
        elif isinstance(effect, fx.LearnAddrs):
            self.parts.transport.learn_addrs(effect.peer, effect.addrs)
        elif isinstance(effect, fx.Publish):
            self._publish(effect)
        elif isinstance(effect, fx.Notice):
            _LOG.info("%s %s", effect.event, " ".join(f"{k}={v}" for k, v in effect.fields))
        elif isinstance(effect, fx.DatasetReady):
            if self.on_dataset is not None:
                self.on_dataset()
        elif self.trainer is not None:
            self.trainer.take(effect)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """The boundary of a request: a fault in one reply's handling must not end the node."""
        try:
            await coroutine
        except StopNode as error:
            self.parts.on_fatal(error)
        except Exception:  # noqa: BLE001 - see above
            _LOG.exception("request_failed")

    async def _request(self, effect: fx.Request) -> None:
        payload = effect.payload
        if effect.chunk is not None:
            data = self.parts.store.read_chunk(effect.chunk.root, effect.chunk.index)
            if data is None:
                self.feed(ev.RequestFailed(effect.token, "the chunk is not here any more"))
                self.blob_missing(effect.chunk.root)
                return
            payload = with_bulk(payload, data)
        try:
            reply = await self.parts.transport.request(effect.peer, payload, effect.timeout_s)
        except TransportError as error:
            self.feed(ev.RequestFailed(effect.token, str(error)))
        else:
            self.feed(ev.Replied(effect.token, reply))

    def _store(self, effect: fx.StoreChunk | fx.CopyChunk) -> None:
        if isinstance(effect, fx.StoreChunk):
            data: bytes | None = effect.data
        else:
            data = self.parts.store.read_chunk(effect.source.root, effect.source.index)
        try:
            if data is None:
                raise RefuseFrame("the source of a copy is gone")
            self.parts.store.put_chunk(effect.blob, effect.index, data)
        except (RefuseFrame, SkipRound) as error:
            _LOG.warning("chunk_not_stored root=%s reason=%s", effect.blob.root.hex()[:12], error)
            self._soon_missing(effect.blob.root)

    def _publish(self, effect: fx.Publish) -> None:
        """The directory gets a new record every half minute, or when the addresses changed."""
        now_s = asyncio.get_running_loop().time()
        addrs = self.machine.spread.addrs
        leaving = self.machine.spread.leaving
        if now_s - self._published_s < PUBLISH_EVERY_S and addrs == self._published_addrs and not leaving:
            return
        self._published_s, self._published_addrs = now_s, addrs
        self._spawn(self._publish_now(effect))

    async def _publish_now(self, effect: fx.Publish) -> None:
        try:
            await self.parts.transport.publish(effect.record, effect.expires_unix_s)
        except TransportError as error:
            self._published_s = float("-inf")
            _LOG.debug("not_published reason=%s", error)

    def _log_round(self, event: ev.Folded) -> None:
        """One line per fold in rounds.jsonl; a later line of the same round overrides."""
        link = self.machine.view.chain.get(event.manifest)
        if link is None or link.signed is None:
            return
        line = {
            "round": link.round,
            "manifest": link.digest.hex(),
            "state": event.state.hex(),
            "parent": link.signed.record.parent.hex(),
            "contributors": len(link.authors),
            "tokens_total": link.total,
            "unix_s": round(self.parts.now_unix_s(), 3),
        }
        path = self.parts.rounds_file
        try:
            if path.exists() and path.stat().st_size > ROUNDS_FILE_MAX_BYTES:
                path.replace(path.with_suffix(".old.jsonl"))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            _LOG.warning("rounds_file_not_written reason=%s", error)
