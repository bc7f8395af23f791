"""A bound on hivemind's own calls (the DHT's), which it takes from anybody without limit, and their byte count."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tscale.node.transport.base import Traffic
from tscale.node.transport.hivemind_parts import HivemindParts

MAX_CALLS = 64
MAX_CALLS_PER_PEER = 8


class UnaryGate:
    """Stands before the unary handlers of one hivemind control client. Over the limit a call is refused at once."""

    def __init__(self, parts: HivemindParts, p2p: Any, traffic: Traffic) -> None:
        self._messages = parts.messages
        self._control = p2p._client.control
        self._handle = self._control._handle_persistent_request
        self._call = self._control.call_unary_handler
        self._traffic = traffic
        self._running: Counter[bytes] = Counter()
        self._control._handle_persistent_request = self.handle
        self._control.call_unary_handler = self.call

    async def handle(self, call_id: Any, request: Any) -> None:
        """Serve an incoming call, or refuse it."""
        peer = bytes(request.peer)
        self._traffic.down_bytes += len(request.data)
        if self._running.total() >= MAX_CALLS or self._running[peer] >= MAX_CALLS_PER_PEER:
            refusal = self._messages.CallUnaryResponse(error=b"too many calls at once")
            message = self._messages.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=refusal)
            await self._control._pending_messages.put(message)
            self._control._handler_tasks.pop(call_id, None)
            return
        self._running[peer] += 1
        try:
            await self._handle(call_id, request)
        finally:
            self._running[peer] -= 1
            if self._running[peer] <= 0:
                del self._running[peer]
            # hivemind forgets to, for calls that are cancelled
            self._control._handler_tasks.pop(call_id, None)

    async def call(self, peer_id: Any, proto: str, data: bytes) -> bytes:
        """Make an outgoing call."""
        self._traffic.up_bytes += len(data)
        answer: bytes = await self._call(peer_id, proto, data)
        self._traffic.down_bytes += len(answer)
        return answer


async def close_p2p(p2p: Any) -> None:
    """Shut hivemind's P2P down and wait for its tasks, which it only cancels."""
    control = p2p._client.control
    tasks = [task for task in (p2p._listen_task, control._read_task, control._write_task) if task is not None]
    tasks += list(control._handler_tasks.values())
    for call in control._pending_calls.values():
        call.cancel()
    await p2p.shutdown()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
