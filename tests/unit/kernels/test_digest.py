"""State digests: every bit, every name and every shape counts, and nothing else does."""

import numpy as np

from tscale.kernels.digest import state_digest, tensor_digest, tensor_digests
from tscale.kernels.layout import Layout, TensorSpec

LAYOUT = Layout((TensorSpec("a", (3, 4), "matrix"), TensorSpec("b", (5,), "small")))


def state(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(LAYOUT.numel, dtype=np.float32)


def test_known_value():
    flat = (np.arange(17, dtype=np.float32) - 8) / 4
    assert state_digest(LAYOUT, flat, None).hex() == KNOWN_PLAIN
    assert state_digest(LAYOUT, flat, flat[::-1].copy()).hex() == KNOWN_NESTEROV


KNOWN_PLAIN = "1db1095f7ada9f6871309ec22fb964f2aa287284ad9a8ab0f2e31b2f62c895d7"
KNOWN_NESTEROV = "b8629b8f16e670cd0d706b7ac72bad753417f3bb97f8d8ca2f1242235b7954bb"


def test_one_bit_changes_the_state_and_only_its_tensor():
    one, other = state(1), state(1)
    other.view(np.uint32)[13] ^= 1
    assert state_digest(LAYOUT, one, None) != state_digest(LAYOUT, other, None)
    same = [a == b for a, b in zip(tensor_digests(LAYOUT, one, None), tensor_digests(LAYOUT, other, None), strict=True)]
    assert same == [True, False]


def test_momentum_counts_and_is_not_taken_for_the_anchor():
    zero = np.zeros(LAYOUT.numel, dtype=np.float32)
    digests = {
        state_digest(LAYOUT, state(1), None),
        state_digest(LAYOUT, state(1), zero),
        state_digest(LAYOUT, state(1), state(2)),
        state_digest(LAYOUT, state(2), state(1)),
    }
    assert len(digests) == 4


def test_name_shape_and_sign_of_zero_count_and_memory_order_does_not():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert tensor_digest("a", array) == tensor_digest("a", np.asfortranarray(array))
    assert tensor_digest("a", array) != tensor_digest("b", array)
    assert tensor_digest("a", array) != tensor_digest("a", array.reshape(4, 3))
    assert tensor_digest("a", array * np.float32(0)) != tensor_digest("a", array * np.float32(-0.0))
    assert len(tensor_digest("a", array)) == 32
