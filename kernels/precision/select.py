"""Which precision suits a machine: a pure function of its capabilities, and what to fall back to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tscale.kernels.precision.capabilities import Capabilities


class PrecisionPath(StrEnum):
    """How the five matrix products of a layer are computed. Everything accumulates in float32 (int8: in int32)."""

    FP8_BLOCK = "fp8-block"
    """All three products in e4m3, scales per 1x128 (activations, gradients) and 128x128 (weights)."""
    FP8_TENSOR = "fp8-tensor"
    """All three products in e4m3, one scale a tensor."""
    FP8_STORAGE = "fp8-storage"
    """Weights held in e4m3 with 128x128 scales, products in bf16."""
    INT8_FORWARD = "int8-forward"
    """The forward product in int8, a scale per token and one per weight matrix; gradients in bf16."""
    BF16 = "bf16"
    FP16 = "fp16"
    """With a power of two per tensor as scale, so that small gradients survive."""
    FP32 = "fp32"


class Backend(StrEnum):
    """Who multiplies. Emulation rounds as the formats do and multiplies in float32: for CPUs and for comparisons."""

    TRITON = "triton"
    SCALED_MM = "scaled_mm"
    TORCH = "torch"
    EMULATION = "emulation"


@dataclass(frozen=True)
class Candidate:
    """A path with the one who computes it."""

    path: PrecisionPath
    backend: Backend

    def __str__(self) -> str:
        return str(self.path) if self.backend == Backend.TORCH else f"{self.path} ({self.backend})"


@dataclass(frozen=True)
class Selection:
    """The first candidate and the ones to step down to, in order. `reason` is one line for people; `granted` is False
    when the machine can't do what the person asked for."""

    ladder: tuple[Candidate, ...]
    reason: str
    granted: bool = True

    @property
    def path(self) -> PrecisionPath:
        """What is used when the self-test passes."""
        return self.ladder[0].path


WISHES = ("auto", "fp32", "bf16", "fp8", "int8")
"""What a person may ask for."""


def select(machine: Capabilities, wish: str = "auto") -> Selection:
    """The precision for a machine: the fastest that learns equally well, or what the person asked for.

    A wish that the hardware has no units for is emulated on a CPU and refused (with the reason) on a GPU, where the
    automatic choice takes its place. Raises ValueError for a wish that is none of WISHES.
    """
    if wish not in WISHES:
        raise ValueError(f"precision must be one of {', '.join(WISHES)}, not {wish!r}")
    if wish == "auto":
        return _automatic(machine)
    path = _wished(machine, wish)
    if path is None:
        chosen = _automatic(machine)
        return Selection(chosen.ladder, f"{machine.name} has no units for {wish}", granted=False)
    return Selection(_ladder(machine, path), f"{wish} was asked for")


def int8_is_faster(machine: Capabilities) -> bool:
    """Whether int8 beats fp8 by much: GeForce RTX 40 halves fp8 with float32 sums (526 against 310 TOPS on a 4090)."""
    return machine.device == "cuda" and (machine.major, machine.minor) == (8, 9)


def _automatic(machine: Capabilities) -> Selection:
    path, why = _best(machine)
    return Selection(_ladder(machine, path), f"{machine.name}: {why}")


def _best(machine: Capabilities) -> tuple[PrecisionPath, str]:
    if machine.device == "cuda":
        return _best_cuda(machine)
    if machine.device == "rocm" and _has_fp8(machine):
        return PrecisionPath.FP8_TENSOR, "fp8 units, used through torch"
    if machine.device in ("rocm", "mps") and machine.bf16:
        return PrecisionPath.BF16, "bf16 units, no fp8 units that can be used"
    if machine.device == "cpu":
        return PrecisionPath.FP32, "a CPU multiplies float32 fastest"
    return PrecisionPath.FP32, "no units for shorter formats are known"


def _best_cuda(machine: Capabilities) -> tuple[PrecisionPath, str]:
    if _has_fp8(machine):
        if machine.triton:
            return PrecisionPath.FP8_BLOCK, "fp8 units"
        return PrecisionPath.FP8_TENSOR, "fp8 units, but no triton for block scales"
    if machine.major == 8 and machine.minor > 0:
        return PrecisionPath.FP8_STORAGE, "bf16 units, and fp8 halves what streamed weights take"
    if machine.major >= 8:
        return PrecisionPath.BF16, "bf16 units, no fp8 units"
    if machine.major == 7:
        return PrecisionPath.FP16, "fp16 units, no bf16 units"
    return PrecisionPath.FP32, "no units for shorter formats"


def _has_fp8(machine: Capabilities) -> bool:
    """Units for the OCP e4m3 format. AMD's older ones (gfx942) have an e4m3 with another bias and largest value."""
    if machine.device == "cuda":
        return (machine.major, machine.minor) >= (8, 9)
    return machine.device == "rocm" and machine.arch.startswith("gfx12")


def _wished(machine: Capabilities, wish: str) -> PrecisionPath | None:
    """The path that a wish means here; None when the hardware can't."""
    on_cpu = machine.device == "cpu"
    if wish == "fp8":
        if on_cpu:
            return PrecisionPath.FP8_BLOCK
        best = _best(machine)[0]
        return best if best.startswith("fp8") else None
    if wish == "int8":
        has_int8 = machine.device == "cuda" and (machine.major, machine.minor) >= (7, 5)
        return PrecisionPath.INT8_FORWARD if on_cpu or has_int8 else None
    if wish == "bf16":
        return PrecisionPath.BF16 if on_cpu or machine.bf16 else None
    return PrecisionPath.FP32


def _ladder(machine: Capabilities, path: PrecisionPath) -> tuple[Candidate, ...]:
    """From `path` down to float32, with what the machine can run."""
    below = {
        PrecisionPath.FP8_BLOCK: (PrecisionPath.FP8_TENSOR,),
        PrecisionPath.FP16: (),
        PrecisionPath.FP32: (),
    }
    halves = (PrecisionPath.BF16,) if machine.bf16 or machine.device == "cpu" else ()
    rest = (*below.get(path, ()), *halves, PrecisionPath.FP32)
    paths = (path, *(p for p in rest if p != path)) if path != PrecisionPath.FP32 else (path,)
    return tuple(Candidate(p, _backend(machine, p)) for p in paths)


def _backend(machine: Capabilities, path: PrecisionPath) -> Backend:
    if path == PrecisionPath.FP32:
        return Backend.TORCH
    if machine.device == "cpu":
        return Backend.EMULATION
    if path == PrecisionPath.FP8_BLOCK:
        return Backend.TRITON
    if path == PrecisionPath.FP8_TENSOR:
        return Backend.SCALED_MM
    return Backend.TORCH
