"""The codec's benchmark: its keys, its refusals, and the size of real deltas."""

from math import comb, log2

import numpy as np
import pytest

from tscale.kernels.codec import CHUNK, Rung, decode, encode
from tscale.kernels.layout import Layout, TensorSpec
from tscale.node.bench.codec import entropy_bounds, run_codec_bench
from tscale.node.bench.meanings import MEANINGS
from tscale.protocol.errors import BadInput


def test_a_small_run_has_every_figure():
    result = run_codec_bench(parameters=1, kept_per_chunk=128, seconds=0)
    assert set(result) <= set(MEANINGS)
    assert result["deltas"] == "trained" and result["repeats"] == 5 and result["kept_per_chunk"] == 128
    assert 0.2 < result["bits_per_parameter"] < 0.275
    rates = ("encode_params_per_s", "decode_params_per_s", "torch_topk_params_per_s", "encode_vs_topk")
    ratios = ("two_threads_vs_one", "two_cores_vs_one", "memory_read_two_threads_vs_one", "encode_vs_memory_read")
    assert all(result[key] > 0 for key in (*rates, *ratios))


def test_the_entropy_bound_is_that_of_uniform_positions_and_two_bits_a_value():
    layout = Layout((TensorSpec("a", (8 * CHUNK,), "matrix"), TensorSpec("s", (100,), "small")))
    residual = np.random.default_rng(1).standard_normal(layout.numel).astype(np.float32)
    allowed, sent = entropy_bounds(decode(encode(residual, layout, Rung(64)), layout))
    expected = 8 * (log2(comb(CHUNK, 64)) + 2 * 64) + 16 * 100
    assert allowed == pytest.approx(expected / layout.numel, rel=1e-9)
    assert 0.5 * allowed < sent <= allowed


def test_density_names_the_rung():
    assert run_codec_bench(parameters=1, seconds=0, density=1 / 32)["kept_per_chunk"] == 128


@pytest.mark.parametrize("wrong", [{"density": 0.0}, {"density": 1.5}, {"parameters": 0}, {"parameters": 1 << 50}])
def test_refusals(wrong):
    with pytest.raises(BadInput):
        run_codec_bench(**wrong)


@pytest.mark.slow
def test_real_deltas_of_ten_million_parameters_cost_at_most_0_150_bits():
    result = run_codec_bench(parameters=10_000_000, kept_per_chunk=64, seconds=0)
    assert result["parameters"] >= 10_000_000 and result["deltas"] == "trained"
    assert result["bits_per_parameter"] <= 0.150
    assert result["bits_vs_bound"] <= 1.025
