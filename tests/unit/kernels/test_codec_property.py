"""For every finite float32 vector: what was sent plus what was left is what there was, and the twins agree."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tscale.kernels.codec import CodecError, Rung, decode, encode
from tscale.kernels.layout import Layout, TensorSpec

LAYOUT = Layout((TensorSpec("m", (4200,), "matrix"), TensorSpec("s", (3,), "small")), small_numel=3)
SOME_VALUES = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)
RUNGS = st.one_of(st.builds(Rung, st.integers(1, 4096)), st.just(Rung(4096, 32)))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(some=SOME_VALUES, rung=RUNGS, seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.001, 0.03, 1.0]))
def test_sent_plus_left_is_the_input(some, rung, seed, share):
    generator = np.random.default_rng(seed)
    original = generator.choice(np.array(some, dtype=np.float32), LAYOUT.numel)
    original[generator.random(LAYOUT.numel) >= share] = 0
    fast, plain = original.copy(), original.copy()
    blob = encode(fast, LAYOUT, rung, "numba")
    assert blob == encode(plain, LAYOUT, rung, "reference")
    assert fast.tobytes() == plain.tobytes()
    np.testing.assert_array_equal(decode(blob, LAYOUT, rung).dense() + fast, original)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused_cleanly(junk, with_honest_start):
    start = encode(np.zeros(LAYOUT.numel, np.float32), LAYOUT, Rung(64))[:32] if with_honest_start else b""
    try:
        decode(start + junk, LAYOUT)
    except CodecError:
        return
    raise AssertionError("junk was taken for a contribution")
