"""The direction that the convergence lab measures at size, on the smallest model: fixed seed, tokens and one thread.

Margins from six seeds of exactly these runs (2026-11-30): dense two-bit was 0.0004 to 0.0035 above dense, 1/64 without
error feedback was 0.16 to 0.25 above 1/64 with it (nats per byte).
"""

from dataclasses import replace

import pytest

from tests.bench.convergence.running import run
from tests.bench.convergence.variant import Variant
from tests.bench.convergence.variants import BASE, DENSE2, DENSE_MULOCO

SEED = 1


def loss(variant: Variant) -> float:
    """20 rounds of 4 peers, 51,200 tokens."""
    small = replace(variant, preset="nano", context=16, tokens=51_200, seed=SEED)
    return run(small, code="test", final_windows=64).loss


@pytest.mark.slow
def test_dense_two_bit_is_close_to_dense_and_sparse_needs_error_feedback() -> None:
    dense, two_bit = loss(DENSE_MULOCO), loss(replace(DENSE_MULOCO, densities=DENSE2))
    with_feedback, without = loss(BASE), loss(replace(BASE, error_feedback=False))
    seen = f"seed {SEED}: dense {dense:.4f}, two-bit {two_bit:.4f}, 1/64 {with_feedback:.4f}, without {without:.4f}"
    assert abs(two_bit - dense) < 0.02, seen
    assert without - with_feedback > 0.08, seen
    assert dense < 2.3, seen  # it learned at all: the byte counts alone give about 3.1
