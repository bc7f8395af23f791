"""How a model's tensors lie in one flat float32 vector.

Everything of the model's size (anchor, momentum, residual, local parameters) is one flat vector in layout order, so
that the codec, the fold and the digests are written once and never meet a model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
from blake3 import blake3

ROLES = ("matrix", "embedding", "small")
DEFAULT_SMALL_NUMEL = 1024
FINGERPRINT_BYTES = 16


class LayoutError(ValueError):
    """A layout that can't exist, or an array that doesn't fit one."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its name, its shape (no dimension of zero), and its role for optimizer and codec."""

    name: str
    shape: tuple[int, ...]
    role: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise LayoutError(f"tensor {self.name!r}: unknown role {self.role!r}, use one of {ROLES}")
        if not self.name or any(size <= 0 for size in self.shape):
            raise LayoutError(f"tensor {self.name!r}: needs a name and positive dimensions, got {self.shape}")

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Tensors in their fixed order.

    A tensor with role "small", or with at most `small_numel` values, travels as float16 instead of being sparsified.
    """

    tensors: tuple[TensorSpec, ...]
    small_numel: int = DEFAULT_SMALL_NUMEL

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if not names:
            raise LayoutError("a layout needs at least one tensor")
        if len(set(names)) != len(names):
            raise LayoutError("a layout's tensor names must be unique")
        if self.small_numel < 0:
            raise LayoutError("small_numel can't be negative")

    @cached_property
    def numel(self) -> int:
        """Number of parameters, P."""
        return sum(tensor.numel for tensor in self.tensors)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Per tensor, its place in the flat vector."""
        places, start = [], 0
        for tensor in self.tensors:
            places.append(slice(start, start + tensor.numel))
            start += tensor.numel
        return tuple(places)

    @cached_property
    def index(self) -> dict[str, int]:
        """Tensor name -> its position in `tensors`."""
        return {tensor.name: position for position, tensor in enumerate(self.tensors)}

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that two layouts share only when names, shapes, roles, order and `small_numel` are equal."""
        hasher = blake3(b"tscale layout 1\0" + self.small_numel.to_bytes(8, "little"))
        for tensor in self.tensors:
            for text in (tensor.name, tensor.role, "x".join(map(str, tensor.shape))):
                raw = text.encode()
                hasher.update(len(raw).to_bytes(4, "little") + raw)
        return hasher.digest(length=FINGERPRINT_BYTES)

    def is_small(self, position: int) -> bool:
        """Whether the tensor at `position` travels as float16."""
        tensor = self.tensors[position]
        return tensor.role == "small" or tensor.numel <= self.small_numel

    def with_small_numel(self, small_numel: int) -> "Layout":
        """The same tensors under another limit (the swarm's spec decides it)."""
        return replace(self, small_numel=small_numel)

    def view(self, flat: np.ndarray, name: str) -> np.ndarray:
        """The named tensor as a view of `flat` [P], in its own shape; writing to it writes to `flat`."""
        position = self.index[name]
        return flat[self.slices[position]].reshape(self.tensors[position].shape)

    def views(self, flat: np.ndarray) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """Every tensor with its view of `flat` [P], in order."""
        for tensor, place in zip(self.tensors, self.slices, strict=True):
            yield tensor, flat[place].reshape(tensor.shape)

    def check(self, flat: np.ndarray, what: str = "vector") -> None:
        """Raises LayoutError unless `flat` is a C-contiguous float32 [P] array."""
        if flat.dtype != np.float32 or flat.shape != (self.numel,) or not flat.flags.c_contiguous:
            raise LayoutError(f"{what}: need contiguous float32 [{self.numel}], got {flat.dtype} {flat.shape}")
