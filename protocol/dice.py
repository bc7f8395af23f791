"""Seeded choices for the state machines: splitmix64, so that a whole swarm replays bit for bit from its seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1


class Dice:
    """A small deterministic generator (Steele et al. 2014, SplittableRandom). Not for keys or nonces."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def _next(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, bound: int) -> int:
        """An integer in [0, bound)."""
        return self._next() % bound

    def unit(self) -> float:
        """A float in [0, 1)."""
        return (self._next() >> 11) / (1 << 53)

    def choice(self, items: Sequence[T]) -> T:
        """One item of a non-empty sequence."""
        return items[self._next() % len(items)]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Up to `count` different items, in random order."""
        pool = list(items)
        picked: list[T] = []
        while pool and len(picked) < count:
            i = self._next() % len(pool)
            pool[i], pool[-1] = pool[-1], pool[i]
            picked.append(pool.pop())
        return picked
