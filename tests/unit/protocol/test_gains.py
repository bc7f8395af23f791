"""Gains by the number of peers."""

from math import sqrt

import pytest

from tscale.protocol.gains import effective_peers, scaled_gain


def test_equal_contributions_count_each_and_small_ones_hardly() -> None:
    assert effective_peers([7.0] * 8) == 8.0
    assert effective_peers([5.0]) == 1.0 == effective_peers([])
    assert 1.0 < effective_peers([1000.0, *[1.0] * 60]) < 1.2


def test_a_gain_is_that_of_eight_and_grows_with_the_root_of_their_number() -> None:
    assert scaled_gain(3.0, 8.0) == 3.0
    assert scaled_gain(4.0, 2.0) == 2.0
    assert scaled_gain(5.0, 16.0) == 5.0 * sqrt(2.0)


def test_it_stays_where_nothing_was_measured_and_is_no_less_than_a_mean() -> None:
    assert scaled_gain(5.0, 500.0) == scaled_gain(5.0, 16.0)
    assert scaled_gain(1.5, 1.0) == 1.0


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_a_mean_stays_a_mean_whoever_contributes(gain: float) -> None:
    assert {scaled_gain(gain, peers) for peers in (1.0, 3.0, 64.0)} == {gain}
