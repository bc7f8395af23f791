"""The blocked loss of the head against torch's cross-entropy over all logits at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tscale.kernels import head
from tscale.kernels.block import logits
from tscale.kernels.head import block_tokens, head_loss
from tscale.kernels.model_config import ModelConfig

CFG = ModelConfig("tscale", 16, 2, 8, 4, 12, 11, 2)
TOKENS = 40


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def given() -> tuple[torch.Tensor, ...]:
    noise = torch.Generator().manual_seed(4)
    weight_VD, state_DM = torch.randn(11, 16, generator=noise), torch.randn(16, TOKENS, generator=noise)
    targets_M = torch.randint(0, 11, (TOKENS,), generator=noise)
    return weight_VD.requires_grad_(), torch.randn(11, generator=noise), state_DM.requires_grad_(), targets_M


@pytest.mark.parametrize("block", [1, 7, 20, 39, TOKENS, 100])
def test_loss_and_gradients_are_those_of_all_logits_at_once(monkeypatch, block: int) -> None:
    monkeypatch.setattr(head, "LEAST_BLOCK_TOKENS", block)
    monkeypatch.setattr(head, "BLOCK_BYTES", 4)
    weight_VD, bias_V, state_DM, targets_M = given()
    loss = head_loss(CFG, weight_VD, bias_V, state_DM, targets_M)
    # a factor on the loss reaches the gradients, and a gradient that is there is added to
    weight_VD.grad = torch.ones_like(weight_VD)
    (loss * 0.25).backward()
    got = [loss.detach(), weight_VD.grad - 1.0, state_DM.grad]
    weight_VD.grad = state_DM.grad = None
    expected = F.cross_entropy(logits(CFG, weight_VD, bias_V, state_DM), targets_M)
    (expected * 0.25).backward()
    assert float(weight_VD.grad.abs().median()) > 1e-4
    for one, other in zip(got, (expected.detach(), weight_VD.grad, state_DM.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_without_a_gradient_the_loss_has_the_same_bits(monkeypatch) -> None:
    monkeypatch.setattr(head, "LEAST_BLOCK_TOKENS", 7)
    monkeypatch.setattr(head, "BLOCK_BYTES", 4)
    tensors = given()
    with torch.no_grad():
        plain = head_loss(CFG, *tensors)
    loss = head_loss(CFG, *tensors)
    assert not plain.requires_grad and loss.requires_grad and float(plain) == float(loss.detach())


def test_a_state_alone_or_a_table_alone_has_a_gradient() -> None:
    weight_VD, bias_V, state_DM, targets_M = given()
    head_loss(CFG, weight_VD, bias_V, state_DM, targets_M).backward()
    head_loss(CFG, weight_VD.detach(), bias_V, alone_DM := state_DM.detach().requires_grad_(), targets_M).backward()
    head_loss(CFG, other_VD := weight_VD.detach().requires_grad_(), bias_V, state_DM.detach(), targets_M).backward()
    assert torch.equal(alone_DM.grad, state_DM.grad) and torch.equal(other_VD.grad, weight_VD.grad)


def test_its_gradient_is_there_once() -> None:
    loss = head_loss(CFG, *given())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


def test_a_block_has_few_megabytes_and_enough_tokens_for_large_vocabularies() -> None:
    assert block_tokens(256) == 4096 and block_tokens(50_258) == 256
    assert all(4 * vocab * block_tokens(vocab) <= max(head.BLOCK_BYTES, 4 * vocab * 256) for vocab in range(1, 9999, 7))
