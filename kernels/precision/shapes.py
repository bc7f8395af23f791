"""Which matrix products may be done in a short format: one rule for all back ends, so that they compute the same."""

from __future__ import annotations

from collections.abc import Sequence

UNIT = 16
"""`_scaled_mm` and the tensor cores' tiles want multiples of this; each of the three dimensions is contracted once."""


def fits(weight_shape_NK: Sequence[int], x_shape_KM: Sequence[int]) -> bool:
    """Whether `weight @ x` and both of its derivatives can be done in fp8 or int8; else the product is done in bf16."""
    (n, k), m = weight_shape_NK, x_shape_KM[1]
    return min(n, k, m) >= UNIT and n % UNIT == 0 and k % UNIT == 0 and m % UNIT == 0
