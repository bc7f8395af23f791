"""How much memory a computation takes, found by running it on tensors without contents.

The shapes and lifetimes are those of the real run, because it is the same code; only numbers are missing, so a layer
of any size takes a fraction of a second. What a kernel takes and gives back within one operation does not show.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Given = TypeVar("Given")


@dataclass(frozen=True)
class Footprint:
    """The most bytes held at one time, and those still held in the end by what was returned."""

    peak_bytes: int
    kept_bytes: int


class _Meter(TorchDispatchMode):
    """Adds up the storages that operations make, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return out

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        size_bytes = storage.nbytes()
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(storage, self._gone, storage._cdata, size_bytes)

    def begin(self) -> None:
        """Count from here: what is held now is nothing."""
        self.held_bytes = self.peak_bytes = 0

    def _gone(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.held_bytes -= size_bytes


def footprint(prepare: Callable[[], Given], work: Callable[[Given], object]) -> Footprint:
    """The memory that `work(prepare())` takes, without what `prepare` made.

    Both run with fake tensors: what they create has a shape and no contents. `work` must not let go of what was
    prepared.
    """
    with FakeTensorMode(), _Meter() as meter:
        given = prepare()
        meter.begin()
        kept = work(given)
        result = Footprint(meter.peak_bytes, meter.held_bytes)
        del kept
    return result
