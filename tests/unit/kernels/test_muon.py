"""Muon: the polar factor against an SVD, the split of fused matrices, and the two update rules."""

import numpy as np
import pytest
import torch

from tscale.kernels.layout import Layout, TensorSpec
from tscale.kernels.muon import AdamW, InnerOptimizer, MatrixBatch, Muon, MuonRule, matrix_batches, muon_update
from tscale.kernels.polar import PolarRule, guarded, minimax_triples, polar_factor, polar_rule

FIXED = ((3.4445, -4.775, 2.0315),) * 5


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_polar(batch: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(batch.double(), full_matrices=False)
    return (u @ vh).float()


def relative_error(batch: torch.Tensor, triples) -> float:
    exact = exact_polar(batch)
    return float((polar_factor(batch, PolarRule(triples)) - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [(1, 128, 256), (8, 32, 64), (4, 64, 256), (4, 96, 32), (2, 64, 64)])
def test_polar_factor_is_close_to_the_svd(shape):
    assert relative_error(gaussian(*shape), minimax_triples(5, 3e-3)) < 0.13


def test_more_steps_come_closer_and_the_best_triples_beat_one_fixed_triple():
    batch = gaussian(1, 64, 128)
    errors = [relative_error(batch, minimax_triples(steps, 3e-3)) for steps in (4, 5, 6, 7)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 2e-3
    assert relative_error(batch, FIXED) > 2 * errors[1]


def test_published_errors_on_a_gaussian_matrix():
    batch = gaussian(1, 256, 512)
    assert relative_error(batch, FIXED) == pytest.approx(0.17, abs=0.01)
    assert relative_error(batch, minimax_triples(5, 1e-3)) == pytest.approx(0.08, abs=0.005)
    assert relative_error(batch, polar_rule("cpu").triples) < 0.01


@pytest.mark.parametrize("low", [3e-3, 1e-3])
def test_in_bfloat16_the_guard_keeps_singular_values_from_overshooting(low):
    batch, plain = gaussian(8, 32, 64), minimax_triples(5, low)
    goal = float(torch.linalg.svdvals(polar_factor(batch, PolarRule(plain))).max())

    def largest(triples) -> float:
        half = polar_factor(batch, PolarRule(triples, torch.bfloat16))
        assert half.dtype == torch.bfloat16
        return float(torch.linalg.svdvals(half.float()).max())

    assert largest(guarded(plain)) < goal + 0.01 < 1.13
    assert largest(plain) > goal + (0.9 if low == 1e-3 else 0.015)
    assert relative_error(batch, guarded(plain)) < 0.1


def test_a_gpu_computes_in_guarded_bfloat16_and_a_cpu_in_float32():
    assert polar_rule("cpu").dtype == torch.float32 and polar_rule("cuda").dtype == torch.bfloat16
    assert polar_rule("cuda").triples == guarded(polar_rule("cpu").triples)


@pytest.mark.parametrize(("steps", "low"), [(5, 3e-3), (6, 1e-3), (3, 0.05)])
def test_triples_keep_singular_values_within_the_error_of_the_last_step(steps, low):
    x = np.geomspace(low, 1.0, 20000)
    for a, b, c in minimax_triples(steps, low):
        x = x * (a + x * x * (b + x * x * c))
    error = np.abs(x - 1.0).max()
    # the error of a composition is alternating: it is reached from below and from above
    assert x.max() - 1.0 == pytest.approx(error, rel=0.02)
    assert 1.0 - x.min() == pytest.approx(error, rel=0.02)


def test_one_step_is_the_known_best_quintic():
    # on a short interval around 1 the best quintic tends to the Taylor one: 15/8, -10/8, 3/8
    assert minimax_triples(1, 0.999)[0] == pytest.approx((1.875, -1.25, 0.375), abs=2e-3)


def test_zero_matrices_stay_zero():
    assert not polar_factor(torch.zeros(2, 4, 8), polar_rule("cpu")).any()


LAYOUT = Layout(
    (
        TensorSpec("embed", (5, 4), "embedding"),
        TensorSpec("qc.0", (8, 4), "matrix"),
        TensorSpec("qc.1", (8, 4), "matrix"),
        TensorSpec("kv.0", (8, 4), "matrix"),
        TensorSpec("contract.0", (4, 6), "matrix"),
        TensorSpec("head", (5, 4), "embedding"),
    )
)


def test_fused_matrices_are_split_and_neighbours_share_a_batch():
    assert matrix_batches(LAYOUT, {"qc": 2, "kv": 2}) == (
        MatrixBatch(slice(20, 116), (12, 2, 4)),
        MatrixBatch(slice(116, 140), (1, 4, 6)),
    )


def test_muon_step_by_hand():
    flat, grad = gaussian(40), gaussian(40, seed=1)
    start = flat.clone()
    muon = Muon((MatrixBatch(slice(8, 40), (2, 2, 8)),), momentum=0.9, weight_decay=0.1)
    muon.step(flat, grad, lr=0.05)
    matrices, g = start[8:].view(2, 2, 8), 0.1 * grad[8:].view(2, 2, 8)
    assert torch.equal(flat[:8], start[:8])
    update = polar_factor(g, polar_rule("cpu")) * 0.2 * 8**0.5
    torch.testing.assert_close(flat[8:].view(2, 2, 8), matrices * (1 - 0.005) - 0.05 * update)
    muon.step(flat, torch.zeros(40), lr=0.0)
    torch.testing.assert_close(muon.momentum, 0.09 * grad[8:])


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("match_adam", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_muon_equals_torch_in_float32(shape, match_adam, nesterov, monkeypatch):
    # torch rounds to bfloat16 on the way in; a copy, because it writes to the tensor that it makes there
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    parameter = torch.nn.Parameter(gaussian(*shape))
    theirs = torch.optim.Muon(
        [parameter],
        lr=0.05,
        weight_decay=0.1,
        momentum=0.9,
        nesterov=nesterov,
        adjust_lr_fn="match_rms_adamw" if match_adam else "original",
    )
    rule = MuonRule(0.9, 0.1, PolarRule(FIXED), nesterov=nesterov, match_adam=match_adam)
    weights, momentum = gaussian(1, *shape), torch.zeros(1, *shape)
    for seed in range(4):
        grad = gaussian(*shape, seed=seed + 10)
        before = weights.clone()
        muon_update(weights, grad[None], momentum, rule, 0.05)
        old, parameter.grad = parameter.detach().clone(), grad.clone()
        theirs.step()
        ours, published = weights[0] - before[0], parameter.detach() - old
        assert float((ours - published).norm() / published.norm()) < 2e-6
    torch.testing.assert_close(momentum[0], theirs.state[parameter]["momentum_buffer"], atol=1e-7, rtol=1e-6)


def test_matrices_updated_alone_equal_the_whole_vector():
    flat, grad = gaussian(LAYOUT.numel), gaussian(LAYOUT.numel, seed=1)
    whole = Muon(matrix_batches(LAYOUT, {"qc": 2, "kv": 2}), 0.9, 0.1)
    alone, momentum = flat.clone(), torch.zeros(LAYOUT.numel)
    rule = MuonRule(0.9, 0.1, polar_rule("cpu"))
    for lr in (0.1, 0.05):
        whole.step(flat, grad, lr)
        for name, rows in (("contract.0", 4), ("kv.0", 2), ("qc.1", 2), ("qc.0", 2)):
            where = LAYOUT.slices[LAYOUT.index[name]]
            parts = (
                x[where].view(-1, rows, LAYOUT.tensors[LAYOUT.index[name]].shape[1]) for x in (alone, grad, momentum)
            )
            muon_update(*parts, rule, lr)
    torch.testing.assert_close(alone, flat, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(momentum[20:140], whole.momentum, atol=0.0, rtol=0.0)


def test_a_bfloat16_momentum_is_not_changed_by_the_polar_factor():
    grad, momentum = gaussian(2, 8, 16), torch.zeros(2, 8, 16, dtype=torch.bfloat16)
    rule = MuonRule(0.9, 0.0, polar_rule("cuda"))
    for _ in range(2):
        muon_update(torch.zeros(2, 8, 16), grad, momentum, rule, 0.1)
    torch.testing.assert_close(momentum.float(), grad * 0.19, atol=0.0, rtol=1e-2)


def test_adamw_equals_torch():
    flat, parameter = gaussian(24), torch.nn.Parameter(gaussian(24)[4:20].clone())
    ours = AdamW((slice(4, 10), slice(10, 20)), weight_decay=0.1)
    theirs = torch.optim.AdamW([parameter], lr=0.03, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    untouched = flat[:4].clone()
    for seed in range(5):
        grad = gaussian(24, seed=seed + 10)
        ours.step(flat, grad, 0.03)
        parameter.grad = grad[4:20].clone()
        theirs.step()
    torch.testing.assert_close(flat[4:20], parameter.data)
    assert torch.equal(flat[:4], untouched)


def test_state_comes_back_and_a_wrong_one_changes_nothing():
    grads = [gaussian(LAYOUT.numel, seed=s) for s in range(4)]
    one = InnerOptimizer(LAYOUT, {"qc": 2, "kv": 2}, 0.95, 0.0)
    flat = gaussian(LAYOUT.numel, seed=9)
    for grad in grads[:2]:
        one.step(flat, grad, 0.1, 0.1)
    two = InnerOptimizer(LAYOUT, {"qc": 2, "kv": 2}, 0.95, 0.0)
    two.load_state_arrays(one.state_arrays())
    copy = flat.clone()
    for grad in grads[2:]:
        one.step(flat, grad, 0.1, 0.1)
        two.step(copy, grad, 0.1, 0.1)
    assert torch.equal(flat, copy)
    kept = two.state_arrays()
    for broken in ({}, {**kept, "adam_first": kept["adam_first"][:-1]}):
        with pytest.raises(ValueError, match="optimizer state"):
            two.load_state_arrays(broken)
    assert all(np.array_equal(kept[name], array) for name, array in two.state_arrays().items())
    two.reset()
    assert not any(array.any() for array in two.state_arrays().values())
