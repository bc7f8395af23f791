"""The precision bench: a path equal to float32 costs nothing, one that rounds coarsely is found to be worse."""

import json

import pytest
import torch

from tscale.kernels.block import Product
from tscale.kernels.model_config import ModelConfig
from tscale.kernels.precision.products import product_for
from tscale.kernels.precision.select import PrecisionPath
from tscale.node.bench import precision as bench

P = PrecisionPath
SMALL = bench.Effort(trained_steps=20, continued_steps=3, runs=2, windows=32)


def coarse(weight_NK: torch.Tensor, x_KM: torch.Tensor) -> torch.Tensor:
    """Activations with one digit."""
    return torch.mm(weight_NK, x_KM + (x_KM.round() - x_KM).detach())


@pytest.fixture(autouse=True)
def _small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MODEL", ModelConfig("tscale", 32, 1, 32, 4, 64, 256, 1))
    monkeypatch.setattr(bench, "CHECK_MODEL", ModelConfig("tscale", 64, 1, 64, 1, 64, 256, 1))


def test_a_path_costs_what_it_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(path: PrecisionPath) -> Product | None:
        return {P.FP8_BLOCK: coarse, P.INT8_FORWARD: product_for(P.INT8_FORWARD)}.get(path)

    monkeypatch.setattr(bench, "product_for", made)
    said: list[str] = []
    result = bench.run_precision_bench(SMALL, said.append)
    rows = {row["path"]: row for row in result["paths"]}
    assert set(rows) == {path for path in P if path != P.FP32}
    figures = ("forward_bp", "trained_bp", "check_forward_bp", "check_step_bp")
    assert [rows[P.BF16][name] for name in figures] == [0.0] * 4 and rows[P.BF16]["no_worse"]
    assert 0.0 < rows[P.INT8_FORWARD]["check_forward_bp"] < rows[P.FP8_BLOCK]["check_forward_bp"]
    assert rows[P.FP8_BLOCK]["check_forward_bp"] > 7.9
    assert not rows[P.FP8_BLOCK]["no_worse"] and not result["no_worse_than_published"]
    assert 2.0 < result["loss_fp32"] < 5.0
    assert any("fp8-block" in line for line in said)
    json.dumps(result, allow_nan=False)
    lines = list(bench.table(result))
    assert len(lines) == 5 + len(rows) and lines[-1].endswith("No worse in every row: no")
    assert lines[2].split()[0] == "fp16" and lines[2].endswith("0.2/1.7")


def test_the_figures_are_a_function_of_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PUBLISHED", {P.FP8_BLOCK: (7.9, 26.0)})
    first, second = bench.run_precision_bench(SMALL), bench.run_precision_bench(SMALL)
    assert first == second
    assert first["paths"][0]["forward_bp"] != 0.0 != first["paths"][0]["trained_bp"]
