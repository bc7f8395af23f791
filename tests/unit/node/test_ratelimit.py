"""The byte limit: any second carries at most 1.2 times the rate, and in the long run no more than the rate."""

from __future__ import annotations

import asyncio

import pytest

from tscale.node.ratelimit import PIECE_BYTES, RateLimiter, TokenBucket


class VirtualTime:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def read(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)  # the others come to the queue meanwhile


def _send(limiter: RateLimiter, clock: VirtualTime, total_bytes: int, idle_s: float = 0.0) -> list[tuple[float, int]]:
    """Send in pieces as the transport does; returns (time, bytes) of each piece."""
    sent: list[tuple[float, int]] = []

    async def run() -> None:
        left = total_bytes
        while left:
            piece = min(left, limiter.bucket.piece_bytes())
            await limiter.spend(piece)
            sent.append((clock.now_s, piece))
            left -= piece
            clock.now_s += idle_s

    asyncio.run(run())
    return sent


def _busiest_second(sent: list[tuple[float, int]]) -> int:
    return max(sum(size for at, size in sent if start <= at < start + 1.0) for start, _ in sent)


@pytest.mark.parametrize("rate_bps", [40_000.0, 1_000.0, 3_000_000.0])
def test_every_second_is_near_the_rate(rate_bps: float) -> None:
    clock = VirtualTime()
    limiter = RateLimiter(TokenBucket(rate_bps), clock.read, clock.sleep)
    sent = _send(limiter, clock, int(6 * rate_bps))
    assert _busiest_second(sent) <= 1.2 * rate_bps
    assert 5.7 <= sent[-1][0] - 1000.0 <= 6.1


def test_a_pause_saves_up_no_more_than_a_tenth_of_a_second() -> None:
    clock = VirtualTime()
    limiter = RateLimiter(TokenBucket(40_000.0), clock.read, clock.sleep)
    _send(limiter, clock, 40_000)
    clock.now_s += 3600.0
    assert _busiest_second(_send(limiter, clock, 80_000)) <= 48_000


def test_transfers_side_by_side_share_one_limit() -> None:
    clock = VirtualTime()
    limiter = RateLimiter(TokenBucket(40_000.0), clock.read, clock.sleep)
    sent: list[tuple[float, int]] = []

    async def transfer() -> None:
        for _ in range(20):
            await limiter.spend(4_000)
            sent.append((clock.now_s, 4_000))

    async def run() -> None:
        await asyncio.gather(*(transfer() for _ in range(3)))

    asyncio.run(run())
    assert _busiest_second(sent) <= 48_000
    assert sent[-1][0] - 1000.0 == pytest.approx(240_000 / 40_000, abs=0.2)


def test_small_frames_pass_ahead_of_blobs_that_wait_already() -> None:
    clock = VirtualTime()
    limiter = RateLimiter(TokenBucket(2_000.0), clock.read, clock.sleep)
    ended: dict[str, float] = {}

    async def send(name: str, pieces: int, bulk: bool) -> None:
        for _ in range(pieces):
            await limiter.spend(200, bulk)
            await asyncio.sleep(0)
        ended[name] = clock.now_s - 1000.0

    async def run() -> None:
        blobs = [asyncio.create_task(send(f"blob {i}", 45, True)) for i in range(3)]
        await asyncio.sleep(0)
        await asyncio.gather(send("gossip", 4, False), *blobs)

    asyncio.run(run())
    assert ended["gossip"] < 1.2, "800 bytes take 0.4 s; 27 kB of blobs are in front"
    assert max(ended.values()) == pytest.approx(27_800 / 2_000, abs=0.2)


def test_who_gives_up_in_the_queue_neither_keeps_nor_loses_the_turn() -> None:
    async def run() -> list[int]:
        gate, passed = asyncio.Event(), list[int]()

        async def wait(seconds: float) -> None:
            await gate.wait()

        limiter = RateLimiter(TokenBucket(1_000.0), lambda: 0.0, wait)

        async def send(number: int) -> None:
            await limiter.spend(1_000)
            passed.append(number)
            if number == 0:
                tasks[2].cancel()  # it has just been given the turn

        tasks = [asyncio.create_task(send(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        gate.set()
        async with asyncio.timeout(10.0):
            await asyncio.gather(*tasks, return_exceptions=True)
            await send(4)
        return passed

    assert asyncio.run(run()) == [0, 3, 4]


def test_no_limit_never_waits_and_a_new_limit_counts_at_once() -> None:
    clock = VirtualTime()
    limiter = RateLimiter(TokenBucket(None), clock.read, clock.sleep)
    assert not limiter.limited and limiter.bucket.piece_bytes() == PIECE_BYTES
    _send(limiter, clock, 10_000_000)
    assert clock.now_s == 1000.0
    limiter.set_rate(10_000.0)
    _send(limiter, clock, 20_000)
    assert clock.now_s == pytest.approx(1002.0, abs=0.11)
    limiter.set_rate(None)
    _send(limiter, clock, 10_000_000)
    assert clock.now_s == pytest.approx(1002.0, abs=0.11)


def test_a_clock_that_goes_backwards_neither_grants_nor_blocks() -> None:
    bucket = TokenBucket(1000.0)
    assert bucket.take(0, 500.0) == 0.0
    assert bucket.take(100, 400.0) == pytest.approx(0.1)
    assert bucket.take(100, 400.1) == pytest.approx(0.1)


@pytest.mark.parametrize("rate_bps", [0.0, -5.0])
def test_a_rate_that_would_never_end_is_refused(rate_bps: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        TokenBucket(None).set_rate(rate_bps, 0.0)
