"""The swarm's clock: which round it is, and an offset that no single peer can move far."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tscale.protocol.clock import MAX_ROUND_TRIP_S, MAX_SAMPLES, RoundTimes, SwarmClock

FIXED = settings(derandomize=True, deadline=None, database=None)
TIMES = RoundTimes(t0_unix_s=1000.0, length_s=12.0)


def peer(number: int) -> bytes:
    return number.to_bytes(32, "little")


@pytest.mark.parametrize(
    ("at", "round_"), [(999.9, -1), (1000.0, 0), (1011.999, 0), (1012.0, 1), (988.0, -1), (987.9, -2)]
)
def test_a_round_holds_its_start_and_not_its_end(at: float, round_: int) -> None:
    assert TIMES.round_at(at) == round_


@FIXED
@given(st.integers(-1000, 10**9))
def test_boxes_touch(round_: int) -> None:
    assert TIMES.closes_unix_s(round_) == TIMES.opens_unix_s(round_ + 1)
    assert TIMES.round_at(TIMES.opens_unix_s(round_)) == round_


def test_the_offset_is_the_median_with_this_clock_as_one_of_the_samples() -> None:
    clock = SwarmClock()
    clock.observe(peer(1), 1010.0, 1000.0, 1000.0)
    assert clock.offset_s == 5.0  # between its own 0 and the other's 10
    clock.observe(peer(2), 1012.0, 1000.0, 1000.0)
    assert clock.offset_s == 10.0
    assert clock.swarm_unix_s(2000.0) == 2010.0


def test_the_middle_of_the_round_trip_is_what_the_other_clock_is_compared_with() -> None:
    clock = SwarmClock()
    clock.observe(peer(1), 1002.0, 1000.0, 1004.0)
    assert clock.samples[peer(1)] == 0.0


@pytest.mark.parametrize(("apart", "counts"), [(2.5, 0.6), (-2.5, -0.6), (1.9, 0.0), (-1.9, 0.0)])
def test_what_a_slow_uplink_explains_is_no_difference_of_clocks(apart: float, counts: float) -> None:
    clock = SwarmClock()
    for number in range(1, 4):
        clock.observe(peer(number), 1002.0 + apart, 1000.0, 1004.0)
    assert clock.offset_s == pytest.approx(counts)


def test_a_slow_answer_does_not_replace_a_quick_one_until_that_is_old() -> None:
    clock = SwarmClock()
    clock.observe(peer(1), 1001.0, 1000.0, 1000.0)
    clock.observe(peer(1), 1017.0, 1010.0, 1014.0)
    assert clock.samples[peer(1)] == 1.0
    clock.observe(peer(1), 1015.5, 1015.0, 1015.04)
    assert clock.samples[peer(1)] == pytest.approx(0.48)
    clock.observe(peer(1), 1105.0, 1100.0, 1104.0)
    assert clock.samples[peer(1)] == pytest.approx(1.1)


@pytest.mark.parametrize("received", [999.0, 1000.0 + MAX_ROUND_TRIP_S + 0.1])
def test_a_slow_or_impossible_round_trip_says_nothing(received: float) -> None:
    clock = SwarmClock()
    clock.observe(peer(1), 5000.0, 1000.0, received)
    assert clock.samples == {} and clock.offset_s == 0.0


@FIXED
@given(
    honest=st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=20),
    lies=st.lists(st.floats(-1e9, 1e9), max_size=20),
)
def test_fewer_liars_than_honest_clocks_cannot_move_it(honest: list[float], lies: list[float]) -> None:
    clock = SwarmClock()
    for i, offset in enumerate(honest):
        clock.observe(peer(i), 1000.0 + offset, 1000.0, 1000.0)
    for i, offset in enumerate(lies[: len(honest)]):
        clock.observe(peer(100 + i), 1e9 + offset, 1000.0, 1000.0)
    assert abs(clock.offset_s) <= 0.5 + 1e-9


def test_samples_are_bounded_and_the_oldest_goes() -> None:
    clock = SwarmClock()
    for i in range(MAX_SAMPLES + 10):
        clock.observe(peer(i), 1000.0, 1000.0, 1000.0)
    clock.observe(peer(20), 1000.0, 1000.0, 1000.0)
    assert len(clock.samples) == MAX_SAMPLES
    assert peer(9) not in clock.samples and peer(20) in clock.samples


def test_a_clock_that_is_far_off_is_told_by_how_much_and_which_way() -> None:
    clock = SwarmClock()
    assert clock.warning() is None
    for i in range(3):
        clock.observe(peer(i), 1000.0 + 7.25, 1000.0, 1000.0)
    assert "7.2 s behind the swarm's" in (clock.warning() or "")
    for i in range(3):
        clock.observe(peer(i), 1000.0 - 7.25, 1000.0, 1000.0)
    assert "7.2 s ahead of the swarm's" in (clock.warning() or "")
