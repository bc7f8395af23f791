"""Staying joined: dial the seeds until they answer, greet DHT neighbours, and notice when a seed comes back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tscale.node.transport.base import SeedStatus, TransportError
from tscale.protocol.addrs import PeerAddr

_LOG = logging.getLogger("tscale.transport")


@dataclass(frozen=True)
class JoinTimes:
    """When to try again. Shorter finds a returning seed sooner, longer spares a dead one.

    `first_s` doubles after each failed round up to `longest_s`; each wait is shortened by up to half at random, so
    that the peers of a swarm don't all come back at once. `check_s` is the pace while all seeds answer.
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    check_s: float = 20.0
    probe_timeout_s: float = 6.0
    dial_timeout_s: float = 15.0


@dataclass(frozen=True)
class JoinCalls:
    """What the keeper does to the network. `dial` raises TransportError; `meet_others` greets connected peers."""

    dial: Callable[[PeerAddr, float], Awaitable[None]]
    meet_others: Callable[[], Awaitable[None]]
    probe: Callable[[PeerAddr, float], Awaitable[None]] | None = None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class SeedKeeper:
    """Keeps this peer joined to its seeds; `run` never ends by itself."""

    def __init__(self, seeds: tuple[PeerAddr, ...], calls: JoinCalls, times: JoinTimes, rng: random.Random) -> None:
        self._status = {seed: SeedStatus(seed.text, False, "not tried yet") for seed in seeds}
        self._calls = calls
        self._probe = calls.probe or probe_tcp
        self._times = times
        self._rng = rng
        self._wait = _Wait(times)

    @property
    def status(self) -> tuple[SeedStatus, ...]:
        """The seeds in the order given."""
        return tuple(self._status.values())

    async def run(self) -> None:
        """Try, wait, try again, until cancelled."""
        while True:
            try:
                await self.try_once()
            except Exception:  # noqa: BLE001 - the boundary of this task: a fault in one round must not end the joining
                _LOG.exception("join_round_failed")
            self._wait.after(all(status.reachable for status in self.status))
            await self._calls.sleep(self._wait.seconds * self._rng.uniform(0.5, 1.0))

    async def try_once(self) -> None:
        """Dial every seed at once, then greet whoever is connected."""
        tries = [asyncio.create_task(self._try_seed(seed)) for seed in self._status]
        try:
            await asyncio.gather(*tries)
        finally:
            for task in tries:
                task.cancel()
        await self._calls.meet_others()

    async def _try_seed(self, seed: PeerAddr) -> None:
        before = self._status[seed]
        try:
            # a plain connection first: each failed dial of p2pd makes it wait longer before it dials again, in the
            # end five minutes, and a seed that comes back would be found that late
            if not before.reachable:
                await self._probe(seed, self._times.probe_timeout_s)
            await self._calls.dial(seed, self._times.dial_timeout_s)
            after = SeedStatus(seed.text, True)
        except TransportError as error:
            after = SeedStatus(seed.text, False, str(error))
        self._status[seed] = after
        if (before.reachable, before.problem) != (after.reachable, after.problem):
            _LOG.info("seed addr=%s reachable=%s problem=%s", seed.text, after.reachable, after.problem or "-")


@dataclass
class _Wait:
    times: JoinTimes
    seconds: float = field(default=0.0)

    def after(self, all_reachable: bool) -> None:
        if all_reachable:
            self.seconds = self.times.check_s
            return
        # a seed lost after a long calm is retried from the start of the ladder
        grown = self.times.first_s if self.seconds in (0.0, self.times.check_s) else 2 * self.seconds
        self.seconds = min(self.times.longest_s, grown)


async def probe_any(addrs: tuple[PeerAddr, ...], timeout_s: float) -> None:
    """See whether one of the addresses accepts connections, all at once. Raises TransportError with the last reason."""
    tries = [asyncio.create_task(probe_tcp(addr, timeout_s)) for addr in addrs]
    reason = TransportError("no address of it is known")
    try:
        for attempt in asyncio.as_completed(tries):
            try:
                await attempt
            except TransportError as error:
                reason = error
                continue
            return
        raise reason
    finally:
        for task in tries:
            task.cancel()
        await asyncio.gather(*tries, return_exceptions=True)


async def probe_tcp(addr: PeerAddr, timeout_s: float) -> None:
    """See whether anything accepts connections at an address. Raises TransportError with the reason."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(addr.host, addr.port)
        writer.close()
    except TimeoutError as error:
        raise TransportError(f"its address does not answer within {timeout_s:g} s") from error
    except ConnectionRefusedError as error:
        raise TransportError("nobody listens at its address") from error
    except OSError as error:
        raise TransportError(f"its address can't be dialled ({error.strerror or type(error).__name__})") from error
