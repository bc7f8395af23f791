"""The fold: contributions and the outer step, with the same bits on every machine.

For each tensor, g = sum of weight * contribution in float64, in the order given, each product rounded before it is
added. Then in float32, every operation rounded (MuLoCo, arXiv 2505.23725, outer Nesterov step):
u = mu*u + g;  anchor = anchor - eta*(g + mu*u). With mu = 0 there is no u.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from tscale.kernels.codec import CHUNK, CodecError, Decoded, Rung, decode, encode, reference
from tscale.kernels.codec.implementation import chunk_coder
from tscale.kernels.layout import Layout, TensorSpec

State = tuple[np.ndarray, np.ndarray | None]


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


def fold(
    anchor: np.ndarray,
    momentum: np.ndarray | None,
    parts: Sequence[FoldPart],
    layout: Layout,
    rule: OuterRule,
    out: State | None = None,
) -> State:
    """The next anchor and outer momentum (float32 [P] each; the momentum is None when, and only when, mu is 0).

    The inputs stay as they are, unless `out` names arrays to write to, which may be the inputs themselves. Memory
    beyond the result: the decoded contributions and a few arrays of the largest tensor. Raises CodecError for a
    malformed contribution (before anything is written), ValueError for a momentum that doesn't fit the rule.
    """
    return _fold((anchor, momentum), parts, layout, rule, out, "auto")


def fold_reference(
    anchor: np.ndarray,
    momentum: np.ndarray | None,
    parts: Sequence[FoldPart],
    layout: Layout,
    rule: OuterRule,
    out: State | None = None,
) -> State:
    """`fold` in plain numpy: the definition, and what runs where numba is missing."""
    return _fold((anchor, momentum), parts, layout, rule, out, "reference")


def _fold(
    state: State, parts: Sequence[FoldPart], layout: Layout, rule: OuterRule, out: State | None, impl: str
) -> State:
    anchor, momentum = state
    if (momentum is None) != (rule.mu == 0):
        raise ValueError("outer momentum exists exactly when mu is not 0")
    if not all(isfinite(part.weight) for part in parts):
        raise ValueError("a weight isn't finite")
    opened = [_open(part, layout, impl) for part in parts]
    new_anchor, new_momentum = out or (np.empty_like(anchor), None if momentum is None else np.empty_like(anchor))
    if (momentum is None) != (new_momentum is None):
        raise ValueError("`out` needs a momentum exactly when there is one")
    for flat in (anchor, momentum, new_anchor, new_momentum):
        if flat is not None:
            layout.check(flat, "state")
    step = _outer_step_of(impl)
    for index, place in enumerate(layout.slices):
        sum64 = weighted_sum(opened, [part.weight for part in parts], index, layout.tensors[index].numel)
        old = (anchor[place],) if momentum is None else (anchor[place], momentum[place])
        new = (new_anchor[place],) if new_momentum is None else (new_anchor[place], new_momentum[place])
        step(sum64, old, new, (np.float32(rule.eta), np.float32(rule.mu)))
    return new_anchor, new_momentum


def weighted_sum(parts: Sequence[Decoded], weights: Sequence[float], tensor_index: int, numel: int) -> np.ndarray:
    """One tensor's sum of weight * contribution, float64 [numel], added in the order given."""
    sum64 = np.zeros(numel, dtype=np.float64)
    for part, weight in zip(parts, weights, strict=True):
        part.add_to(sum64, tensor_index, weight)
    return sum64


def outer_step(
    sum64: np.ndarray, old: tuple[np.ndarray, ...], new: tuple[np.ndarray, ...], rates: tuple[np.float32, np.float32]
) -> None:
    """The plain outer step of one tensor: (anchor,) or (anchor, momentum), read from `old`, written to `new`."""
    eta, mu = rates
    with np.errstate(over="ignore"):
        direction = sum64.astype(np.float32)
    if len(old) == 2:
        momentum = mu * old[1] + direction
        new[1][...] = momentum
        direction = direction + mu * momentum
    new[0][...] = old[0] - eta * direction


def _outer_step_of(impl: str) -> Callable[..., None]:
    if chunk_coder(impl) is reference:
        return outer_step
    from tscale.kernels.fold_fast import outer_step as fast_outer_step

    return fast_outer_step


def _open(part: FoldPart, layout: Layout, impl: str) -> Decoded:
    decoded = part.blob if isinstance(part.blob, Decoded) else decode(part.blob, layout, impl=impl)
    if decoded.layout.fingerprint != layout.fingerprint:
        raise CodecError("a contribution was decoded for another layout")
    return decoded


def warm_up() -> None:
    """Has numba compile, or load from its cache, the encoder and the fold (seconds, once): call it before training."""
    layout = Layout((TensorSpec("warm_up", (CHUNK,), "matrix"),), small_numel=0)
    anchor = np.linspace(-1, 1, CHUNK, dtype=np.float32)
    part = FoldPart(encode(anchor.copy(), layout, Rung(CHUNK // 64)), 1.0)
    fold(anchor, None, [part], layout, OuterRule(1.0, 0.0))
    fold(anchor, np.zeros_like(anchor), [part], layout, OuterRule(1.0, 0.5))
