"""What can go wrong on a device: too little memory, which smaller micro-batches may cure, and its loss, which nothing
here cures."""

from __future__ import annotations

import torch

_HOST_ALLOCATOR = "DefaultCPUAllocator"
_LOST_DEVICE = ("CUDA error:", "HIP error:")


class OutOfDeviceMemory(RuntimeError):
    """One sequence in one layer does not fit, so no smaller micro-batch helps."""


class DeviceLost(RuntimeError):
    """The device answers no more. Parameters and optimizer state in host memory may be from between two steps."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that device memory, or on the CPU main memory, was too short for a tensor."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _HOST_ALLOCATOR in str(error)


def is_device_lost(error: BaseException) -> bool:
    """Whether `error` comes from a device that can't go on; its context is of no more use to this process."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    kinds = getattr(torch, "AcceleratorError", None)
    if kinds is not None and isinstance(error, kinds):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(_LOST_DEVICE)
