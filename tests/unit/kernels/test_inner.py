"""Inner training: learning, determinism, the schedule, evaluation, generation, and the optimizer state."""

import math

import numpy as np
import pytest
import torch

from tscale.kernels.init import init_state
from tscale.kernels.inner import InnerConfig, InnerTrainer, lr_scale
from tscale.kernels.model_config import ModelConfig

MODEL = ModelConfig("tscale", 16, 2, 8, 4, 32, 16, 1)
INNER = InnerConfig(
    batch=4,
    context=24,
    lr_muon=0.1,
    lr_adam=0.02,
    weight_decay=0.01,
    momentum=0.9,
    warmup_tokens=1000,
    schedule_tokens=10000,
    final_lr_fraction=0.1,
)
COUNTS = np.full(16, 100, np.int64)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer() -> tuple[np.ndarray, InnerTrainer]:
    local = init_state(MODEL, 5)
    return local, InnerTrainer(MODEL, INNER, local, COUNTS)


def batch(step: int, rows: int = 4) -> np.ndarray:
    """Counting upwards from random places: learnable, and never the same twice."""
    starts = np.random.default_rng(step).integers(0, 16, (rows, 1))
    return (starts + np.arange(25)) % 16


def test_it_learns_in_the_shared_array():
    local, inner = trainer()
    first, before = inner.evaluate(local, batch(999)), local.copy()
    losses = [inner.step(batch(step), 1.0) for step in range(40)]
    assert losses[0] == pytest.approx(first, abs=0.2) and first > 2.5
    assert inner.evaluate(local, batch(999)) < 0.5
    assert inner.evaluate(before, batch(999)) == first


def test_two_runs_are_equal_to_the_bit():
    (one, first), (two, second) = trainer(), trainer()
    losses = [[t.step(batch(step), 0.7) for step in range(5)] for t in (first, second)]
    assert losses[0] == losses[1] and np.array_equal(one, two)


def test_a_restored_trainer_goes_on_as_if_never_stopped():
    local, inner = trainer()
    for step in range(3):
        inner.step(batch(step), 1.0)
    saved_local, saved_state = local.copy(), inner.state_arrays()
    for step in range(3, 6):
        inner.step(batch(step), 1.0)
    again = InnerTrainer(MODEL, INNER, saved_local, COUNTS)
    again.load_state_arrays(saved_state)
    for step in range(3, 6):
        again.step(batch(step), 1.0)
    assert np.array_equal(local, saved_local)


def test_momentum_matters_until_it_is_reset():
    results = []
    for reset in (False, True):
        local, inner = trainer()
        inner.step(batch(0), 1.0)
        if reset:
            inner.reset_momentum()
        inner.step(batch(1), 1.0)
        results.append(local)
    assert not np.array_equal(*results)


def test_the_learning_rate_scale_reaches_both_optimizers():
    local, inner = trainer()
    start = local.copy()
    inner.step(batch(0), 0.0)
    assert np.array_equal(local, start)
    inner.step(batch(1), 1e-3)
    moved = {
        name: np.abs(inner_view - start_view).max() for name, inner_view, start_view in _pairs(inner, local, start)
    }
    assert 0.0 < moved["head"] < 1e-4 and 0.0 < moved["combine.3"] < 1e-3


def _pairs(inner, local, start):
    for (spec, view), (_, before) in zip(inner.layout.views(local), inner.layout.views(start), strict=True):
        yield spec.name, view, before


def test_a_loss_that_is_not_finite_changes_nothing():
    local, inner = trainer()
    inner.step(batch(0), 1.0)
    local[3] = np.nan
    before, state = local.copy(), inner.state_arrays()
    tokens = np.full((4, 25), 0)
    assert not math.isfinite(inner.step(tokens, 1.0))
    assert np.array_equal(local, before, equal_nan=True)
    assert all(np.array_equal(array, state[name]) for name, array in inner.state_arrays().items())


class _NanOnce(torch.autograd.Function):
    """`weight @ x` with one value in the weight's gradient that is not finite, and a loss that shows nothing."""

    @staticmethod
    def forward(ctx, weight, x, value):
        ctx.save_for_backward(weight, x)
        ctx.value = value
        return torch.mm(weight, x)

    @staticmethod
    def backward(ctx, grad):
        weight, x = ctx.saved_tensors
        weight_grad = torch.mm(grad, x.t())
        weight_grad[0, 0] += ctx.value
        return weight_grad, torch.mm(weight.t(), grad), None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(value):
    bad = False
    local = init_state(MODEL, 5)
    product = lambda weight, x: _NanOnce.apply(weight, x, value if bad else 0.0)  # noqa: E731
    inner = InnerTrainer(MODEL, INNER, local, COUNTS, product)
    inner.step(batch(0), 1.0)
    before, state = local.copy(), inner.state_arrays()
    bad = True
    assert math.isnan(inner.step(batch(1), 1.0))
    assert np.array_equal(local, before)
    assert all(np.array_equal(array, state[name]) for name, array in inner.state_arrays().items())
    bad = False
    assert math.isfinite(inner.step(batch(1), 1.0)) and not np.array_equal(local, before)


def test_evaluation_is_the_mean_over_rows_however_they_are_cut(monkeypatch):
    local, inner = trainer()
    tokens = np.random.default_rng(1).integers(0, 16, (7, 25))
    whole = inner.evaluate(local, tokens)
    monkeypatch.setattr("tscale.kernels.inner.EVALUATION_BATCH_TOKENS", 50)
    assert inner.evaluate(local, tokens) == pytest.approx(whole, rel=1e-6)


def test_schedule():
    points = [0, 100, 500, 1000, 5500, 10000, 99999]
    scales = [lr_scale(INNER, tokens) for tokens in points]
    assert scales == pytest.approx([0.1, 0.1, 0.5, 1.0, 0.55, 0.1, 0.1])


def test_generation_continues_what_was_learned():
    local, inner = trainer()
    for step in range(60):
        inner.step(batch(step), 1.0)
    counted = inner.generate(local, np.array([3, 4, 5]), 40, temperature=0.0, seed=0)
    assert counted.dtype == np.int64 and counted.tolist() == [(6 + i) % 16 for i in range(40)]
    warm = [inner.generate(local, np.array([3]), 30, temperature=3.0, seed=s).tolist() for s in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]
    with pytest.raises(ValueError, match="prompt"):
        inner.generate(local, np.array([], np.int64), 1, 1.0, 0)


@pytest.mark.parametrize(
    "change",
    [{"batch": 0}, {"lr_muon": -1.0}, {"momentum": 1.0}, {"warmup_tokens": 20000}, {"final_lr_fraction": 1.5}],
)
def test_settings_that_make_no_sense_are_refused(change):
    with pytest.raises(ValueError):
        InnerConfig(**{**INNER.__dict__, **change})
