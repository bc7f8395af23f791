"""The screen: which contributions of a manifest go against the others, or are far too large, before they are folded.

A function of the contributions and their shares alone, in integers and correctly rounded operations, so that all peers
find the same. Fewer than THREE contributions are never judged: nobody can say which of two is wrong.

Direction. Every contribution votes with its share for the sign of each value it sends (sign voting: signSGD with
majority vote, arXiv 1810.05291). Over the values of contribution i, `agree` counts those whose sign is that of the
others' sum of votes, `against` those of the opposite one. The one with the lowest z = (agree - against) / sqrt(agree +
against) is left out when that is below -DEVIATIONS, and the rest is counted again without it: a dense one that is
wrong makes all sparse ones look wrong as long as it votes. In the last of PASSES all below go. When half of the shares
or more would be left out, nobody is: no majority can be told. One with less than 1/TINY of the median share is not
worth a pass, and is kept. So is one whose surplus, (against - agree) / (agree + against), is not over 1/MARGIN: over
millions of values four deviations are a hair's breadth, and another text than the others' is enough for that.

Size. n_i is the root of (sum of squares / share). Where three or more are kept, n_i above LARGEST times their median
(by shares, so that many small ones can't move it) has the weight multiplied by what brings it there. A contribution
that sends nothing has no size. Honest ones of one density were within 1.2 times the median, with steps up to ten to
one; one that is dense among sparse ones, or old among joiners, was up to 3 times it for some rounds.

Both parts look at what was sent, so neither sees values moved to other places, nor small changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import inf, isfinite, sqrt

import numpy as np

from tscale.kernels import fold
from tscale.kernels.codec import CHUNK, Decoded, Rung, encode, reference
from tscale.kernels.codec.implementation import chunk_coder
from tscale.kernels.fold import FoldPart, map_in_threads, open_parts
from tscale.kernels.layout import Layout, TensorSpec

THREE = 3
DEVIATIONS = 4
LARGEST = 2.0
TINY = 64
MARGIN = 64  # the stricter of the two where more than 16 * 64^2 = 65536 values are counted
PASSES = 8  # so that many wrong ones can't make a fold take forever
MAX_TOTAL = float(1 << 52)
"""Shares add up to less, so that sums of votes are exact in float64."""
Counter = Callable[[int], np.ndarray]
"""What a chunked tensor's votes say: int64 [A, 2], each contribution's values for and against the others."""
Count = Callable[[Sequence[int]], np.ndarray]
"""The same over all tensors, among the contributions at these places, in their order."""


@dataclass(frozen=True)
class Share:
    """One contribution, its share (tokens * age factor, more than 0) and its rung's gain."""

    blob: bytes | Decoded
    tokens: float
    gain: float


@dataclass(frozen=True)
class Verdict:
    """What the screen found of a contribution. `factor` is what its weight is multiplied by: 1.0, less, or 0.0 when it
    is left out. The others are 0 where nobody was judged."""

    factor: float = 1.0
    agree: int = 0
    against: int = 0
    size: float = 0.0

    @property
    def is_left_out(self) -> bool:
        """Whether it goes against the others."""
        return self.factor == 0.0

    @property
    def is_shrunk(self) -> bool:
        """Whether it is too large."""
        return 0.0 < self.factor < 1.0


@dataclass(frozen=True)
class Screened:
    """What is folded, in the order of the shares, and a verdict for every share."""

    parts: tuple[FoldPart, ...]
    verdicts: tuple[Verdict, ...]


def screen(shares: Sequence[Share], layout: Layout, threads: int = 1) -> Screened:
    """Judge the contributions of a manifest and give those that are kept their weights: gain * `mean_weights`.

    Memory: the decoded contributions, and for each thread some chunks of votes. Raises CodecError for a malformed
    contribution, ValueError for a share or a gain that can't be one.
    """
    return _screen(shares, layout, threads, "auto")


def screen_reference(shares: Sequence[Share], layout: Layout) -> Screened:
    """`screen` in plain numpy: the definition, and what runs where numba is missing (a tensor of votes at a time)."""
    return _screen(shares, layout, 1, "reference")


def _screen(shares: Sequence[Share], layout: Layout, threads: int, impl: str) -> Screened:
    _check(shares)
    opened = open_parts([FoldPart(share.blob, share.gain) for share in shares], layout, threads, impl)
    decoded = [part.blob for part in opened if isinstance(part.blob, Decoded)]
    verdicts = [Verdict() for _ in shares]
    if len(shares) >= THREE:
        votes = [max(1, round(share.tokens)) for share in shares]
        sums = map_in_threads(Decoded.sum_of_squares, decoded, threads)
        sizes = [sqrt(total / share.tokens) for total, share in zip(sums, shares, strict=True)]

        def count(places: Sequence[int]) -> np.ndarray:
            some = [decoded[place] for place in places], [votes[place] for place in places]
            return _count(*some, layout, threads, impl)

        verdicts = judge(votes, sizes, count)
    kept = [
        (blob, share, verdict.factor)
        for blob, share, verdict in zip(decoded, shares, verdicts, strict=True)
        if not verdict.is_left_out
    ]
    means = mean_weights([share.tokens for _, share, _ in kept])
    parts = [
        FoldPart(blob, share.gain * mean * factor) for (blob, share, factor), mean in zip(kept, means, strict=True)
    ]
    return Screened(tuple(parts), tuple(verdicts))


def mean_weights(shares: Sequence[float]) -> list[float]:
    """The weights of contributions in their mean: as the roots of their shares, 1/N for N equal ones.

    Who does twice the steps already sends about twice the progress. Weights as the shares would count its steps twice,
    so that the noise of the fast ones rules the mean; equal weights would let the smallest claim count in full. The
    scale is such that sum(weight * share) is what it is with weights as the shares, sum(share^2) / sum(share).
    """
    largest = max(shares, default=1.0)
    parts = [share / largest for share in shares]
    roots = [sqrt(part) for part in parts]
    total = squares = rooted = 0.0
    for part, root in zip(parts, roots, strict=True):
        total += part
        squares += part * part
        rooted += part * root
    return [root * (squares / (total * rooted)) for root in roots]


def judge(votes: Sequence[int], sizes: Sequence[float], count: Count) -> list[Verdict]:
    """The verdicts on three or more contributions, from their votes and sizes."""
    out, counts = _find_against(votes, count)
    kept = [(size, votes[place]) for place, size in enumerate(sizes) if size and place not in out]
    bound = LARGEST * _weighted_median(kept) if len(kept) >= THREE else inf
    factors = [0.0 if place in out else bound / size if size > bound else 1.0 for place, size in enumerate(sizes)]
    return [
        Verdict(factor, int(agree), int(against), size)
        for factor, (agree, against), size in zip(factors, counts, sizes, strict=True)
    ]


def _weighted_median(pairs: Sequence[tuple[float, int]]) -> float:
    """The least of the values at or below which half of the votes lie."""
    half, below = sum(vote for _, vote in pairs), 0
    for value, vote in sorted(pairs):
        below += vote
        if 2 * below >= half:
            return value
    raise ValueError("no values")


def _find_against(votes: Sequence[int], count: Count) -> tuple[set[int], np.ndarray]:
    """Who goes against the others, and the counts of all, those of the left out from when they were left out."""
    kept, out = list(range(len(votes))), set[int]()
    counts = first = count(kept)
    heavy = {place for place in kept if TINY * votes[place] >= sorted(votes)[(len(votes) - 1) // 2]}
    for turn in range(1, PASSES + 1):
        strengths = {place: _strength(*map(int, counts[place])) for place in kept if place in heavy}
        worst = max(strengths.values(), default=Fraction(0))
        if worst <= DEVIATIONS**2:
            break
        bar = DEVIATIONS**2 if turn == PASSES else worst
        out |= {place for place, strength in strengths.items() if strength >= bar and strength > DEVIATIONS**2}
        if 2 * sum(votes[place] for place in out) >= sum(votes):
            return set(), first
        kept = [place for place in kept if place not in out]
        if len(kept) < THREE or turn == PASSES:
            break
        counts = counts.copy()
        counts[kept] = count(kept)
    return out, counts


def _strength(agree: int, against: int) -> Fraction:
    """z squared where the surplus is over 1/MARGIN, else 0; exact, so that the same one is lowest everywhere."""
    surplus, counted = against - agree, agree + against
    return Fraction(surplus**2, counted) if MARGIN * surplus > counted else Fraction(0)


def _check(shares: Sequence[Share]) -> None:
    if not all(isfinite(share.tokens) and share.tokens > 0 and isfinite(share.gain) for share in shares):
        raise ValueError("a share is not a number above zero, or a gain is not a number")
    if sum(share.tokens for share in shares) > MAX_TOTAL:
        raise ValueError("the shares add up to too much")


def _count(decoded: Sequence[Decoded], votes: Sequence[int], layout: Layout, threads: int, impl: str) -> np.ndarray:
    if chunk_coder(impl) is not reference:
        from tscale.kernels.screen_fast import tensor_counter

        counter = tensor_counter(decoded, votes, layout)
    else:
        counter = partial(_count_plainly, decoded, votes, layout)
    chunked = [index for index in range(len(layout.tensors)) if not layout.is_small(index)]
    counts = np.zeros((len(decoded), 2), np.int64)
    for found in map_in_threads(counter, chunked, threads):
        counts += found
    return counts


def _count_plainly(decoded: Sequence[Decoded], votes: Sequence[int], layout: Layout, index: int) -> np.ndarray:
    sums = np.zeros(layout.tensors[index].numel, np.float64)
    for one, vote in zip(decoded, votes, strict=True):
        positions, signs = one.signs(index)
        sums[positions] += vote * signs
    counts = np.zeros((len(decoded), 2), np.int64)
    for number, (one, vote) in enumerate(zip(decoded, votes, strict=True)):
        positions, signs = one.signs(index)
        sides = (sums[positions] - vote * signs) * signs
        counts[number] = np.count_nonzero(sides > 0), np.count_nonzero(sides < 0)
    return counts


def warm_up() -> None:
    """Has numba compile, or load from its cache, the encoder, the screen and the fold (seconds, once)."""
    fold.warm_up()
    layout = Layout((TensorSpec("chunked", (CHUNK,), "matrix"),))
    blob = encode(np.linspace(-1, 1, layout.numel, dtype=np.float32), layout, Rung(CHUNK // 64))
    screen([Share(blob, 1.0, 1.0)] * THREE, layout)
