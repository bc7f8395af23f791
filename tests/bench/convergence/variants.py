"""A question of the lab, and the variants that most questions start from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.bench.convergence.variant import DENSE, Density, Variant


@dataclass(frozen=True)
class Question:
    """A part of the table. Losses are compared with that of the variant named `against`, seed by seed."""

    title: str
    against: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (1,)

    @property
    def runs(self) -> tuple[Variant, ...]:
        """Every variant with every seed."""
        return tuple(variant.seeded(seed) for seed in self.seeds for variant in self.variants)


def sparse(part: int, gain: float = 2.0) -> tuple[Density, ...]:
    """1/part of the values, two bits each."""
    return (Density(DENSE // part, 2, gain),)


DENSE32 = (Density(DENSE, 32, 1.0),)
DENSE2 = (Density(DENSE, 2, 1.0),)
TOKENS = 1_228_800
NESTEROV = {"eta": 0.7, "mu": 0.6}


def peers(count: int, steps: int = 10) -> tuple[int, ...]:
    """Equal step counts."""
    return (steps,) * count


BASE = Variant("1/64, gain 2, local residual", densities=sparse(64))
SIXTEENTH = replace(BASE, name="1/16, gain 2, local residual", densities=sparse(16))
DENSE_MULOCO = Variant("dense float32, Nesterov 0.7/0.6", densities=DENSE32, **NESTEROV)
ALONE = Variant("one peer alone, same time", peers(1), DENSE32, tokens=TOKENS // 4)
DATA_PARALLEL = Variant("data-parallel Muon", method="data-parallel", densities=DENSE32)

KEY = (
    DENSE_MULOCO,
    DATA_PARALLEL,
    replace(DENSE_MULOCO, name="dense 2-bit, Nesterov 0.7/0.6", densities=DENSE2),
    BASE,
    replace(BASE, name="1/64, gain 2, restart at the anchor", rho=0.0),
    replace(BASE, name="1/64, gain 2, no error feedback", error_feedback=False),
    SIXTEENTH,
    ALONE,
)
