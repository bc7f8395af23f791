"""The fold: contributions and the outer step, with the same bits on every machine.

For each tensor, g = sum of weight * contribution in float64, in the order given, each product rounded before it is
added. Then in float32, every operation rounded (MuLoCo, arXiv 2505.23725, outer Nesterov step):
u = mu*u + g;  anchor = anchor - eta*(g + mu*u). With mu = 0 there is no u.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

import numpy as np

from tscale.kernels.codec import CHUNK, CodecError, Decoded, Rung, decode, encode, reference
from tscale.kernels.codec.implementation import chunk_coder
from tscale.kernels.layout import Layout, TensorSpec

State = tuple[np.ndarray, np.ndarray | None]
Arrays = tuple[np.ndarray, ...]
TensorFold = Callable[[int, Arrays, Arrays], None]
"""Folds the tensor of an index: (anchor,) or (anchor, momentum), read from the first, written to the second."""
NewVector = Callable[[], np.ndarray]
"""Makes a float32 [P] vector with undefined contents, in main memory or in a file."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class FoldPart:
    """One contribution and its weight: rung's gain * age factor * tokens / the manifest's total."""

    blob: bytes | Decoded
    weight: float


@dataclass(frozen=True)
class OuterRule:
    """Outer learning rate `eta` and Nesterov momentum `mu`."""

    eta: float
    mu: float


@dataclass(frozen=True)
class FoldOptions:
    """How the work is done: tensors are shared out to `threads`, and `new_vector` makes the vectors of the result
    (None: in main memory). The bits are the same."""

    threads: int = 1
    new_vector: NewVector | None = None


def fold(
    anchor: np.ndarray,
    momentum: np.ndarray | None,
    parts: Sequence[FoldPart],
    layout: Layout,
    rule: OuterRule,
    options: FoldOptions | None = None,
) -> State:
    """The next anchor and outer momentum (float32 [P] each; the momentum is None when, and only when, mu is 0).

    The inputs stay as they are. Memory beyond the result: the decoded contributions, about as large as their blobs, and
    for each thread a sum of at most one tensor. Raises CodecError for a malformed contribution (before anything is
    allocated), ValueError for a momentum that doesn't fit the rule, and what `new_vector` raises.
    """
    chosen = options or FoldOptions()
    opened = open_parts(parts, layout, chosen.threads)
    return _fold((anchor, momentum), opened, layout, rule, ("auto", chosen))


def fold_reference(
    anchor: np.ndarray, momentum: np.ndarray | None, parts: Sequence[FoldPart], layout: Layout, rule: OuterRule
) -> State:
    """`fold` in plain numpy: the definition, and what runs where numba is missing."""
    opened = open_parts(parts, layout, impl="reference")
    return _fold((anchor, momentum), opened, layout, rule, ("reference", FoldOptions()))


def open_parts(parts: Sequence[FoldPart], layout: Layout, threads: int = 1, impl: str = "auto") -> list[FoldPart]:
    """The parts with their blobs checked and decoded. Raises CodecError."""
    return map_in_threads(lambda part: FoldPart(_open(part, layout, impl), part.weight), parts, threads)


def _fold(
    state: State, parts: Sequence[FoldPart], layout: Layout, rule: OuterRule, how: tuple[str, FoldOptions]
) -> State:
    anchor, momentum = state
    if (momentum is None) != (rule.mu == 0):
        raise ValueError("outer momentum exists exactly when mu is not 0")
    if not all(isfinite(part.weight) for part in parts):
        raise ValueError("a weight isn't finite")
    for flat in state:
        if flat is not None:
            layout.check(flat, "state")
    impl, options = how
    fold_tensor = _tensor_fold(parts, layout, rule, impl)
    new_vector = options.new_vector or (lambda: np.empty_like(anchor))
    new_anchor, new_momentum = new_vector(), None if momentum is None else new_vector()

    def fold_one(index: int) -> None:
        place = layout.slices[index]
        old = (anchor[place],) if momentum is None else (anchor[place], momentum[place])
        new = (new_anchor[place],) if new_momentum is None else (new_anchor[place], new_momentum[place])
        fold_tensor(index, old, new)

    map_in_threads(fold_one, range(len(layout.tensors)), options.threads)
    return new_anchor, new_momentum


def _tensor_fold(parts: Sequence[FoldPart], layout: Layout, rule: OuterRule, impl: str) -> TensorFold:
    rates = (np.float32(rule.eta), np.float32(rule.mu))
    if chunk_coder(impl) is not reference:
        from tscale.kernels.fold_fast import tensor_fold

        return tensor_fold(parts, layout, rates)

    def fold_plainly(index: int, old: Arrays, new: Arrays) -> None:
        outer_step(weighted_sum(parts, index, layout.tensors[index].numel), old, new, rates)

    return fold_plainly


def map_in_threads(call: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """`call` of every item, in their order."""
    if threads < 2 or len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, items))


def weighted_sum(parts: Sequence[FoldPart], tensor_index: int, numel: int) -> np.ndarray:
    """One tensor's sum of weight * contribution (decoded ones), float64 [numel], added in the order given."""
    sum64 = np.zeros(numel, dtype=np.float64)
    for part in parts:
        assert isinstance(part.blob, Decoded)
        part.blob.add_to(sum64, tensor_index, part.weight)
    return sum64


def outer_step(sum64: np.ndarray, old: Arrays, new: Arrays, rates: tuple[np.float32, np.float32]) -> None:
    """The plain outer step of one tensor: (anchor,) or (anchor, momentum), read from `old`, written to `new`."""
    eta, mu = rates
    with np.errstate(over="ignore"):
        direction = sum64.astype(np.float32)
    if len(old) == 2:
        momentum = mu * old[1] + direction
        new[1][...] = momentum
        direction = direction + mu * momentum
    new[0][...] = old[0] - eta * direction


def _open(part: FoldPart, layout: Layout, impl: str) -> Decoded:
    decoded = part.blob if isinstance(part.blob, Decoded) else decode(part.blob, layout, impl=impl)
    if decoded.layout.fingerprint != layout.fingerprint:
        raise CodecError("a contribution was decoded for another layout")
    return decoded


def warm_up() -> None:
    """Has numba compile, or load from its cache, the encoder and the fold (seconds, once): call it before training."""
    layout = Layout((TensorSpec("chunked", (CHUNK,), "matrix"), TensorSpec("small", (1,), "small")), small_numel=1)
    anchor = np.linspace(-1, 1, layout.numel, dtype=np.float32)
    part = FoldPart(encode(anchor.copy(), layout, Rung(CHUNK // 64)), 1.0)
    fold(anchor, None, [part], layout, OuterRule(1.0, 0.0))
    fold(anchor, np.zeros_like(anchor), [part], layout, OuterRule(1.0, 0.5))
