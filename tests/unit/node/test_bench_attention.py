"""The attention benchmark: its figures, its refusals, and that the windows pay."""

import pytest

from tscale.node.bench.attention import run_attention_bench
from tscale.node.bench.meanings import MEANINGS
from tscale.protocol.errors import BadInput


def test_a_small_run_has_every_figure():
    result = run_attention_bench("tiny", context=65, seconds=0)
    assert set(result) <= set(MEANINGS)
    assert result["layers"] == {"1": 2, "64": 3, "65": 2} and set(result["layer_ms"]) == {"1", "64", "65"}
    assert result["repeats"] == 5 and result["plan_s"] > 0 and result["full_s"] > 0 and result["plan_vs_full"] > 0


def test_pairs_are_counted_by_window():
    # of 66 tokens: one token back 65 pairs, 64 back 2144 (all but the last one's first), full 2145
    result = run_attention_bench("tiny", context=66, seconds=0)
    assert result["pairs_vs_full"] == pytest.approx((2 * 65 + 3 * 2144 + 2 * 2145) / (7 * 2145))


@pytest.mark.parametrize("wrong", [{"model": "none"}, {"context": 64}, {"context": 1 << 40}])
def test_refusals(wrong):
    with pytest.raises(BadInput):
        run_attention_bench(**wrong)
