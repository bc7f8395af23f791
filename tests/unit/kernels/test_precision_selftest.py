"""The self-test at start: it passes every path as it is, finds each kind of fault, and steps down saying why."""

from collections.abc import Callable

import pytest
import torch

from tscale.kernels.precision.capabilities import Capabilities
from tscale.kernels.precision.products import product_for
from tscale.kernels.precision.select import Backend, Candidate, PrecisionPath
from tscale.kernels.precision.selftest import choose, product_fault

P = PrecisionPath
RTX4090 = Capabilities("cuda", "RTX 4090", 8, 9, "", True, 24 << 30, True)
SHORT_PATHS = [path for path in P if path != P.FP32]


def on_cpu(machine: Capabilities) -> Capabilities:
    """The same card with its tensors on the CPU, so that a test can run its ladder."""

    class OnCpu(Capabilities):
        torch_device = "cpu"  # type: ignore[assignment]

    return OnCpu(**{name: getattr(machine, name) for name in machine.__dataclass_fields__})


class Spoilt(torch.autograd.Function):
    """Spoils a result on the way out, or its gradient on the way back."""

    @staticmethod
    def forward(ctx, y, forward, backward):
        ctx.spoil = backward
        return forward(y.clone())

    @staticmethod
    def backward(ctx, grad):
        return ctx.spoil(grad.clone()), None, None


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def one_wrong_tile(x: torch.Tensor) -> torch.Tensor:
    x[16:32, 128:144] = 0.0
    return x


def finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


@pytest.mark.parametrize("path", SHORT_PATHS)
def test_every_path_passes_on_this_machine(path: PrecisionPath) -> None:
    product = product_for(path)
    assert product is not None
    assert product_fault(product, path) == ""


def test_the_plain_product_passes_as_float32_and_a_shorter_format_does_not() -> None:
    assert product_fault(torch.mm, P.FP32) == ""
    bf16, fp8 = product_for(P.BF16), product_for(P.FP8_BLOCK)
    assert bf16 is not None and fp8 is not None
    assert "is off by" in product_fault(bf16, P.FP32)
    assert "is off by" in product_fault(fp8, P.BF16)


@pytest.mark.parametrize("path", SHORT_PATHS)
@pytest.mark.parametrize(
    ("forward", "backward", "fault"),
    [
        (one_wrong_tile, same, "the product is off"),
        (same, one_wrong_tile, "gradient is off"),
        (finite, same, "NaN or an infinity disappears"),
        (lambda y: y * 1.5, same, "the product is off"),
        (same, lambda g: g * torch.nan, "gradient is off"),
    ],
)
def test_each_kind_of_fault_is_found(
    path: PrecisionPath, forward: Callable[..., torch.Tensor], backward: Callable[..., torch.Tensor], fault: str
) -> None:
    good = product_for(path)
    assert good is not None
    assert fault in product_fault(lambda w, x: Spoilt.apply(good(w, x), forward, backward), path)


def test_a_gradient_that_never_comes_is_a_fault() -> None:
    fault = product_fault(lambda w, x: torch.mm(w.detach(), x), P.FP32)
    assert fault == "the weight gradient is missing or has a wrong shape"


def test_a_machine_steps_down_until_a_path_is_right_and_says_why() -> None:
    def make(candidate: Candidate):
        if candidate.backend == Backend.TRITON:
            raise RuntimeError("PTX was compiled with a newer toolchain\nmore lines\nthat nobody reads")
        if candidate.backend == Backend.SCALED_MM:
            return lambda w, x: torch.mm(w, x) * 0.5
        return product_for(candidate.path)

    precision, product = choose(on_cpu(RTX4090), make=make)
    assert precision.path == P.BF16 and product is not None
    assert [step.candidate.path for step in precision.steps] == [P.FP8_BLOCK, P.FP8_TENSOR]
    assert precision.steps[0].reason == "RuntimeError: PTX was compiled with a newer toolchain"
    assert precision.text.startswith("bf16: RTX 4090: fp8 units; fp8-block (triton) failed: RuntimeError")
    assert "fp8-tensor (scaled_mm) failed: the product is off by 0.5" in precision.text
    assert precision.warning == f"training in {precision.text}"


def test_when_nothing_works_it_is_float32_untested() -> None:
    def make(candidate: Candidate):
        assert candidate.path != P.FP32
        raise ImportError("no kernels")

    precision, product = choose(on_cpu(RTX4090), make=make)
    assert (precision.path, product) == (P.FP32, None)
    assert len(precision.steps) == 3


def test_a_back_end_refuses_a_path_that_is_not_its_own() -> None:
    with pytest.raises(ValueError, match="scaled_mm does not do fp8-block"):
        product_for(P.FP8_BLOCK, Backend.SCALED_MM)
    with pytest.raises(ValueError, match="triton does not do fp8-tensor"):
        product_for(P.FP8_TENSOR, Backend.TRITON)


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ("auto", "fp32: CPU: a CPU multiplies float32 fastest"),
        ("fp8", "fp8-block (emulation): fp8 was asked for"),
        ("int8", "int8-forward (emulation): int8 was asked for"),
    ],
)
def test_what_this_cpu_computes_with(wish: str, text: str) -> None:
    precision, product = choose(Capabilities(), wish)
    assert precision.text == text and precision.warning == ""
    assert (product is None) == (wish == "auto")


def test_a_wish_that_the_machine_can_not_grant_is_a_warning() -> None:
    old = Capabilities("mps", "Apple GPU")
    precision, product = choose(old, "fp8")
    assert (precision.path, product) == (P.FP32, None)
    assert precision.warning == "training in fp32: Apple GPU has no units for fp8"
