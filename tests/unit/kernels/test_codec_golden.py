"""The wire form of a contribution: vectors that every reader of version 1 must understand, whatever zstd wrote them.

The bytes that `encode` makes may change with the zstd version; what old bytes mean may not, nor what stays behind.
"""

import numpy as np
import pytest

from tscale.kernels.codec import Rung, decode, encode
from tscale.kernels.layout import Layout, TensorSpec

LAYOUT = Layout((TensorSpec("w", (12, 25), "matrix"), TensorSpec("gain", (2,), "small")), small_numel=2)
HEADER = "54534344 01 02 {kept} 2e01000000000000 08a3f5fa821ba1ad42a5cbdd1842562d"
AS_GAPS = HEADER.format(kept="4000") + (
    "0500000000000000 0500000000000000"  # five values, five gap bytes
    "0b00000000000000 0b00000000000000 0e00000000000000 0a00000000000000"  # sizes of the frames
    "28b52ffd 2002 110000 0500"  # counts: 5
    "28b52ffd 2002 110000 c1c1"  # codes: 193 stands for 1.0
    "28b52ffd 2005 290000 0020b12020"  # gaps
    "28b52ffd 2001 090000 00"  # magnitude bits
    "0d 0025 78b4"  # signs, two float16
)
AS_MASK = HEADER.format(kept="0004") + (
    "4b00000000000000 2600000000000000"  # 75 values, a mask of 38 bytes
    "0b00000000000000 0b00000000000000 2f00000000000000 1300000000000000"
    "28b52ffd 2002 110000 4b00"
    "28b52ffd 2002 110000 bec0"  # codes: 190 and 192 stand for 0.8125 and 0.9375
    "28b52ffd 2026 310100 c160180c82413018048360300806c160100c82c120180483413008068360100c86c120180403"
    "28b52ffd 200a 510000 49d2d2d2d2d2d2922405"
    "abb4b4b4b4b4b4b44a03 0025 78b4"
)


def values() -> np.ndarray:
    return ((np.arange(302) * 7919 % 1009 - 504) / np.float32(512)).astype(np.float32)


def test_a_sparse_blob_with_gaps():
    sent = decode(bytes.fromhex(AS_GAPS), LAYOUT).dense()
    places = np.flatnonzero(sent)
    assert places.tolist() == [0, 33, 211, 244, 277, 300, 301]
    assert sent[places].tolist() == [-1.0, 1.0, -1.0, -1.0, 1.0, 0.01953125, -0.279296875]


def test_a_denser_blob_with_a_mask():
    sent = decode(bytes.fromhex(AS_MASK), LAYOUT).dense()
    places = np.flatnonzero(sent)
    assert len(places) == 77
    assert places[:8].tolist() == [0, 6, 7, 13, 14, 19, 20, 26]
    assert sent[places[:4]].tolist() == [-0.9375, -0.8125, 0.8125, -0.9375]


@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("vector,rung", [(AS_GAPS, Rung(64)), (AS_MASK, Rung(1024))])
def test_todays_encoder_says_the_same(vector, rung, impl):
    residual = values()
    sent = decode(encode(residual, LAYOUT, rung, impl), LAYOUT).dense()
    assert sent.tobytes() == decode(bytes.fromhex(vector), LAYOUT).dense().tobytes()
    assert residual.tobytes() == (values() - sent).tobytes()
