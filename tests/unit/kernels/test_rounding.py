"""bfloat16 weights: what is lost without care, kept with a residual to the bit and by chance on average."""

import numpy as np
import torch

from tscale.kernels.rounding import join_float32, round_stochastically, split_float32


def gaussian(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def test_a_split_value_comes_back_to_the_bit_and_is_the_nearest():
    patterns = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    edges = np.array([0.0, -0.0, 1.0, 1.00390625, -1.00390625, 1.01171875, 1e-45, -3e-39, 3.37e38], np.float32)
    x = torch.from_numpy(np.concatenate([patterns[np.abs(patterns) < 3.38e38], edges]))
    high, residual = split_float32(x)
    assert high.dtype == torch.bfloat16 and residual.dtype == torch.int16
    assert torch.equal(bits(join_float32(high, residual)), bits(x))
    error, best = (high.double() - x.double()).abs(), (x.to(torch.bfloat16).double() - x.double()).abs()
    assert torch.equal(error, best)


def test_a_thousand_tiny_updates_arrive_with_a_residual_and_are_lost_without():
    update = torch.full((64,), 1e-4)
    high, residual = split_float32(torch.ones(64))
    plain, wide = torch.ones(64, dtype=torch.bfloat16), torch.ones(64)
    for _ in range(1000):
        high, residual = split_float32(join_float32(high, residual) + update)
        plain = (plain.float() + update).to(torch.bfloat16)
        wide += update
    assert torch.equal(join_float32(high, residual), wide)
    assert torch.equal(plain, torch.ones(64, dtype=torch.bfloat16))


def test_a_thousand_tiny_updates_arrive_on_average_by_chance():
    weights = torch.ones(4096, dtype=torch.bfloat16)
    for step in range(1000):
        weights = round_stochastically(weights.float() + 1e-4, seed=step)
    # one rounding moves by 2**-7 with probability 0.0128: the mean of 4096 strays by 0.0015 a standard deviation
    assert abs(float(weights.double().mean()) - 1.1) < 0.005
    assert float(weights.double().std()) > 0.01


def test_the_mean_is_right_for_every_fraction_and_sign():
    fraction = torch.linspace(0.0, 1.0, 33, dtype=torch.float64)[:-1]
    value = torch.cat([1.0 + fraction / 128, -(1.0 + fraction / 128), 3e-39 * (1.0 + fraction)]).float()
    trials = torch.stack([round_stochastically(value, seed).double() for seed in range(4000)])
    step = (value.abs().double().log2().floor() - 7).exp2().clamp_min(2.0**-133)
    assert float(((trials.mean(0) - value.double()) / step).abs().max()) < 0.04
    assert float(((trials - value.double()) / step).abs().max()) < 1.0
    exact = (value.to(torch.bfloat16).float() == value).nonzero().flatten()
    assert exact.numel() >= 2 and not bool((trials[:, exact] != value[exact].double()).any())


def test_chance_depends_on_seed_and_place_and_not_on_the_cutting():
    x = gaussian(1000)
    whole = round_stochastically(x, seed=5, first=700)
    parts = [round_stochastically(x[:300], 5, 700), round_stochastically(x[300:], 5, 1000)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(round_stochastically(x.view(10, 100), 5, 700).flatten(), whole)
    for other in (
        round_stochastically(x, 6, 700),
        round_stochastically(x, 5, 701),
        round_stochastically(x, 5, 1 << 33),
    ):
        assert 300 < int((other != whole).sum()) < 700


def test_neighbours_and_successive_seeds_round_independently():
    x = torch.full((65536,), 1.0 + 1 / 256)  # halfway: up or down like a coin
    up = torch.stack([(round_stochastically(x, seed) > 1.0).double() for seed in range(4)]) - 0.5
    assert abs(float(up.mean())) < 0.005
    for lag in (1, 2, 64, 1024):
        assert abs(float((up[:, lag:] * up[:, :-lag]).mean())) < 0.25 * 0.02
    assert abs(float((up[1:] * up[:-1]).mean())) < 0.25 * 0.02


def test_infinities_and_nan_stay():
    rounded = round_stochastically(torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0]), 1)
    assert rounded.tolist()[:2] == [float("inf"), float("-inf")] and bool(rounded[2].isnan())
    assert rounded[3:].tolist() == [0.0, 0.0] and bool(rounded[4].signbit())
