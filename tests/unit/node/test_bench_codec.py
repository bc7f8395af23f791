"""The codec's benchmark: its keys, its refusals, and the size of real deltas."""

import pytest

from tscale.node.bench.codec import run_codec_bench
from tscale.protocol.errors import BadInput


def test_a_small_run_has_every_figure():
    result = run_codec_bench(parameters=1, kept_per_chunk=128, seconds=0)
    assert result["deltas"] == "trained" and result["repeats"] == 5 and result["kept_per_chunk"] == 128
    assert 0.2 < result["bits_per_parameter"] < 0.275
    rates = ("encode_params_per_s", "decode_params_per_s", "torch_topk_params_per_s", "encode_vs_topk")
    assert all(result[key] > 0 for key in rates)


def test_density_names_the_rung():
    assert run_codec_bench(parameters=1, seconds=0, density=1 / 32)["kept_per_chunk"] == 128


@pytest.mark.parametrize("wrong", [{"density": 0.0}, {"density": 1.5}, {"parameters": 0}])
def test_refusals(wrong):
    with pytest.raises(BadInput):
        run_codec_bench(**wrong)


@pytest.mark.slow
def test_real_deltas_of_ten_million_parameters_cost_at_most_0_152_bits():
    result = run_codec_bench(parameters=10_000_000, kept_per_chunk=64, seconds=0)
    assert result["parameters"] >= 10_000_000 and result["deltas"] == "trained"
    assert result["bits_per_parameter"] <= 0.152
