"""Seeded choices: the same for the same seed, and as even as dice should be."""

from __future__ import annotations

from collections import Counter

from tscale.protocol.dice import Dice


def test_the_published_sequence() -> None:
    """splitmix64 from seed 1234567, as its authors' code gives it."""
    dice = Dice(1234567)
    got = [dice.below(2**64) for _ in range(5)]
    assert got == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_equal_seeds_make_equal_choices_and_others_differ() -> None:
    def rolls(seed: int) -> list[int]:
        dice = Dice(seed)
        return [dice.below(1000) for _ in range(20)]

    assert rolls(7) == rolls(7) == rolls(7 + 2**64)
    assert rolls(7) != rolls(8)


def test_choices_are_even() -> None:
    dice = Dice(1)
    found = Counter(dice.choice("abcd") for _ in range(8000))
    assert set(found) == set("abcd")
    assert all(abs(count - 2000) < 200 for count in found.values())
    units = [dice.unit() for _ in range(8000)]
    assert min(units) >= 0.0 and max(units) < 1.0
    assert abs(sum(units) / len(units) - 0.5) < 0.02


def test_a_sample_has_different_items_and_no_more_than_there_are() -> None:
    dice = Dice(3)
    items = list(range(10))
    for _ in range(100):
        picked = dice.sample(items, 4)
        assert len(picked) == len(set(picked)) == 4 and set(picked) <= set(items)
    assert sorted(dice.sample(items, 50)) == items
    assert dice.sample([], 3) == [] and dice.sample(items, 0) == []
    assert items == list(range(10))
