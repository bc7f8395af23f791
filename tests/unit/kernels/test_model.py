"""The tscale transformer: against a naive reference, causality, gradients, and parameters as views of one vector."""

import math

import numpy as np
import pytest
import torch

from tscale.kernels import attention, block
from tscale.kernels.attention import attention_path
from tscale.kernels.attention_rule import ScoreRule
from tscale.kernels.block import output_bias
from tscale.kernels.init import init_state
from tscale.kernels.model import TscaleModel
from tscale.kernels.model_config import LayerReach, ModelConfig, layer_reaches

SMALL = ModelConfig("tscale", width=16, heads=2, head_dim=8, layers=4, window=12, vocab=11, relu=2)
COUNTS = np.arange(11, dtype=np.int64)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def filled(cfg: ModelConfig, seed: int = 3) -> torch.Tensor:
    """Parameters without the zero matrices of the start, so that every part of the model matters."""
    noise = np.random.default_rng(seed).standard_normal(init_state(cfg, 1).size)
    return torch.from_numpy((init_state(cfg, 1) + 0.5 * noise).astype(np.float32))


def model_of(cfg: ModelConfig = SMALL, flat: torch.Tensor | None = None) -> TscaleModel:
    return TscaleModel(cfg, filled(cfg) if flat is None else flat, np.arange(cfg.vocab, dtype=np.int64))


def tokens(batch: int, positions: int, vocab: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, vocab, (batch, positions)))


# --- the reference: one position at a time, float64, straight from the published equations -----------------------


def norm(x, group):
    grouped = x.reshape(-1, group)
    return (grouped / np.sqrt((grouped**2).mean(1, keepdims=True) + 1e-6)).ravel()


def rope_head(x, position):
    q = x.size
    half, out = q // 4, x.copy()
    for part in range(2):
        for i in range(half):
            angle = position * 500000.0 ** (-2.0 * (part * half + i) / q)
            lo, hi = 2 * part * half + i, 2 * part * half + half + i
            out[lo] = x[lo] * math.cos(angle) - x[hi] * math.sin(angle)
            out[hi] = x[lo] * math.sin(angle) + x[hi] * math.cos(angle)
    return out


def reference_logits(cfg, weights, sequence, doc_start):
    d, q, heads, r = cfg.width, cfg.head_dim, cfg.heads, cfg.combine
    states = [weights["embed"][token].copy() for token in sequence]
    for layer, reach in enumerate(layer_reaches(cfg)):
        wq, wc = np.split(weights[f"qc.{layer}"], 2)
        wk, wv = np.split(weights[f"kv.{layer}"], 2)
        zs = [norm(s, q) for s in states]
        for t, z in enumerate(zs):
            c = norm(wc @ z / math.sqrt(d), q)
            products = np.zeros(heads * q * r)
            for h in range(heads):
                part = slice(h * q, (h + 1) * q)
                query = rope_head(norm(wq @ z / math.sqrt(d), q)[part], t)
                total, value = 1.0, np.zeros(q)
                for j in range(max(doc_start[t], t - reach.window), t):
                    key = rope_head((wk @ zs[j] / math.sqrt(d))[part], j)
                    w = math.exp(0.5 * (query @ key) / math.sqrt(q) - 0.693 * reach.slope * (t - j))
                    total += w
                    value += w * norm(wv @ zs[j] / math.sqrt(d), q)[part]
                a = value / total
                for i in range(q):
                    for row in range(r):
                        column = ((h * (q // r) + i // r) * r + row) * r + i % r
                        products[column] = c[part][i ^ row] * a[i]
            states[t] = states[t] + weights[f"combine.{layer}"] @ products / math.sqrt(products.size)
        for t, s in enumerate(states):
            hidden = np.maximum(norm(weights[f"expand.{layer}"] @ norm(s, q) / math.sqrt(d), q), 0.0)
            states[t] = s + weights[f"contract.{layer}"] @ hidden / math.sqrt(hidden.size)
    bias = output_bias(np.arange(cfg.vocab)).numpy()
    return np.stack([weights["head"] @ norm(s, q) / math.sqrt(d) + bias for s in states])


@pytest.mark.parametrize("starts", [[0] * 20, [0] * 5 + [5] * 9 + [14] * 6])
def test_equals_the_naive_reference(starts):
    flat = filled(SMALL)
    model = model_of(flat=flat)
    weights = {s.name: v.astype(np.float64) for s, v in model.layout.views(flat.numpy())}
    sequence = tokens(1, 20)
    expected = reference_logits(SMALL, weights, sequence[0].tolist(), starts)
    with torch.no_grad():
        got = model(sequence, torch.tensor([starts]))
        assert np.abs(got.numpy() - expected).max() < 1e-4
        if not any(starts):
            assert np.abs(model(sequence).numpy() - expected).max() < 1e-4


def test_single_layers_equal_the_general_path(monkeypatch):
    model, sequence = model_of(), tokens(3, 9)
    with torch.no_grad():
        fast = model(sequence)

        def general(run, qkv):
            return block.look_back(run, LayerReach(1, 0.0), qkv)

        monkeypatch.setattr(block, "look_at_previous", general)
        monkeypatch.setattr(attention, "BANDED_FROM_WINDOWS", 1 << 30)
        slow = model(sequence)
    assert [r.window for r in model.reaches].count(1) == 2
    torch.testing.assert_close(fast, slow, atol=2e-5, rtol=1e-5)


def test_a_long_sequence_takes_the_banded_path_and_agrees(monkeypatch):
    cfg = ModelConfig("tscale", 16, 2, 8, 4, 320, 11, 1)
    sequence, flat = tokens(1, 256), filled(cfg)
    reach = layer_reaches(cfg)[2]
    assert attention_path(ScoreRule(reach.window, reach.slope, 1.0), 256, False, "cpu") == "band"
    with torch.no_grad():
        banded = model_of(cfg, flat)(sequence)
        monkeypatch.setattr(attention, "BANDED_FROM_WINDOWS", 1 << 30)
        square = model_of(cfg, flat)(sequence)
    torch.testing.assert_close(banded, square, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_a_token_changes_only_its_own_and_later_logits(changed):
    model, sequence = model_of(), tokens(2, 16)
    other = sequence.clone()
    other[0, changed] = (other[0, changed] + 1) % 11
    with torch.no_grad():
        difference = (model(sequence) - model(other)).abs().amax(1).view(2, 16)
    assert difference[1].max() == 0.0
    assert difference[0, :changed].sum() == 0.0
    assert difference[0, changed] > 1e-3
    assert changed == 15 or difference[0, changed + 1 :].max() > 1e-3


def test_nothing_crosses_a_document_start():
    model, sequence = model_of(), tokens(1, 14)
    starts = torch.tensor([[0] * 6 + [6] * 8])
    with torch.no_grad():
        together = model(sequence, starts)
        alone = model(sequence[:, 6:])
    torch.testing.assert_close(together[6:], alone, atol=2e-5, rtol=1e-5)


def test_every_parameter_gets_a_gradient():
    cfg = ModelConfig("tscale", 16, 2, 8, 6, 12, 11, 2)
    flat = filled(cfg)
    model, grad = model_of(cfg, flat), torch.zeros_like(flat)
    model.bind_grad(grad)
    model.loss(tokens(8, 33)).backward()
    for spec, view in model.layout.views(grad.numpy()):
        rows = np.abs(view).max(axis=1)
        assert rows.min() > 0.0, spec.name


def test_gradient_equals_finite_differences():
    flat = filled(SMALL)
    model, grad, sequence = model_of(flat=flat), torch.zeros_like(flat), tokens(2, 21)
    model.bind_grad(grad)
    model.loss(sequence).backward()
    noise = torch.Generator().manual_seed(8)
    for where in model.layout.slices:
        direction = torch.zeros_like(flat)
        direction[where] = torch.randn(where.stop - where.start, generator=noise)
        direction /= direction.norm()
        with torch.no_grad():
            base, step = flat.clone(), 1e-2
            flat.copy_(base + step * direction)
            up = model.loss(sequence).double()
            flat.copy_(base - step * direction)
            down = model.loss(sequence).double()
            flat.copy_(base)
        slope, expected = float((up - down) / (2 * step)), float(grad @ direction)
        assert abs(slope - expected) < 1e-3 + 0.02 * abs(expected)


def test_parameters_are_views_of_the_flat_vector():
    flat = filled(SMALL)
    model, sequence = model_of(flat=flat), tokens(1, 8)
    with torch.no_grad():
        before = model(sequence)
        flat.mul_(0.5)
        assert (model(sequence) - before).abs().max() > 1e-3
        model.head.fill_(0.0)
        assert float(flat[model.layout.slices[-1]].abs().max()) == 0.0
        expected = output_bias(COUNTS).expand(8, 11)
        torch.testing.assert_close(model(sequence), expected)


def test_binding_other_contents_changes_the_output_and_back():
    first, second = filled(SMALL, 1), filled(SMALL, 2)
    model, sequence = model_of(flat=first), tokens(1, 8)
    with torch.no_grad():
        one = model(sequence)
        model.bind(second)
        other = model(sequence)
        assert torch.equal(other, model_of(flat=second)(sequence))
        model.bind(first)
        assert torch.equal(model(sequence), one) and not torch.equal(one, other)


def test_the_start_predicts_about_the_unigram_distribution():
    cfg = ModelConfig("tscale", 32, 1, 16, 4, 16, 256, 1)
    text = np.random.default_rng(0).choice(256, 4000, p=np.arange(1, 257) / np.arange(1, 257).sum())
    counts = np.bincount(text, minlength=256)
    model = TscaleModel(cfg, torch.from_numpy(init_state(cfg, 0)), counts)
    share = counts[counts > 0] / counts.sum()
    entropy = -(share * np.log(share)).sum()
    loss = float(model.loss(torch.from_numpy(text.reshape(100, 40))).detach())
    assert 0.0 < loss - entropy < 0.2


def test_a_product_of_ones_own_replaces_the_five_of_every_layer_and_no_other():
    seen = []

    def product(weight_NK, x_KM):
        seen.append(tuple(weight_NK.shape))
        return torch.mm(weight_NK, x_KM)

    flat, sequence = filled(SMALL), tokens(2, 13)
    plain = model_of(flat=flat)
    own = TscaleModel(SMALL, flat, COUNTS, product)
    grads = [torch.zeros_like(flat) for _ in range(2)]
    for model, grad in zip((plain, own), grads, strict=True):
        model.bind_grad(grad)
        model.loss(sequence).backward()
    shapes = [(32, 16), (32, 16), (16, 64), (32, 16), (16, 32)]
    assert seen == shapes * SMALL.layers
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)
    assert float(grads[0].abs().max()) > 1e-2


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="unigram counts"):
        TscaleModel(SMALL, filled(SMALL), np.ones(5, np.int64))
    with pytest.raises(ValueError, match="float32 parameters"):
        TscaleModel(SMALL, filled(SMALL)[:-1], COUNTS)
