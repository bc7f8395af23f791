"""Rungs of the density ladder: how many values of a chunk travel, and with how many bits."""

from collections.abc import Iterable
from dataclasses import dataclass

from tscale.kernels.codec.errors import CodecError

CHUNK = 4096


@dataclass(frozen=True)
class Rung:
    """`kept_per_chunk` of 4096 values are candidates to be sent, as a sign and one magnitude bit (`bits` 2).

    4096 with 2 bits is the dense two-bit rung, 4096 with 32 bits sends every value exactly.
    """

    kept_per_chunk: int
    bits: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.kept_per_chunk <= CHUNK:
            raise CodecError(f"kept_per_chunk must be 1..{CHUNK}, not {self.kept_per_chunk}")
        if self.bits not in (2, 32):
            raise CodecError(f"bits must be 2 or 32, not {self.bits}")
        if self.bits == 32 and self.kept_per_chunk != CHUNK:
            raise CodecError("32-bit values are only sent dense (kept_per_chunk 4096)")

    @property
    def exact(self) -> bool:
        """Whether every value travels as its float32, leaving no residual."""
        return self.bits == 32


def allows(rung: Rung, allowed: Rung | Iterable[Rung] | None) -> bool:
    """Whether `rung` is the one, or among the ones, that a receiver accepts; None accepts all."""
    if allowed is None:
        return True
    return rung == allowed if isinstance(allowed, Rung) else rung in tuple(allowed)
