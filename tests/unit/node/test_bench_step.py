"""The step benchmark: its plain model is the same model, its optimizer the same one, and its figures are there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tscale.kernels.init import init_state
from tscale.kernels.model import TscaleModel
from tscale.kernels.model_config import ModelConfig
from tscale.node.bench.meanings import MEANINGS
from tscale.node.bench.plain_model import PlainModel, PlainMuon
from tscale.node.bench.step import StepSize, run_step_bench
from tscale.protocol.errors import BadInput

SMALL = ModelConfig("tscale", width=16, heads=2, head_dim=8, layers=4, window=12, vocab=11, relu=2)


@pytest.mark.parametrize("cfg", [SMALL, ModelConfig("tscale", 16, 1, 16, 6, 90, 11, 1, combine=8)], ids=["4", "8"])
def test_the_plain_model_is_the_same_model(cfg: ModelConfig) -> None:
    noise = np.random.default_rng(3).standard_normal(init_state(cfg, 1).size)
    flat = (init_state(cfg, 1) + 0.5 * noise).astype(np.float32)
    counts = np.arange(cfg.vocab)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, cfg.vocab, (2, 81)))
    plain, model = PlainModel(cfg, flat, counts, 80), TscaleModel(cfg, torch.from_numpy(flat), counts)
    gradient = torch.zeros(flat.size)
    model.bind_grad(gradient)
    losses = [plain.loss(tokens), model.loss(tokens)]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), abs=1e-5)
    for loss in losses:
        loss.backward()
    for name, index in (("qc", 0), ("kv", 2), ("combine", 3), ("expand", 1), ("contract", 3)):
        where = model.layout.slices[model.layout.index[f"{name}.{index}"]]
        own = getattr(plain.blocks[index], name).grad.flatten()
        torch.testing.assert_close(own, gradient[where], atol=1e-5, rtol=1e-3)


def test_the_plain_optimizer_splits_heads_and_orthogonalises() -> None:
    noise = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(32, 16))
    weight.grad = torch.randn(32, 16, generator=noise)
    PlainMuon([{"params": [weight], "heads": 4}], lr=0.5, momentum=0.9, weight_decay=0.0).step()
    for part, gradient in zip(weight.detach().view(4, 8, 16), weight.grad.view(4, 8, 16), strict=True):
        u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
        assert float((part / (-0.5 * 0.2 * 4.0) - u @ vh).norm() / 8**0.5) < 0.1


def test_a_small_run_has_every_figure_and_trains_one_model_three_times() -> None:
    result = run_step_bench(StepSize("demo", 1, 70), seconds=0)
    assert set(result) <= set(MEANINGS)
    assert result["parameters"] == 196_608 and result["turns"] == 6
    assert result["loss_gap"] < 1e-3
    assert all(result[f"{name}_step_s"] > 0 for name in ("plain", "inner", "layer_major"))
    assert result["inner_speed_vs_plain"] > 0 and result["layer_major_time_vs_inner"] > 0


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(BadInput, match="demo"):
        run_step_bench(StepSize("giant"))


@pytest.mark.parametrize("size", [StepSize("demo", 1 << 40, 70), StepSize("demo", 1, 1 << 40)])
def test_a_step_that_memory_is_too_short_for_is_not_begun(size: StepSize) -> None:
    with pytest.raises(BadInput, match="GB are free: use a smaller --model, --batch or --context"):
        run_step_bench(size, seconds=0)
