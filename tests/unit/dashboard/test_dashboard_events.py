"""The live stream: one frame for all, the newest only for slow readers, a cap, heartbeats, an end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tscale.dashboard.events import HEARTBEAT, Broadcaster, event_frame


async def nothing_new() -> bytes | None:
    return None


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(limited())


async def opened(broadcaster: Broadcaster) -> AsyncIterator[bytes]:
    stream = broadcaster.stream()
    assert await anext(stream) == b"retry: 2000\n\n"
    return stream


def test_an_event_is_one_line_with_an_id() -> None:
    assert event_frame("a-1", b"{}") == b"id: a-1\nevent: view\ndata: {}\n\n"
    with pytest.raises(ValueError, match="one line"):
        event_frame("a-1", b"{\n}")


def test_a_new_reader_gets_the_newest_view_and_a_slow_one_only_the_newest() -> None:
    async def scenario() -> None:
        broadcaster = Broadcaster(nothing_new)
        broadcaster.publish(b"1")
        stream = await opened(broadcaster)
        assert b"data: 1\n" in await anext(stream)
        for data in (b"2", b"3", b"4"):
            broadcaster.publish(data)
        assert b"data: 4\n" in await anext(stream)
        assert broadcaster.clients == 1
        await stream.aclose()  # type: ignore[attr-defined]
        assert broadcaster.clients == 0

    run(scenario)


def test_ids_count_up_and_differ_between_two_starts() -> None:
    async def first_ids(broadcaster: Broadcaster) -> list[bytes]:
        ids = []
        stream = await opened(broadcaster)
        for data in (b"x", b"y"):
            broadcaster.publish(data)
            ids.append((await anext(stream)).splitlines()[0])
        await stream.aclose()  # type: ignore[attr-defined]
        return ids

    async def scenario() -> None:
        ids = [await first_ids(Broadcaster(nothing_new)) for _ in range(2)]
        assert [i[0].endswith(b"-1") and i[1].endswith(b"-2") for i in ids] == [True, True]
        assert ids[0] != ids[1]

    run(scenario)


def test_a_quiet_stream_gets_heartbeats() -> None:
    async def scenario() -> None:
        stream = await opened(Broadcaster(nothing_new, heartbeat_s=0.01))
        assert [await anext(stream), await anext(stream)] == [HEARTBEAT, HEARTBEAT]

    run(scenario)


def test_readers_are_capped_and_closing_ends_them_all() -> None:
    async def scenario() -> None:
        broadcaster = Broadcaster(nothing_new, max_clients=2)
        streams = [await opened(broadcaster) for _ in range(2)]
        assert broadcaster.full
        assert [frame async for frame in broadcaster.stream()] == []
        broadcaster.close()
        for stream in streams:
            assert [frame async for frame in stream] == []
        assert broadcaster.clients == 0
        assert [frame async for frame in broadcaster.stream()] == []

    run(scenario)


def test_one_producer_renders_for_everybody_and_outlives_a_failing_render() -> None:
    async def scenario() -> None:
        answers: list[bytes | None] = [b"one", None, b"two"]
        calls = 0

        async def render() -> bytes | None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("a bad tick")
            if not answers:
                broadcaster.close()
                return None
            return answers.pop(0)

        broadcaster = Broadcaster(render, tick_s=0.0)
        streams = [await opened(broadcaster) for _ in range(3)]
        await broadcaster.run()
        assert calls == 5
        for stream in streams:
            assert [frame async for frame in stream] == []
        late = Broadcaster(nothing_new)
        assert late.last_tick_mono_s is None
        assert broadcaster.last_tick_mono_s is not None

    run(scenario)
