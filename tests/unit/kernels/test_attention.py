"""Attention: every path against a naive reference in float64, the choice of path, and memory linear in the context."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tscale.kernels import attention_band
from tscale.kernels.attention import attention_path, window_attention
from tscale.kernels.attention_band import band_attention
from tscale.kernels.attention_blocks import block_attention
from tscale.kernels.attention_flex import BLOCK, flex_slot_attention, slot_blocks
from tscale.kernels.attention_rule import ScoreRule

HEADS, WIDTH = 2, 4


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def slots(batch: int, positions: int, seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys and values [H, Q, B*T] in float64, with the virtual entry in slot 0."""
    noise = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(HEADS, WIDTH, batch, positions, generator=noise, dtype=torch.float64) * size for size in (1, 2, 1)
    )
    k[..., 0], v[..., 0] = 0.0, 0.0
    return [x.reshape(HEADS, WIDTH, -1) for x in (q, k, v)]


def documents(batch: int, positions: int, mean_length: int) -> torch.Tensor:
    starts = torch.rand(batch, positions, generator=torch.Generator().manual_seed(7)) < 1 / mean_length
    return torch.where(starts, torch.arange(positions), 0).cummax(1).values


def naive(q_HQM, k_HQM, v_HQM, shape, rule, doc_start_BT):
    """One query at a time, straight from the published equation."""
    q, k, v = (x.view(HEADS, WIDTH, *shape) for x in (q_HQM, k_HQM, v_HQM))
    out = []
    for b in range(shape[0]):
        for t in range(shape[1]):
            first = max(0 if doc_start_BT is None else int(doc_start_BT[b, t]), t - rule.window)
            token = torch.arange(first, t)
            scores = rule.scale * torch.einsum("hq,hqs->hs", q[:, :, b, t], k[:, :, b, token + 1])
            weight = torch.exp(scores - 0.693 * rule.slope * (t - token).double())
            value = torch.einsum("hs,hqs->hq", weight, v[:, :, b, token + 1])
            out.append(value / (1.0 + weight.sum(1, keepdim=True)))
    return torch.stack(out, dim=2)


def with_gradients(attend, tensors, dtype=torch.float64):
    """What `attend` gives and the gradients of queries, keys and values, without those of the virtual entry."""
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    out = attend(*leaves)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, probe.to(dtype))]


def assert_equal(got, want, shape, tolerance):
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        first = 1 if index >= 2 else 0
        one, other = (x.reshape(HEADS, WIDTH, *shape)[..., first:].double() for x in (one, other))
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mean_length", [0, 3, 90], ids=["whole", "short-documents", "long-documents"])
@pytest.mark.parametrize(("positions", "window"), [(1, 4), (65, 1), (150, 9), (130, 64), (129, 500), (300, 128)])
def test_blocks_equal_the_naive_reference_in_float64(positions, window, mean_length):
    shape, rule = (2, positions), ScoreRule(window, 0.25, 0.3)
    doc_start_BT = documents(*shape, mean_length) if mean_length else None
    want = with_gradients(lambda *x: naive(*x, shape, rule, doc_start_BT), slots(*shape))
    got = with_gradients(lambda *x: block_attention(*x, shape, rule, doc_start_BT), slots(*shape))
    assert_equal(got, want, shape, 1e-12)


@pytest.mark.parametrize("mean_length", [0, 5], ids=["whole", "documents"])
@pytest.mark.parametrize(("positions", "window"), [(1, 3), (3, 3), (4, 3), (40, 7), (42, 7), (33, 1), (5, 9)])
def test_band_equals_the_naive_reference_for_any_length(positions, window, mean_length, monkeypatch):
    monkeypatch.setattr(attention_band, "BLOCKS_AT_ONCE", 4)
    shape, rule = (2, positions), ScoreRule(window, 0.5, 0.3)
    doc_start_BT = documents(*shape, mean_length) if mean_length else None
    want = with_gradients(lambda *x: naive(*x, shape, rule, doc_start_BT), slots(*shape))
    got = with_gradients(lambda *x: band_attention(*x, shape, rule, doc_start_BT), slots(*shape))
    assert_equal(got, want, shape, 1e-12)


CASES = [
    ("causal", 300, ScoreRule(299, 0.0, 0.3), False),
    ("band", 300, ScoreRule(64, 0.5, 0.3), False),
    ("square", 50, ScoreRule(64, 0.5, 0.3), False),
    ("square", 50, ScoreRule(20, 0.0, 0.3), False),
    ("square", 50, ScoreRule(50, 0.0, 0.3), True),
    ("band", 300, ScoreRule(64, 0.5, 0.3), True),
    ("blocks", 300, ScoreRule(300, 0.0, 0.3), True),
    ("blocks", 300, ScoreRule(200, 0.0, 0.3), False),
]


@pytest.mark.parametrize(("path", "positions", "rule", "cut"), CASES)
def test_the_chosen_path_equals_the_naive_reference(path, positions, rule, cut):
    shape = (2, positions)
    doc_start_BT = documents(*shape, 40) if cut else None
    assert attention_path(rule, positions, cut, "cpu") == path
    want = with_gradients(lambda *x: naive(*x, shape, rule, doc_start_BT), slots(*shape))
    got = with_gradients(lambda *x: window_attention(*x, shape, rule, doc_start_BT), slots(*shape), torch.float32)
    assert_equal(got, want, shape, 5e-5)


def test_a_gpu_takes_the_fused_kernel_unless_the_context_is_short():
    narrow, wide = ScoreRule(64, 0.5, 0.3), ScoreRule(2048, 0.0, 0.3)
    for rule in (narrow, wide):
        assert {attention_path(rule, 257, cut, "cuda") for cut in (False, True)} == {"flex"}
    assert [attention_path(rule, 256, False, "cuda") for rule in (narrow, wide)] == ["square", "causal"]


@pytest.mark.parametrize("cut", [block_attention, band_attention])
def test_large_scores_neither_overflow_nor_vanish(cut):
    shape, rule = (1, 80), ScoreRule(20, 0.0, 15.0)
    want = naive(*slots(*shape), shape, rule, None)
    got = cut(*(x.float() for x in slots(*shape)), shape, rule)
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got.double(), want, atol=1e-3, rtol=1e-3)


# --- the fused kernel: what it is told, by its unfused twin on the CPU ------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("mean_length", [0, 30])
@pytest.mark.parametrize(("positions", "rule"), [(140, ScoreRule(64, 0.5, 0.3)), (90, ScoreRule(90, 0.0, 0.3))])
def test_flex_equals_the_naive_reference(positions, rule, mean_length):
    shape = (2, positions)
    doc_start_BT = documents(*shape, mean_length) if mean_length else None
    by_head = [x.float().view(HEADS, WIDTH, *shape).permute(2, 0, 3, 1) for x in slots(*shape)]
    got = flex_slot_attention(*by_head, rule, doc_start_BT).permute(1, 3, 0, 2).reshape(HEADS, WIDTH, -1)
    torch.testing.assert_close(got.double(), naive(*slots(*shape), shape, rule, doc_start_BT), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mean_length", [0, 50, 400])
@pytest.mark.parametrize(("positions", "window"), [(1, 5), (128, 1), (700, 64), (700, 128), (700, 129), (700, 1000)])
def test_flex_lists_exactly_the_blocks_that_hold_visible_slots(positions, window, mean_length):
    doc_start_BT = documents(2, positions, mean_length) if mean_length else None
    rule = ScoreRule(window, 0.0, 1.0)
    visible = rule.square(positions, doc_start_BT).expand(2, 1, positions, positions).isfinite().squeeze(1)
    count = math.ceil(positions / BLOCK)
    mask = slot_blocks(2, positions, rule, doc_start_BT, torch.device("cpu"))

    def listed(number_B1N, index_B1NN):
        sets = torch.zeros(2, count, count, dtype=torch.bool)
        for b in range(2):
            for row in range(count):
                sets[b, row, index_B1NN[b, 0, row, : number_B1N[b, 0, row]].long()] = True
        return sets

    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    part = listed(mask.kv_num_blocks, mask.kv_indices)
    row_wise = torch.nn.functional.pad(visible, (0, -positions % BLOCK)).unflatten(2, (count, BLOCK))
    needed = torch.stack([rows.any(3).any(1) for rows in row_wise.split(BLOCK, 1)], 1)
    full = torch.stack([rows.all(3).all(1) for rows in row_wise.split(BLOCK, 1)], 1)
    assert not bool((whole & part).any())
    assert torch.equal(whole | part, needed)
    assert not bool((whole & ~full).any())
    if window == 1000 and not mean_length:
        assert int(whole.sum()) == 2 * (5 + 4 + 3 + 2 + 1 - 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rule", [ScoreRule(64, 0.5, 0.1), ScoreRule(1024, 0.0, 0.1)])
def test_the_fused_kernel_on_a_gpu_equals_the_blocks_on_the_cpu(rule):
    shape, doc_start_BT = (2, 700), documents(2, 700, 200)
    noise = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 64, 2, 700, generator=noise) for _ in range(3))
    k[..., 0], v[..., 0] = 0.0, 0.0
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.reshape(2, 64, -1).to(device).requires_grad_() for x in (q, k, v)]
        out = window_attention(*leaves, shape, rule, doc_start_BT.to(device))
        out.square().sum().backward()
        results.append([out.detach().cpu(), *(x.grad.view(2, 64, 2, 700)[..., 1:].cpu() for x in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


# --- memory ------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """The most bytes that one operation's result takes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(out):
            if isinstance(one, torch.Tensor):
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return out


def memory_of(positions: int, rule: ScoreRule, cut: bool) -> tuple[int, int]:
    """Bytes kept for the way back, and of the largest tensor on both ways."""
    shape, kept = (1, positions), {}
    doc_start_BT = documents(*shape, 4000) if cut else None
    leaves = [x.float().requires_grad_() for x in slots(*shape)]

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = window_attention(*leaves, shape, rule, doc_start_BT)
        out.sum().backward()
    return sum(kept.values()), largest.bytes


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize(("window", "slope"), [(64, 0.5), (8192, 0.0), (320, 0.0)])
def test_memory_grows_with_the_context_and_not_with_its_square(window, slope, cut):
    rule = ScoreRule(window, slope, 0.3)
    small, large = memory_of(512, rule, cut), memory_of(2048, rule, cut)
    assert large[0] < 4.5 * small[0]
    assert large[1] < 4.5 * small[1]
    assert large[0] < 2048 * 1024  # a mask of 2048 x 2048 takes 16 MiB
