"""What one run of the convergence lab is: a frozen, declarative variant."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

METHODS = ("swarm", "data-parallel", "sparseloco")
INNER = ("muon", "adamw")
VALUES = ("codec", "one-magnitude", "float32")
LATE = ("let-go", "fold-next", "put-back")
DENSE = 4096


@dataclass(frozen=True)
class Density:
    """What a peer sends: `kept` of 4096 values with `bits` (2 or 32) each, folded with `gain`."""

    kept: int
    bits: int = 2
    gain: float = 2.0


@dataclass(frozen=True)
class Variant:
    """One run. The number of peers is the length of `steps`: how many inner steps each of them does in a round.

    method       "swarm": the production rules. "data-parallel": no rounds, one optimizer on the batches of all peers.
                 "sparseloco": that paper's published rule (rules.py).
    densities    one per peer, or one for all.
    values       what a kept value travels as: the codec's two magnitudes, or, for comparison only, one magnitude per
                 chunk or its float32.
    overlap      the fold arrives when this share of the next round's steps is done (0: everybody waits for it).
    lost         this share of the contributions misses its manifest. "let-go": never folded. "fold-next": the next
                 manifest has them, with `age_factor`. "put-back": back into the residual whole (lab only).
    joins        rounds at whose start the last peers of `steps` join, one each; the others are there from the start.
    tokens       the run ends when the manifests have taken this many, and the learning rate's schedule with it.
    lr_muon, lr_adam, batch, context: None for the preset's.
    """

    name: str
    steps: tuple[int, ...] = (10, 10, 10, 10)
    densities: tuple[Density, ...] = (Density(64),)
    eta: float = 1.0
    mu: float = 0.0
    rho: float = 0.5
    beta: float = 0.95
    age_factor: float = 0.5
    error_feedback: bool = True
    values: str = "codec"
    overlap: float = 0.0
    lost: float = 0.0
    late: str = "let-go"
    joins: tuple[int, ...] = ()
    method: str = "swarm"
    inner: str = "muon"
    lr_muon: float | None = None
    lr_adam: float | None = None
    batch: int | None = None
    context: int | None = None
    tokens: int = 1_228_800
    preset: str = "demo"
    corpus: str = "moby-dick"
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse what the lab can't run. Raises ValueError."""
        for value, known in ((self.method, METHODS), (self.inner, INNER), (self.values, VALUES), (self.late, LATE)):
            if value not in known:
                raise ValueError(f"{self.name}: {value!r} is none of {known}")
        if not self.steps or min(self.steps) < 1 or len(self.densities) not in (1, len(self.steps)):
            raise ValueError(f"{self.name}: needs steps for every peer, and one density or one for each peer")
        if not 0 <= self.overlap < 1 or not 0 <= self.lost < 1 or len(self.joins) >= len(self.steps):
            raise ValueError(f"{self.name}: overlap and lost are in [0, 1), and somebody must be there from the start")
        if self.joins != tuple(sorted(self.joins)) or self.tokens < 1:
            raise ValueError(f"{self.name}: joins are in order, and there are tokens")
        if self.method == "sparseloco" and self.mu:
            raise ValueError(f"{self.name}: SparseLoCo has no outer momentum")

    @property
    def peers(self) -> int:
        """K."""
        return len(self.steps)

    def density(self, peer: int) -> Density:
        """What a peer sends."""
        return self.densities[peer % len(self.densities)]

    def joins_at(self, peer: int) -> int:
        """The round at whose start a peer is there."""
        late = peer - (self.peers - len(self.joins))
        return self.joins[late] if late >= 0 else 0

    @property
    def plain(self) -> dict[str, Any]:
        """Everything but the name, as JSON values."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del fields["name"]
        return fields

    def seeded(self, seed: int) -> Variant:
        """The same with another seed: other starting parameters, batches and losses."""
        return replace(self, seed=seed)
