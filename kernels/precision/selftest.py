"""A small product through the chosen precision at start: when it is wrong here, the next one down is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

import torch

from tscale.kernels.block import Product
from tscale.kernels.precision.capabilities import Capabilities
from tscale.kernels.precision.products import product_of
from tscale.kernels.precision.select import Backend, Candidate, PrecisionPath, select

_LOG = logging.getLogger(__name__)

MAX_ERROR = MappingProxyType(
    {
        PrecisionPath.FP8_BLOCK: 0.1,
        PrecisionPath.FP8_TENSOR: 0.1,
        PrecisionPath.FP8_STORAGE: 0.1,
        PrecisionPath.INT8_FORWARD: 0.04,
        PrecisionPath.BF16: 0.01,
        PrecisionPath.FP16: 0.003,
        PrecisionPath.FP32: 1e-4,
    }
)
"""Largest error of a row or column of a result, by its norm: about twice what rounding gives (a tile of 16 that is
wrong gives 0.2 or more)."""

_SIZES_NKM = (272, 400, 304)
"""Multiples of 16 that are no multiples of 128: cut-off blocks on every side."""


@dataclass(frozen=True)
class StepDown:
    """A candidate that was not taken, and why."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Precision:
    """What this machine computes with. `reason` and `granted` are the selection's; `steps` failed before."""

    candidate: Candidate
    reason: str
    granted: bool = True
    steps: tuple[StepDown, ...] = ()

    @property
    def path(self) -> PrecisionPath:
        """The path alone."""
        return self.candidate.path

    @property
    def text(self) -> str:
        """One line for people: what is used and why, and what was tried before."""
        tried = [f"{step.candidate} failed: {step.reason}" for step in self.steps]
        return f"{self.candidate}: {'; '.join((self.reason, *tried))}"

    @property
    def warning(self) -> str:
        """`text` when it is not what the machine or the person would have; else empty."""
        return f"training in {self.text}" if self.steps or not self.granted else ""


Make = Callable[[Candidate], Product | None]


def choose(machine: Capabilities, wish: str = "auto", make: Make = product_of) -> tuple[Precision, Product | None]:
    """The first candidate of `select` that passes the self-test, and its product.

    float32 is taken untested: below it there is nothing. Raises ValueError for an unknown wish.
    """
    selection = select(machine, wish)
    steps: list[StepDown] = []
    for candidate in selection.ladder:
        if candidate.path == PrecisionPath.FP32:
            break
        try:
            product = make(candidate)
            fault = "" if product is None else product_fault(product, candidate.path, machine.torch_device)
        except Exception as error:  # noqa: BLE001 - drivers and compilers raise anything; each is a reason to step down
            fault = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else 'no message'}"
        if not fault:
            return Precision(candidate, selection.reason, selection.granted, tuple(steps)), product
        _LOG.warning("precision_step_down path=%s backend=%s reason=%s", candidate.path, candidate.backend, fault)
        steps.append(StepDown(candidate, fault))
    last = Candidate(PrecisionPath.FP32, Backend.TORCH)
    return Precision(last, selection.reason, selection.granted, tuple(steps)), None


def product_fault(product: Product, path: PrecisionPath, device: str = "cpu") -> str:
    """What is wrong with a product of this path on this device; empty when it is right.

    Compares the product and both gradients with float64 ones, row by row and column by column, so that one wrong tile
    shows. Raises whatever the product raises.
    """
    weight, x, grad = (tensor.to(device) for tensor in _operands())
    weight.requires_grad_()
    x.requires_grad_()
    y = product(weight, x)
    y.backward(grad)
    w64, x64, g64 = (t.detach().to("cpu", torch.float64) for t in (weight, x, grad))
    results = (("product", y, w64 @ x64), ("weight gradient", weight.grad, g64 @ x64.t()))
    for name, found, expected in (*results, ("input gradient", x.grad, w64.t() @ g64)):
        if found is None or found.shape != expected.shape:
            return f"the {name} is missing or has a wrong shape"
        error = max(_errors(found.detach().to("cpu", torch.float64), expected))
        if not error <= MAX_ERROR[path]:
            return f"the {name} is off by {error:.2g} of its size, at most {MAX_ERROR[path]:g} is rounding"
    return "" if _shows_what_is_not_finite(product, weight, x) else "a NaN or an infinity disappears in it"


def _shows_what_is_not_finite(product: Product, weight: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a diverged activation makes its token's results not finite: the loss must show it."""
    with torch.no_grad():
        x = x.detach().clone()
        x[3, 5], x[200, 250] = torch.nan, torch.inf
        y = product(weight, x)
        return not bool(torch.isfinite(y[:, [5, 250]]).any())


def _errors(found: torch.Tensor, expected: torch.Tensor) -> Iterator[float]:
    """The worst relative error of a row, and of a column; NaN when a value is NaN."""
    for axis in (0, 1):
        yield float(((found - expected).norm(dim=axis) / expected.norm(dim=axis)).amax().nan_to_num(torch.inf))


def _operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight [N, K], activations [K, M], a gradient [N, M]: small values, of another size for every token."""
    n, k, m = _SIZES_NKM
    noise = torch.Generator().manual_seed(1)
    weight = torch.randn(n, k, generator=noise) * 0.5
    x = torch.randn(k, m, generator=noise)
    sizes = torch.exp2(torch.randn(1, m, generator=noise) - 20.0)
    return weight, x, torch.randn(n, m, generator=noise) * sizes
