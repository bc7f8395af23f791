"""What the machine can compute with: asked of torch once, then a plain value that tests can make up."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

Device = Literal["cpu", "cuda", "rocm", "mps"]


@dataclass(frozen=True)
class Capabilities:
    """One device. `major` and `minor` are CUDA's compute capability (0, 0 elsewhere), `arch` is AMD's name of the chip
    (gfx1100), `triton` says whether it is installed, `bf16` whether the device has units for it. 0 bytes: unknown."""

    device: Device = "cpu"
    name: str = "CPU"
    major: int = 0
    minor: int = 0
    arch: str = ""
    triton: bool = False
    memory_bytes: int = 0
    bf16: bool = False

    @property
    def torch_device(self) -> str:
        """The name torch has for the device: AMD's go by "cuda" too."""
        return "cuda" if self.device == "rocm" else self.device


def probe(index: int = 0) -> Capabilities:
    """The GPU number `index` of this machine, or its CPU; never raises, and does not import triton."""
    try:
        if torch.cuda.is_available():
            return _probe_cuda(index)
        if torch.backends.mps.is_available():
            return Capabilities("mps", "Apple GPU", bf16=_mps_has_bf16())
    except (RuntimeError, AssertionError, AttributeError, OSError):
        pass  # a driver that is half there raises all kinds: the CPU always works
    return Capabilities()


def _probe_cuda(index: int) -> Capabilities:
    properties = torch.cuda.get_device_properties(index)
    triton = importlib.util.find_spec("triton") is not None
    memory_bytes = int(properties.total_memory)
    if torch.version.hip is not None:
        arch = str(properties.gcnArchName).split(":")[0]
        bf16 = torch.cuda.is_bf16_supported()
        return Capabilities("rocm", properties.name, 0, 0, arch, triton, memory_bytes, bf16)
    major, minor = torch.cuda.get_device_capability(index)
    # torch calls emulated bf16 supported too; the units came with Ampere
    return Capabilities("cuda", properties.name, major, minor, "", triton, memory_bytes, major >= 8)


def _mps_has_bf16() -> bool:
    try:
        torch.zeros(1, dtype=torch.bfloat16, device="mps")
    except (RuntimeError, TypeError):
        return False
    return True
