"""The fold's benchmark: its keys, its refusals, and that a fold takes the state and little more."""

import pytest

from tscale.node.bench.fold import run_fold_bench
from tscale.node.bench.meanings import MEANINGS
from tscale.protocol.errors import BadInput


def test_a_small_run_has_every_figure():
    result = run_fold_bench(parameters=2_000_000, contributions=5, threads=2, repeats=1)
    assert set(result) <= set(MEANINGS)
    assert result["parameters"] >= 2_000_000 and result["contributions"] == 5
    assert result["state_bytes"] == 4 * result["parameters"]
    assert 0.14 < 8 * result["blob_bytes"] / result["parameters"] / 5 < 0.152
    assert result["seconds"] > 0 and result["peak_bytes"] > result["state_bytes"]


def test_a_fold_takes_no_more_than_the_state_one_tensor_and_the_blobs():
    result = run_fold_bench(parameters=32_000_000, contributions=16, threads=1, repeats=1)
    sum_of_a_tensor_bytes = 2 * result["tensor_bytes"]  # in float64
    assert result["peak_over_state_and_blobs_bytes"] <= sum_of_a_tensor_bytes


@pytest.mark.parametrize("wrong", [{"parameters": 0}, {"contributions": 0}, {"threads": 0}, {"parameters": 1 << 50}])
def test_refusals(wrong):
    with pytest.raises(BadInput):
        run_fold_bench(**wrong)
