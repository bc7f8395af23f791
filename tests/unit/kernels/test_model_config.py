"""Sizes, layouts, attention reach, and starting parameters that are equal on every machine."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from tscale.kernels.init import init_state, normal_values
from tscale.kernels.model_config import PRESETS, LayerReach, ModelConfig, layer_parameters, layer_reaches, model_layout


def test_published_sizes():
    # TScale's own figures: 98.3M in layers and 149.8M in all; 1.376B in layers
    small, large = PRESETS["125m"], PRESETS["1.5b"]
    assert (small.width, small.heads, small.layers, small.vocab) == (512, 3, 50, 50258)
    assert round(layer_parameters(small) / 1e6, 1) == 98.3
    assert round(model_layout(small).numel / 1e6, 1) == 149.8
    assert (large.width, large.heads, large.layers) == (1280, 20, 42)
    assert round(layer_parameters(large) / 1e9, 3) == 1.376


@pytest.mark.parametrize(
    ("name", "low", "high"), [("demo", 0.15e6, 0.3e6), ("tiny", 0.8e6, 1.0e6), ("350m", 330e6, 370e6)]
)
def test_preset_sizes(name, low, high):
    assert low <= model_layout(PRESETS[name]).numel <= high


def test_reaches_at_42_layers_cost_half_of_full_attention():
    reaches = layer_reaches(PRESETS["1.5b"])
    assert reaches[:6] == (LayerReach(1, 0.0),) * 6
    assert reaches[6:8] == (LayerReach(64, 0.5), LayerReach(1024, 0.0))
    assert sum(r.window == 64 for r in reaches) == sum(r.window == 1024 for r in reaches) == 18
    pairs = sum(np.minimum(np.arange(1024), r.window).sum() for r in reaches)
    assert 42 * np.arange(1024).sum() / pairs == pytest.approx(2.07, abs=0.01)


def test_small_models_start_with_two_single_layers():
    cfg = ModelConfig("tscale", 16, 1, 8, 5, 32, 9, 1)
    assert [r.window for r in layer_reaches(cfg)] == [1, 1, 32, 32, 32]


def test_layout_keeps_each_kind_side_by_side():
    layout = model_layout(ModelConfig("tscale", 16, 2, 8, 2, 32, 9, 3))
    assert [t.name for t in layout.tensors] == [
        *("embed", "qc.0", "qc.1", "kv.0", "kv.1", "combine.0", "combine.1", "expand.0", "expand.1"),
        *("contract.0", "contract.1", "head"),
    ]
    assert {t.name: t.shape for t in layout.tensors if t.name.endswith(".1")} == {
        "qc.1": (32, 16),
        "kv.1": (32, 16),
        "combine.1": (16, 64),
        "expand.1": (48, 16),
        "contract.1": (16, 48),
    }
    assert {t.name for t in layout.tensors if t.role == "embedding"} == {"embed", "head"}


@pytest.mark.parametrize(
    "change", [{"kind": "other"}, {"layers": 0}, {"head_dim": 6}, {"width": 20}, {"combine": 3}, {"combine": 16}]
)
def test_sizes_that_do_not_fit_are_refused(change):
    fitting = ModelConfig("tscale", width=16, heads=2, head_dim=8, layers=2, window=8, vocab=9, relu=1, combine=4)
    with pytest.raises(ValueError):
        replace(fitting, **change)


def test_start_is_equal_to_the_bit():
    flat = init_state(ModelConfig("tscale", 16, 2, 8, 4, 32, 256, 1), seed=7)
    assert hashlib.sha256(flat.astype("<f4").tobytes()).hexdigest() == GOLDEN_START
    assert [float(x).hex() for x in flat[:2]] == GOLDEN_FIRST_TWO


def test_start_has_the_published_deviations():
    cfg = PRESETS["demo"]
    layout, flat = model_layout(cfg), init_state(cfg, 1)
    for spec, view in layout.views(flat):
        kind = spec.name.split(".")[0]
        expected = {"embed": 1.0, "combine": 0.0, "contract": 0.0}.get(kind, 0.5)
        assert view.std() == pytest.approx(expected, rel=0.03)
        assert abs(view.mean()) < 0.03
    assert not np.array_equal(layout.view(flat, "qc.0"), layout.view(flat, "qc.1"))
    assert not np.array_equal(flat, init_state(cfg, 2))


def test_normal_values_do_not_depend_on_how_they_are_cut():
    whole = normal_values(b"key", 70000, 1.0)
    assert np.array_equal(whole[:500], normal_values(b"key", 500, 1.0))
    assert np.abs(whole).max() < 4.9
    assert (whole**4).mean() / (whole**2).mean() ** 2 == pytest.approx(2.85, abs=0.06)


GOLDEN_START = "3c64deb3162d9ba73eb91be314aaa48812d890d17cf8f6c51eb8c45721af7af0"
GOLDEN_FIRST_TWO = ["-0x1.569a6e0000000p-2", "0x1.50e1a20000000p-1"]
